"""Episodes that begin within an earlier win: what is given, what trains, what counts, and how the start moves."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from conftest import RecordingCritic, RecordingEngine, logged
from spear_rl.algorithms import gigpo, grpo, ppo, spear
from spear_rl.app.build.cautions import cautions
from spear_rl.app.config import load
from spear_rl.app.train import train_from
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError
from spear_rl.rollout import ChatRenderer, Observation, StepResult, Task, collect_groups
from spear_rl.rollout.choice import MAX_WINS, Start, TaskChoice
from spear_rl.rollout.collect import demonstration
from spear_rl.rollout.rendering.renderer import LAYOUTS
from spear_rl.rollout.workers.pool import Pool
from spear_rl.train.step import train_step
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

GAMES = {
    "household": {"level": "starter", "expert": "optimal"},
    "sokoban": {"level": "starter", "expert": "optimal"},
    "webshop": {"level": "tiny"},
    "lookup": {"num_digits": 3},
}


@pytest.fixture(scope="module")
def words():
    """A tokenizer that knows the letters of every environment."""
    return tiny_tokenizer(["".join(map(chr, range(32, 127))), "go to desk 1", "look", "search[red shoes]"])


class Silly:
    """A generator that always writes the same."""

    def __init__(self, tokenizer) -> None:
        self._ids, self.num_asked = [*tokenizer.encode("look", add_special_tokens=False), tokenizer.eos_token_id], 0

    def generate(self, prompts):
        self.num_asked += len(prompts)
        return [Completion(list(self._ids), [-2.0] * len(self._ids)) for _ in prompts]


def won(task: Task, renderer: ChatRenderer, layout) -> Trajectory:
    found = demonstration(task, renderer=renderer, layout=layout, tagged=True, seed=0)
    assert found.success
    return found


def first_long_win(env: str, renderer, layout) -> tuple[Task, Trajectory]:
    for task in ENVIRONMENTS[env]("train", **GAMES[env])[:40]:
        found = demonstration(task, renderer=renderer, layout=layout, tagged=True, seed=0)
        if found.success and len(found.turns) >= 2:
            return task, found
    raise AssertionError(f"no win of two turns in {env}")


def start_of(win: Trajectory, num_given: int) -> Start:
    return Start(tuple(replace(turn, prompt_ids=[], images=()) for turn in win.turns), num_given)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("env", GAMES)
def test_given_turns_are_those_of_the_win_and_the_policy_goes_on_from_there(env, layout, workers, words):
    renderer, lay_out = ChatRenderer(words), partial(LAYOUTS[layout], detail="full")
    task, win = first_long_win(env, renderer, lay_out)
    rng = random.Random(f"{env}/{layout}")
    num_given, generator = rng.randint(1, len(win.turns) - 1), Silly(words)
    settings = {"group_size": 3, "generator": generator, "renderer": renderer, "layout": lay_out, "step": 0}
    tasks, starts = [task, task], [start_of(win, num_given), None]
    if workers:
        with Pool(num_workers=workers) as pool:
            groups = collect_groups(tasks, **settings, max_turns=num_given + 2, starts=starts, envs=pool)
    else:
        groups = collect_groups(tasks, **settings, max_turns=num_given + 2, starts=starts)
    restarted, ordinary = groups
    for t in restarted.trajectories:
        assert t.num_given == num_given
        assert t.turns[:num_given] == win.turns[:num_given]
        after = t.turns[num_given]
        assert (after.observation, after.state_key) == (
            win.turns[num_given].observation,
            win.turns[num_given].state_key,
        )
        assert after.prompt_ids == win.turns[num_given].prompt_ids
        assert after.completion.logprobs[0] == -2.0
    assert all(t.num_given == 0 for t in ordinary.trajectories)
    assert "strayed" not in restarted.info
    assert restarted.has_given_turns
    assert not ordinary.has_given_turns
    own = sum(len(t.turns) - t.num_given for group in groups for t in group.trajectories)
    assert generator.num_asked == own


def test_given_turns_win_where_the_policy_repeats_the_rest(words):
    renderer, lay_out = ChatRenderer(words), partial(LAYOUTS["chat"], detail="full")
    for env in GAMES:
        task, win = first_long_win(env, renderer, lay_out)
        for num_given in range(len(win.turns)):
            rest = iter([turn.completion for turn in win.turns[num_given:]])
            generator = type("Rest", (), {"generate": lambda self, prompts, rest=rest: [next(rest) for _ in prompts]})()
            [group] = collect_groups(
                [task], group_size=1, generator=generator, renderer=renderer, layout=lay_out,
                max_turns=len(win.turns), step=0, starts=[start_of(win, num_given)],
            )  # fmt: skip
            [t] = group.trajectories
            assert (t.success, t.reward, t.num_given) == (True, win.reward, num_given)
            assert t.last_observation == win.last_observation


class Fickle:
    """Goes another way in every second environment, or each time."""

    made = 0
    rarely = 2

    def __init__(self) -> None:
        Fickle.made += 1
        self._other, self._turn = Fickle.made % Fickle.rarely == 0, 0

    def reset(self) -> Observation:
        return Observation("begin", state_key="begin")

    def step(self, action: str) -> StepResult:
        self._turn += 1
        where = "there" if self._other and self._turn == 1 else "here"
        return StepResult(Observation(f"{where} {self._turn}", state_key=where), reward=0.0, done=self._turn == 4)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("rarely", "num_given"), [(1, 0), (2, 2)])
def test_where_a_game_does_not_repeat_itself_the_episode_is_played_from_the_start(words, rarely, num_given):
    Fickle.made, Fickle.rarely = 0, rarely
    task = Task("fickle", Fickle)
    seen = ["begin", "here 1", "here 2", "here 3"]
    ids = words.encode("look", add_special_tokens=False)
    win = tuple(
        Turn([], Completion(ids, [-1.0] * len(ids)), observation=text, state_key=text.split()[0]) for text in seen
    )
    [group] = collect_groups(
        [task], group_size=4, generator=Silly(words), renderer=ChatRenderer(words), max_turns=6, step=0,
        starts=[Start(win, 2)], max_response_tokens=1000,
    )  # fmt: skip
    assert group.info["strayed"] == str(4 if rarely == 1 else 2)
    assert sorted(t.num_given for t in group.trajectories) == sorted([num_given] * 2 + [0] * 2)
    for t in group.trajectories:
        assert len(t.turns) == 4
        assert all(turn.completion.logprobs[0] == -2.0 for turn in t.turns[t.num_given :])


# --- the choice of starts


def panel(size: int, families: int = 2) -> list[Task]:
    return [Task(f"task/{n}", make_env=lambda: None, family=f"f{n % families}") for n in range(size)]  # type: ignore[arg-type, return-value]


def episode(won: bool, num_turns: int, num_given: int = 0) -> Trajectory:
    turns = [Turn([1], Completion([2], [-0.5]), state_key=str(n), observation=f"seen {n}") for n in range(num_turns)]
    return Trajectory(turns, Stop.DONE, success=won, num_given=num_given)


def noted(choice: TaskChoice, step: int, fresh: list[int], success, num_turns: int = 6):
    """One step in which `success(chosen)` of four episodes win; the chosen groups."""
    chosen = choice.chosen(fresh, step)
    groups = []
    for one in chosen:
        num_given = one.start.num_given if one.start else 0
        wins = success(one)
        played = [episode(n < wins, num_turns, num_given) for n in range(4)]
        groups.append(Group(f"task/{one.place}", played, step, {"family": f"f{one.place % 2}"}))
    choice.noted(chosen, groups, step)
    return chosen


@pytest.mark.parametrize("seed", range(6))
def test_the_start_moves_back_while_it_is_won_and_forward_when_it_is_lost(seed):
    rng = random.Random(seed)
    choice = TaskChoice(panel(400), seed=seed, restart_share=0.5, restart_success=0.5)
    left = {"f0": 1, "f1": 1}
    for step in range(30):
        results: dict[int, int] = {}

        def success(one, results=results):
            results[one.place] = rng.choice([0, 1, 2, 4]) if one.start else 2
            return results[one.place]

        length = rng.randint(2, 9)
        chosen = noted(choice, step, [10 * step + n for n in range(8)], success, num_turns=length)
        restarted = [one for one in chosen if one.start]
        assert len(chosen) == 8
        assert len({one.place for one in chosen}) == 8
        assert len(restarted) <= 4
        for one in restarted:
            assert one.start.num_given == max(len(one.start.win) - left[f"f{one.place % 2}"], 0)
        for family in left:
            begun = [one for one in restarted if family == f"f{one.place % 2}"]
            wins = sum(results[one.place] for one in begun)
            if begun and wins >= 2 * len(begun):
                left[family] += any(left[family] <= len(one.start.win) for one in begun)
            elif begun and not wins:
                left[family] -= left[family] > 1


def test_a_task_that_its_whole_group_solved_is_not_restarted():
    choice = TaskChoice(panel(400), seed=0, restart_share=0.5)
    for step in range(3):
        chosen = noted(choice, step, [8 * step + n for n in range(8)], lambda one: 4 if one.place % 3 else 2)
        assert all(one.place % 3 == 0 for one in chosen if one.start)
        assert step == 0 or any(one.start for one in chosen)


def test_a_start_that_has_come_to_the_beginning_is_an_ordinary_group_and_goes_forward_again_when_it_is_lost():
    choice, given = TaskChoice(panel(900, families=1), seed=0, restart_share=0.25), []
    for step in range(30):
        fresh, chosen = [8 * step + n for n in range(8)], []
        wins = 0 if step > 18 else 3
        chosen = noted(choice, step, fresh, lambda one, wins=wins: wins if one.start else 3)
        given.append({one.start.num_given for one in chosen if one.start})
        rows = {row["place"]: row for row in choice.state_dict()["results"]}
        for one in chosen:
            if one.start and not one.start.num_given:
                assert (rows[one.place]["num_won"], rows[one.place]["step"]) == (wins, step)
    assert given[0] == set()
    assert given[1] == {5}
    assert given[15:19] == [{0}] * 4
    assert max(given[-1]) > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_choice_begins_where_the_first_one_would_have(seed):
    def play(choice, steps):
        rng = random.Random(seed + steps[0])
        return [
            noted(choice, s, [9 * s + n for n in range(9)], lambda _: rng.randint(0, 4), num_turns=3 + s % 3)
            for s in steps
        ]

    def made():
        return TaskChoice(panel(300), seed=seed, restart_share=0.3, return_share=0.3)

    first, second = made(), made()
    play(first, range(5))
    state = first.state_dict()
    expected = play(first, range(5, 9))
    assert sum(one.origin == "restarted" for step in expected for one in step)
    assert sum(one.origin == "returned" for step in expected for one in step)
    second.load_state_dict(state)
    assert play(second, range(5, 9)) == expected


def test_only_so_many_wins_are_kept():
    choice = TaskChoice(panel(900), seed=0, restart_share=0.1)
    for step in range(4):
        noted(choice, step, [200 * step + n for n in range(200)], lambda _: 3)
    rows = choice.state_dict()["results"]
    assert sum(bool(row["win"]) for row in rows) == MAX_WINS
    assert all(row["win"] for row in rows[-MAX_WINS:])
    assert len(rows) > MAX_WINS


def test_settings_that_cannot_be_are_one_sentence_and_one_without_effect_is_told():
    with pytest.raises(ConfigError, match=r"rollout\.restart_success"):
        load("lookup", ["rollout.restart_success=0"])
    with pytest.raises(ConfigError, match=r"rollout\.restart_share"):
        load("lookup", ["rollout.restart_share=-0.1"])
    alone, beside = (cautions(load("lookup", [f"rollout.num_tasks={n}", "rollout.restart_share=0.5"])) for n in (1, 2))
    assert ["rollout.num_tasks to 2" in text for text in alone] == [True]
    assert beside == []


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_more_than_all_tasks_fill_the_step_with_restarts_first_and_one_group_is_ordinary(seed):
    rng = random.Random(seed)
    choice, num_tasks = TaskChoice(panel(900), seed=seed, restart_share=1.0, return_share=1.0), rng.randint(1, 9)
    for step in range(12):
        chosen = noted(choice, step, [num_tasks * step + n for n in range(num_tasks)], lambda _: rng.randint(0, 3))
        assert len(chosen) == num_tasks
        assert sum(one.start is not None for one in chosen) <= num_tasks - 1
        assert len({one.place for one in chosen}) == num_tasks


# --- through the training step and the real trainer


def restarted_group(rng: random.Random, task: str, tag: int, wins: list[bool], num_given: int) -> Group:
    def one(number: int, is_won: bool) -> Trajectory:
        turns = [
            Turn([tag], Completion([7, 8], [-(tag + number) - n / 10] * 2), state_key=f"{n}", observation=f"{n}")
            for n in range(num_given + rng.randint(1, 3))
        ]
        turns[-1] = replace(turns[-1], reward=float(is_won))
        return Trajectory(turns, Stop.DONE, success=is_won, num_given=num_given)

    info = {"family": "f", "origin": "restarted" if num_given else "fresh"}
    return Group(task, [one(n, is_won) for n, is_won in enumerate(wins)], 0, info)


@pytest.mark.parametrize("base", [grpo, gigpo])
@pytest.mark.parametrize("seed", range(4))
def test_given_turns_do_not_train_and_their_groups_count_apart(base, seed, tokenizer):
    rng = random.Random(seed)
    num_given = rng.randint(1, 4)
    ordinary = [restarted_group(rng, f"t{n}", 100 * (n + 1), [True, False, False, False], 0) for n in range(2)]
    given = restarted_group(rng, "g", 900, [True, True, True, False], num_given)
    algorithm, engine = spear(base(), bonus=None, imitation=1.0), RecordingEngine(tokenizer, [])
    metrics = train_step(0, collect=lambda _: [*ordinary, given], algorithm=algorithm, engine=engine, rng=rng)
    [batch] = [term.batch for term in engine.updates[-1]]
    trained = set((-batch.old_logprobs[batch.mask]).mul(10).round().int().tolist())
    own = {round((900 + m) * 10 + n) for m, t in enumerate(given.trajectories) for n in range(num_given, len(t.turns))}
    assert {value for value in trained if value >= 9000} == own
    assert metrics["policy/dropped_given"] == 4 * num_given
    assert metrics["rollout/success"] == 0.25
    assert metrics["rollout/episodes"] == 8
    assert metrics["rollout/restarted_groups"] == 1
    assert metrics["rollout/restarted_success"] == 0.75
    assert metrics["rollout/given_turns"] == num_given
    assert metrics["rollout/strayed_restarts"] == 0
    written = [t for group in [*ordinary, given] for t in group.trajectories]
    assert metrics["rollout/tokens"] == 2 * sum(len(t.turns) - t.num_given for t in written)
    assert list(algorithm.imitation.history.means) == [0.25, 0.25]
    assert {stored.item.task for stored in algorithm.imitation.buffer.items} == {"t0", "t1"}


def test_the_critic_learns_nothing_from_given_turns(tokenizer):
    rng = random.Random(0)
    given = restarted_group(rng, "g", 900, [True, False], 2)
    engine = RecordingEngine(tokenizer, [])
    engine.critic = RecordingCritic()
    train_step(0, collect=lambda _: [given], algorithm=ppo(), engine=engine, rng=rng)
    [(batch, _, _, _)] = engine.critic.updates
    assert int(batch.mask.sum()) == 2 * sum(len(t.turns) - 2 for t in given.trajectories)
    assert torch.isfinite(batch.advantages).all()


def test_no_stored_win_joins_a_group_with_given_turns(tokenizer):
    rng = random.Random(0)
    algorithm = spear(grpo(), bonus=None, imitation=1.0, join_lost=True)
    engine = RecordingEngine(tokenizer, [])
    for step, groups in enumerate(
        [[restarted_group(rng, "t", 100, [True, False], 0)], [restarted_group(rng, "t", 200, [False, False], 1)]]
    ):
        metrics = train_step(step, collect=lambda _, g=groups: g, algorithm=algorithm, engine=engine, rng=rng)
    assert metrics["replay/joined_groups"] == 0


SMALL = [
    "run.steps=6", "run.checkpoint_every=3", "eval.tasks=0", "run.threads=1", "run.trajectories_format=jsonl",
    "rollout.num_tasks=6", "rollout.group_size=4", "sft.epochs=1", "algorithm.bonus.steps=6",
    "algorithm.imitation.warm_steps=1",
]  # fmt: skip
RESTARTS = ["rollout.restart_share=0.34"]


def trained(run: Path, source: str, *settings: str) -> list[dict]:
    train_from(load(source, [f"run.dir={run}", *SMALL, *settings]))
    return logged(run)


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("lookup", ["sft.episodes=160"]),
        ("lookup", ["sft.episodes=160", "rollout.workers=2", "rollout.layout=turns", "algorithm.name=spear-gigpo"]),
        pytest.param(
            "quickstart",
            ["sft.episodes=2400", "optim.num_minibatches=1", "optim.decay=constant"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_with_restarts_is_resumed_exactly(tmp_path, source, settings):
    whole = trained(tmp_path / "whole", source, *RESTARTS, *settings)
    assert sum(row["rollout/restarted_groups"] for row in whole) > 0
    assert all(row["rollout/strayed_restarts"] == 0 for row in whole)
    for row in whole:
        assert row["rollout/episodes"] == 4 * (6 - row["rollout/restarted_groups"])
        assert row.get("policy/dropped_given", 0) == 4 * row["rollout/restarted_groups"] * row.get(
            "rollout/given_turns", 0
        )
    dumped = [
        json.loads(line)
        for path in sorted((tmp_path / "whole" / "trajectories").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(dumped) == 6 * 24
    assert any(row["turns"][0].get("dropped") == "given" for row in dumped)
    trained(tmp_path / "run", source, *RESTARTS, *settings, "run.steps=3")
    assert trained(tmp_path / "run", source, *RESTARTS, *settings, "run.resume=true") == whole
    ends = [tmp_path / name / "checkpoints" / "step_000006" / "model.safetensors" for name in ("run", "whole")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_run_warns_once_where_its_game_does_not_repeat_itself(caplog):
    choice = TaskChoice(panel(40), seed=0, restart_share=0.5)
    noted(choice, 0, [0, 1, 2, 3], lambda _: 2)
    with caplog.at_level(logging.WARNING, logger="spear_rl.rollout.choice"):
        for step in (1, 2):
            chosen = choice.chosen([4 * step + n for n in range(4)], step)
            groups = [Group(f"task/{one.place}", [episode(False, 3)], step, {"strayed": "1"}) for one in chosen]
            out = choice.noted(chosen, groups, step)
            assert all(group.info["origin"] in ("fresh", "returned") for group in out)
    assert [record.getMessage().count("rollout.restart_share") for record in caplog.records] == [1]
