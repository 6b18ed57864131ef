"""Playing episodes: prompts, both layouts, ends of episodes, and machinery that breaks."""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import RecordingEngine
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError
from spear_rl.rollout import (
    LAYOUTS,
    ChatRenderer,
    Observation,
    StepResult,
    Task,
    collect_groups,
    demonstration,
    growing_chat,
    independent_turns,
)
from spear_rl.rollout.collect import Rollouts, collect_within, cut
from spear_rl.train.step import collate, rows
from spear_rl.types import Completion, Stop, Trajectory, Turn

EMBEDDED = ("household", "lookup")
"""The environments that need no files."""


class Counting:
    """Says how many steps were taken; wins at `goal`; breaks at `breaks` as often as told."""

    def __init__(self, goal: int = 3, breaks: int = -1, times: list[int] | None = None) -> None:
        self._goal, self._breaks, self._times, self._taken = goal, breaks, times or [0], 0

    def reset(self) -> Observation:
        return Observation("red code ?", state_key="0", choices=("look", "7"))

    def step(self, action: str) -> StepResult:
        if self._taken == self._breaks and self._times[0] > 0:
            self._times[0] -= 1
            raise OSError("the wire came off")
        self._taken += 1
        done = self._taken == self._goal
        return StepResult(
            Observation(f"code {self._taken}", str(self._taken)), reward=float(done), done=done, used_tool=True
        )

    def close(self) -> None:
        raise OSError("closing hurts too")


def play(tokenizer, task: Task, answers=("look",), **options):
    options = {"group_size": 2, "max_turns": 5, "step": 0, "layout": partial(growing_chat, detail="short")} | options
    engine = options.pop("engine", None)
    engine = RecordingEngine(tokenizer, answers) if engine is None else engine
    return collect_groups([task], generator=engine, renderer=ChatRenderer(tokenizer), **options)[0]


def test_an_episode_ends_when_its_environment_says_so(tokenizer):
    group = play(tokenizer, Task("t", Counting, family="kind"))
    for trajectory in group.trajectories:
        assert trajectory.stop is Stop.DONE
        assert (len(trajectory.turns), trajectory.reward, trajectory.success) == (3, 1.0, True)
        assert [turn.state_key for turn in trajectory.turns] == ["0", "1", "2"]
    assert group.info["family"] == "kind"


def test_a_completion_that_is_cut_keeps_one_number_per_token():
    whole = Completion([1, 2, 3], [-0.1, -0.2, -0.3], weights=[1.0, 2.0, 3.0], entropies=[0.5, 0.6, 0.7])
    assert cut(whole, 2) == Completion([1, 2], [-0.1, -0.2], True, [1.0, 2.0], [0.5, 0.6])
    assert cut(whole, 3) is whole
    assert cut(Completion([1, 2], [-0.1, -0.2]), 1) == Completion([1], [-0.1], True)


def test_an_episode_is_cut_at_the_turn_limit(tokenizer):
    group = play(tokenizer, Task("t", Counting), max_turns=2)
    assert [(t.stop, len(t.turns), t.success) for t in group.trajectories] == [(Stop.MAX_TURNS, 2, False)] * 2


def test_babbling_is_no_way_out_of_an_episode_but_an_episode_that_ends_on_it_is_overlong(tokenizer):
    class Endless(RecordingEngine):
        def generate(self, prompts):
            return [Completion(c.token_ids, c.logprobs, truncated=True) for c in super().generate(prompts)]

    for max_turns, stop in ((5, Stop.DONE), (2, Stop.OVERLONG)):
        group = play(tokenizer, Task("t", Counting), engine=Endless(tokenizer, ["look"]), max_turns=max_turns)
        assert [(t.stop, len(t.turns)) for t in group.trajectories] == [(stop, min(max_turns, 3))] * 2


def test_a_prompt_over_the_context_limit_ends_the_episode_as_overlong(tokenizer):
    group = play(tokenizer, Task("t", Counting), max_context=12)
    assert {t.stop for t in group.trajectories} == {Stop.OVERLONG}
    assert all(len(turn.prompt_ids) <= 12 for t in group.trajectories for turn in t.turns)


class Forever:
    """Pays 0.5 per turn and never ends."""

    def reset(self) -> Observation:
        return Observation("red code ?")

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("again"), reward=0.5)

    def close(self) -> None:
        pass


class Numbered:
    """Completions of given lengths, episode by episode; stops at a prompt's own limit if `obeys`."""

    def __init__(self, lengths: list[list[int]], *, obeys: bool) -> None:
        self._lengths, self._obeys, self._asked, self.limits = lengths, obeys, [0] * len(lengths), []
        self._pending: list[tuple[int, list[int]]] = []

    def stream(self):
        return self

    def add(self, key, prompt):
        self._pending.append((key, prompt))

    def finished(self):
        done, self._pending = [self._completion(*pending) for pending in self._pending], []
        return done

    def __len__(self):
        return len(self._pending)

    def _completion(self, key, prompt):
        length = self._lengths[key][self._asked[key]]
        self._asked[key] += 1
        self.limits.append(getattr(prompt, "max_new_tokens", None))
        most = min(length, self.limits[-1]) if self._obeys and self.limits[-1] else length
        ids = list(range(10, 10 + most))
        return key, Completion(ids, [-float(i) for i in ids], truncated=most < length)


@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=4, max_size=4), min_size=2, max_size=2),
    budget=st.integers(1, 40),
    obeys=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_an_episode_writes_no_more_than_its_budget_and_ends_when_it_is_used_up(tokenizer, lengths, budget, obeys):
    generator = Numbered(lengths, obeys=obeys)
    task = Task("t", Forever, unfinished_reward=-1.0)
    group = play(tokenizer, task, engine=generator, max_turns=4, max_response_tokens=budget)
    for wanted, played in zip(lengths, group.trajectories, strict=True):
        left, expected = budget, []
        for length in wanted:
            if left:
                expected.append((min(length, left), length > left))
                left -= expected[-1][0]
        assert [(len(t.completion.token_ids), t.completion.truncated) for t in played.turns] == expected
        assert all(len(t.completion.logprobs) == len(t.completion.token_ids) for t in played.turns)
        is_cut_off = len(expected) < 4 or expected[-1][1]
        assert played.stop is (Stop.OVERLONG if is_cut_off else Stop.MAX_TURNS)
        assert played.reward == 0.5 * len(expected) - 1.0
    assert generator.limits[:2] == [budget, budget]
    assert all(limit >= 1 for limit in generator.limits)


def test_without_a_budget_prompts_have_no_limit_of_their_own(tokenizer):
    generator = Numbered([[5] * 4] * 2, obeys=True)
    group = play(tokenizer, Task("t", Forever), engine=generator, max_turns=4)
    assert [t.num_tokens for t in group.trajectories] == [20, 20]
    assert set(generator.limits) == {None}


def test_an_answer_that_ends_the_episode_with_its_last_token_counts(tokenizer):
    group = play(tokenizer, Task("t", Counting), engine=Numbered([[4, 4, 4]] * 2, obeys=True), max_response_tokens=12)
    assert [(t.stop, t.success, t.num_tokens) for t in group.trajectories] == [(Stop.DONE, True, 12)] * 2


def test_a_run_whose_every_first_prompt_is_too_long_names_the_setting(tokenizer):
    options = {"group_size": 2, "max_turns": 5, "step": 0, "renderer": ChatRenderer(tokenizer)}
    played = partial(collect_within, [Task("t", Counting)], generator=RecordingEngine(tokenizer, ["look"]), **options)
    assert [len(group.trajectories) for group in played(max_context=1000)] == [2]
    with pytest.raises(ConfigError, match=r"rollout\.max_context=3: every first prompt is longer"):
        played(max_context=3)


@given(num_all=st.integers(1, 9), num_tasks=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_epoch_plays_every_task_once_in_an_order_that_depends_on_the_step_alone(num_all, num_tasks, seed):
    tasks = [Task(str(number), Counting) for number in range(num_all)]

    def order(steps):
        played = []
        rollouts = Rollouts(lambda tasks, step: played.append((step, tasks)), tasks, num_tasks=num_tasks, seed=seed)
        for step in steps:
            rollouts(step)
        return dict(played)

    steps = order(range(num_all * 3))
    assert steps == order(reversed(range(num_all * 3)))
    names = [task.id for step in range(num_all * 3) for task in steps[step]]
    epochs = [names[first : first + num_all] for first in range(0, len(names), num_all)]
    assert all(sorted(epoch) == sorted(task.id for task in tasks) for epoch in epochs)
    if num_all == 9:
        assert len({*map(tuple, epochs)}) > 1


def test_a_rollout_returns_to_its_folder_and_needs_none(tokenizer, tmp_path, monkeypatch):
    class Wanderer(Counting):
        def step(self, action: str) -> StepResult:
            os.chdir("/")
            return super().step(action)

    class Fatal(Wanderer):
        def close(self) -> None:
            os.chdir("/")
            raise KeyboardInterrupt

    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    play(tokenizer, Task("t", Wanderer))
    assert os.getcwd() == str(home)
    with pytest.raises(KeyboardInterrupt):
        play(tokenizer, Task("t", Fatal))
    assert os.getcwd() == str(home)
    home.rmdir()
    assert {t.stop for t in play(tokenizer, Task("t", Wanderer)).trajectories} == {Stop.DONE}


def test_an_environment_that_breaks_once_is_set_up_again_and_the_episode_goes_on(tokenizer):
    group = play(tokenizer, Task("t", partial(Counting, 3, 1, [1])), group_size=3)
    assert group.num_failed == 0
    assert [t.reward for t in group.trajectories] == [1.0] * 3


def test_an_episode_that_breaks_twice_is_left_out_and_counted_never_a_zero_reward(tokenizer, caplog):
    group = play(tokenizer, Task("t", partial(Counting, 3, 1, [2])), group_size=3)
    assert group.num_failed == 1
    assert [t.reward for t in group.trajectories] == [1.0] * 2
    assert "the wire came off" in caplog.text


def test_a_step_in_which_everything_broke_is_an_error_that_names_the_cause(tokenizer):
    with pytest.raises(RuntimeError, match="all 2 episodes failed") as error:
        play(tokenizer, Task("t", partial(Counting, 3, 0, [99])))
    assert "the wire came off" in repr(error.value.__cause__)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_growing_chat_never_rewrites_a_token_and_trains_as_one_row(tokenizer, seed):
    rng = random.Random(seed)
    answers = [rng.choice(["look", "7", "\u2603 snow", "a<|end|>b", "", "code " * 9]) for _ in range(7)]
    group = play(tokenizer, Task("t", partial(Counting, 4)), answers=answers)
    for trajectory in group.trajectories:
        for turn, following in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            said = [*turn.prompt_ids, *turn.completion.token_ids]
            assert following.prompt_ids[: len(said)] == said
        assert len(rows(trajectory, [1.0] * len(trajectory.turns))) == 1


def test_independent_turns_train_as_a_row_each(tokenizer):
    layout = partial(independent_turns, detail="full")
    group = play(tokenizer, Task("t", partial(Counting, 4), instructions="look right"), layout=layout)
    trajectory = group.trajectories[0]
    assert len(rows(trajectory, [1.0] * 4)) == 4
    text = tokenizer.decode(trajectory.turns[3].prompt_ids)
    assert "look right" in text
    assert "Steps taken: 3. The last 2:" in text
    assert "[1] code 1\n> look\n[2] code 2\n> look\nNow: code 3" in text


def test_the_layout_now_shows_what_a_first_prompt_would_show_of_the_same_sight(tokenizer):
    group = play(tokenizer, Task("t", partial(Counting, 4), instructions="look right"), layout=LAYOUTS["now"])
    trajectory = group.trajectories[0]
    assert len(rows(trajectory, [1.0] * 4)) == 4
    for number, turn in enumerate(trajectory.turns):
        seen = f"code {number}" if number else "red code ?\nPossible actions: look; 7"
        alone = [{"role": "user", "content": f"look right\n\n{seen}"}]
        assert turn.prompt_ids == ChatRenderer(tokenizer).prompt(alone)


def test_the_full_prompt_lists_the_possible_actions_and_the_short_one_does_not(tokenizer):
    for name, layout in LAYOUTS.items():
        for detail in ("full", "short"):
            group = play(tokenizer, Task("t", Counting), layout=partial(layout, detail=detail))
            text = tokenizer.decode(group.trajectories[0].turns[0].prompt_ids)
            assert ("Possible actions: look; 7" in text) == (detail == "full"), (name, detail)


def test_the_same_episodes_train_the_same_tokens_in_every_layout(tokenizer):
    batches = []
    for layout in LAYOUTS.values():
        group = play(tokenizer, Task("t", Counting), layout=partial(layout, detail="short"))
        ones = [[1.0] * len(t.turns) for t in group.trajectories]
        batches.append(collate(group.trajectories, ones, pad_id=0))
    trained = [sorted(batch.input_ids[batch.mask].tolist()) for batch in batches]
    assert all(tokens == trained[0] for tokens in trained)


def test_merged_rows_keep_every_turns_own_numbers(tokenizer):
    group = play(tokenizer, Task("t", Counting), answers=["look", "7", "code 3"])
    trajectory = group.trajectories[0]
    batch = collate([trajectory], [[1.0, 2.0, 3.0]], pad_id=0, dropped=[["", "void", ""]])
    answers = [turn.completion.token_ids for turn in trajectory.turns]
    assert batch.input_ids[0][batch.mask[0]].tolist() == answers[0] + answers[2]
    assert batch.advantages[0][batch.mask[0]].tolist() == [1.0] * len(answers[0]) + [3.0] * len(answers[2])
    assert (batch.old_logprobs[0][batch.mask[0]] == -0.5).all()


def test_a_trajectory_that_does_not_train_gives_no_row(tokenizer):
    group = play(tokenizer, Task("t", Counting))
    reasons = [["flat_group"] * 3] * 2
    assert collate(group.trajectories, [[1.0] * 3] * 2, pad_id=0, dropped=reasons) is None


@pytest.mark.parametrize("env", EMBEDDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_demonstration_is_what_a_policy_saying_it_would_have_played(tokenizer, env, layout):
    task = ENVIRONMENTS[env]("train")[3]
    chosen = partial(LAYOUTS[layout], detail="full")
    shown = demonstration(task, renderer=ChatRenderer(tokenizer), layout=chosen, tagged=True, seed=1)
    said = [task.answer_format.format(action=action) for action in task.demonstrate(1)]
    engine = RecordingEngine(tokenizer, said)
    group = play(tokenizer, task, engine=engine, group_size=1, max_turns=len(said), layout=chosen)
    played = group.trajectories[0]
    assert [t.prompt_ids for t in played.turns] == [t.prompt_ids for t in shown.turns]
    assert [t.completion.token_ids for t in played.turns] == [t.completion.token_ids for t in shown.turns]
    assert played.reward == shown.reward


def test_a_tokenizer_without_a_chat_template_gets_plain_lines_and_says_so(tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.warns(UserWarning, match="no chat template"):
        renderer = ChatRenderer(bare)
    assert bare.decode(renderer.prompt([{"role": "user", "content": "look"}])) == "user: look\nassistant: "
    longer = renderer.extended([1, 2], [3], "right")
    assert longer[:3] == [1, 2, 3]
    assert bare.decode(longer[3:]) == "\nuser: right\nassistant: "


FRAGMENTS = [
    *("<action>", "</action>", "<think>", "</think>", "look", "7", "go to shelf 1", "<|end|>", "<|user|>"),
    *(
        "\u2603",
        "\U0001f600",
        "\x00",
        "\ud7ff",
        "\u202e",
        "\u00c3\u00a9",
        "\ufffd",
        "{",
        "}",
        "%s",
        "\n",
        " ",
        "A" * 3000,
    ),
]


def fuzzed(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return ""
    if kind == 1:
        return "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
                       for _ in range(rng.randrange(60)))  # fmt: skip
    return "".join(rng.choice(FRAGMENTS[:-1] if rng.random() < 0.98 else FRAGMENTS) for _ in range(rng.randrange(1, 8)))


@pytest.mark.parametrize("env", EMBEDDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_thousand_strange_answers_break_neither_environment_nor_renderer(tokenizer, env, layout):
    rng = random.Random(f"{env}/{layout}")
    tasks, answered = ENVIRONMENTS[env]("train"), 0

    class Strange:
        def generate(self, prompts):
            out = []
            for _ in prompts:
                ids = tokenizer.encode(fuzzed(rng), add_special_tokens=False)[:4000]
                ids = ids if rng.random() < 0.5 else [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(9))]
                out.append(Completion(ids, [0.0] * len(ids)))
            return out

    renderer = ChatRenderer(tokenizer)
    while answered < 2500:
        groups = collect_groups(
            rng.sample(tasks, 8),
            group_size=4,
            generator=Strange(),
            renderer=renderer,
            max_turns=6,
            step=0,
            layout=partial(LAYOUTS[layout], detail=rng.choice(["full", "short"])),
        )
        assert sum(group.num_failed for group in groups) == 0
        answered += sum(len(t.turns) for group in groups for t in group.trajectories)


def test_numpys_numbers_make_the_same_batch_as_plain_ones():
    def batch_of(number):
        completion = Completion([3, 4], [number(-0.5), number(-1.0)], weights=[number(0.5), number(1.0)])
        played = Trajectory([Turn([1, 2], completion, reward=1.0)], Stop.DONE)
        return collate([played], [[number(2.0)]], pad_id=0)

    plain, numpys = batch_of(float), batch_of(np.float64)
    for name in ("old_logprobs", "advantages"):
        assert torch.equal(getattr(plain, name), getattr(numpys, name))
        assert getattr(numpys, name).dtype == torch.float32
