"""Rows that another framework played become the core's groups."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.integrations.shared.episodes import Row, fields_of, groups_of
from spear_rl.train.step import collate
from spear_rl.types import Completion, Stop, Trajectory, Turn


def words(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def groups(rows: list[Row], **options):
    return groups_of(rows, **{"step": 3, "group_size": 1, "max_length": 9, "text": words} | options)


def test_a_turn_is_a_stretch_the_policy_wrote_and_used_a_tool_if_something_answered_it():
    row = Row("u", 0, 0, [1, 2], [3, 4, 5, 6, 7], [1, 1, 0, 0, 1], [-0.1, -0.2, 0, 0, -0.5], 1.0)
    [group] = groups([row])
    [played] = group.trajectories
    first, last = played.turns
    assert (first.prompt_ids, first.completion.token_ids, first.completion.logprobs) == ([1, 2], [3, 4], [-0.1, -0.2])
    assert (last.prompt_ids, last.completion.token_ids) == ([1, 2, 3, 4, 5, 6], [7])
    assert [turn.used_tool for turn in played.turns] == [True, False]
    assert [turn.reward for turn in played.turns] == [0.0, 1.0]
    assert (played.stop, played.success, last.text) == (Stop.DONE, True, "7")
    assert (group.task_id, group.step, group.num_failed) == ("u", 3, 0)


def test_a_response_that_fills_its_length_is_overlong():
    [group] = groups([Row("u", 0, 0, [1], [2, 3], [1, 1], [0.0, 0.0])], max_length=2)
    [played] = group.trajectories
    assert played.stop is Stop.OVERLONG
    assert played.turns[-1].completion.truncated


def test_rows_come_in_any_order_and_lost_episodes_are_counted():
    rows = [Row(group, session, number, [session], [number], [1], [0.0]) for group in "ba" for session in (10, 2)
            for number in (0, 1)]  # fmt: skip
    random.Random(0).shuffle(rows)
    found = groups(rows, group_size=3)
    assert [group.task_id for group in found] == ["a", "b"]
    assert [group.num_failed for group in found] == [1, 1]
    for group in found:
        assert [[t.completion.token_ids for t in played.turns] for played in group.trajectories] == [[[0], [1]]] * 2
        assert [played.turns[0].prompt_ids for played in group.trajectories] == [[2], [10]]


def test_weights_of_tokens_are_kept():
    [group] = groups([Row("u", 0, 0, [1], [2, 3, 4], [1, 0, 1], [0.0] * 3, 0.0, [0.5, 9.0, 2.0])])
    assert [turn.completion.weights for turn in group.trajectories[0].turns] == [[0.5], [2.0]]


@given(seed=st.integers(0, 10**6), chat=st.booleans())
@settings(max_examples=30, deadline=None)
def test_an_episode_of_ours_comes_back_with_the_trainers_log_probabilities(seed, chat):
    rng, turns = random.Random(seed), []
    for number in range(rng.randint(1, 4)):
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
        if chat and turns:
            prompt = [*turns[-1].prompt_ids, *turns[-1].completion.token_ids, *prompt]
        size = rng.randint(1, 4)
        said = Completion([rng.randrange(9) for _ in range(size)], [-1.0] * size)
        turns.append(Turn(prompt, said, state_key=str(number), reward=rng.random()))
    played = Trajectory(turns, Stop.DONE, success=True)
    laid = fields_of(collate([played], [[0.0] * len(turns)], pad_id=0))
    scores = iter([-rng.random() for _ in range(played.num_tokens)])
    expected = [[next(scores) for _ in turn.completion.token_ids] for turn in turns]
    flat = iter([x for turn in expected for x in turn])
    rows = []
    for number, fields in enumerate(laid):
        own = fields["response_mask"].tolist()
        logprobs = [next(flat) if mine else 9.0 for mine in own]
        about = None if number else ("task", "kind", played)
        rows.append(Row("u", 0, number, fields["prompts"].tolist(), fields["responses"].tolist(), own, logprobs,
                        episode=about))  # fmt: skip
    [group] = groups(rows)
    assert (group.task_id, group.info) == ("task", {"family": "kind"})
    back = group.trajectories[0]
    assert [turn.completion.logprobs for turn in back.turns] == expected
    bare = [replace(turn, completion=replace(turn.completion, logprobs=[])) for turn in turns]
    assert [replace(turn, completion=replace(turn.completion, logprobs=[])) for turn in back.turns] == bare
