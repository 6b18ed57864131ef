"""Which tasks a step plays: those that return, and what a run with them must keep."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import logged
from spear_rl.app.build.rollout import choice_of
from spear_rl.app.config import load
from spear_rl.app.train import train_from
from spear_rl.errors import ConfigError
from spear_rl.io.signals import Stop, Stopped
from spear_rl.rollout import Task
from spear_rl.rollout.choice import MEMORY, Result, TaskChoice
from spear_rl.rollout.collect import Rollouts
from spear_rl.types import Completion, Group, Trajectory, Turn
from spear_rl.types import Stop as Ending

SMALL = [
    "run.steps=6", "run.checkpoint_every=3", "sft.episodes=160", "sft.epochs=1", "eval.tasks=0", "rollout.num_tasks=4",
    "rollout.group_size=4", "run.threads=1", "run.trajectories_every=1", "algorithm.imitation.warm_steps=1",
]  # fmt: skip


def panel(size: int) -> list[Task]:
    return [Task(f"task/{n}", make_env=lambda: None, family=f"f{n % 2}") for n in range(size)]  # type: ignore[arg-type, return-value]


def episode(won: bool, num_turns: int = 1) -> Trajectory:
    turns = [Turn([1], Completion([2], [-0.5]), state_key=str(n), observation=f"seen {n}") for n in range(num_turns)]
    return Trajectory(turns, Ending.DONE, success=won)


class Played:
    """A stand-in for playing: groups with random numbers of wins, kept by step."""

    def __init__(self, seed: int, group_size: int) -> None:
        self._seed, self._group_size = seed, group_size
        self.steps: dict[int, list[Group]] = {}

    def __call__(self, tasks, *, step, **_):
        rng = random.Random(f"{self._seed}/{step}")
        size = self._group_size
        won = [rng.randint(0, size) for _ in tasks]
        self.steps[step] = [
            Group(task.id, [episode(n < count) for n in range(size)], step, {"family": task.family})
            for task, count in zip(tasks, won, strict=True)
        ]
        return self.steps[step]


def rollouts_of(play, tasks, *, num_tasks: int, seed: int, **settings) -> Rollouts:
    return Rollouts(play, tasks, num_tasks=num_tasks, seed=seed, choice=TaskChoice(tasks, seed=seed, **settings))


WHEN = {
    "lost": lambda won, size: won == 0,
    "mixed": lambda won, size: 0 < won < size,
    "unsolved": lambda won, size: won < size,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("seed", range(8))
def test_returned_tasks_were_played_before_and_their_latest_group_qualifies(when, seed):
    rng = random.Random(f"{when}/{seed}")
    size, num_tasks, share = rng.randint(2, 5), rng.randint(1, 12), rng.uniform(0.01, 1)
    tasks, play = panel(rng.choice([num_tasks * 2, 200])), Played(seed, size)
    collect = rollouts_of(play, tasks, num_tasks=num_tasks, seed=seed, return_share=share, return_when=when)
    latest: dict[str, int] = {}
    for step in range(12):
        fresh = [task.id for task in collect.tasks(step)]
        groups = collect(step)
        assert len(groups) == num_tasks
        assert all(len(group.trajectories) == size for group in groups)
        returned = [group.task_id for group in groups if group.info["origin"] == "returned"]
        candidates = {t for t, won in latest.items() if WHEN[when](won, size) and t not in fresh}
        assert set(returned) <= candidates
        assert len(returned) == min(len(candidates), max(round(share * num_tasks), 1))
        assert [group.task_id for group in groups] == fresh[: num_tasks - len(returned)] + returned
        assert max(Counter(group.task_id for group in groups).values()) <= max(Counter(fresh).values())
        latest |= {group.task_id: sum(t.success for t in group.trajectories) for group in groups}


def test_medium_success_and_long_absence_come_back_more_often():
    size, tasks = 8, panel(400)

    def shares(results: dict[int, Result]) -> list[float]:
        choice, drawn = TaskChoice(tasks, seed=0, return_share=0.5), Counter[int]()
        for step in range(10, 3010):
            moved = {p: Result(r.task, "", r.step + step - 10, r.num_won, r.num_played) for p, r in results.items()}
            choice._results = moved
            drawn.update(c.place for c in choice.chosen([399, 398], step) if c.origin == "returned")
        return [drawn[place] / 3000 for place in results]

    by_success = shares({n: Result(f"task/{n}", "", 9, won, size) for n, won in enumerate((0, 1, 2, 4))})
    assert all(a + 0.02 < b for a, b in pairwise(by_success))
    assert by_success[0] > 0.02
    by_age = shares({n: Result(f"task/{n}", "", step, 4, size) for n, step in enumerate((9, 7, 2))})
    assert all(a + 0.02 < b for a, b in pairwise(by_age))


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_choice_goes_on_as_the_first_one_would_have(seed):
    def fresh_rollouts():
        return rollouts_of(Played(seed, 4), panel(60), num_tasks=6, seed=seed, return_share=0.5)

    whole, first, second = fresh_rollouts(), fresh_rollouts(), fresh_rollouts()
    expected = [whole(step) for step in range(9)]
    for step in range(5):
        first(step)
    state = first.state_dict()
    first(5)  # what is played later is not in a state taken before
    second.load_state_dict(state)
    assert [second(step) for step in range(5, 9)] == expected[5:]


def test_the_memory_is_bounded_and_forgets_the_oldest():
    tasks = panel(3 * MEMORY)
    collect = rollouts_of(Played(0, 2), tasks, num_tasks=256, seed=0, return_share=0.1)
    for step in range(10):
        groups = collect(step)
    assert len(collect.state_dict()["results"]) == MEMORY
    assert [row["task"] for row in collect.state_dict()["results"]][-256:] == [group.task_id for group in groups]


def test_a_panel_that_changed_since_loses_only_the_tasks_that_moved():
    collect = rollouts_of(Played(0, 2), panel(40), num_tasks=8, seed=0, return_share=0.5)
    for step in range(4):
        collect(step)
    state = collect.state_dict()
    other = [Task("another", make_env=lambda: None), *panel(20)[1:]]  # type: ignore[arg-type, return-value]
    moved = rollouts_of(Played(0, 2), other, num_tasks=8, seed=0, return_share=0.5)
    moved.load_state_dict(state)
    kept = {row["place"] for row in moved.state_dict()["results"]}
    assert kept == {row["place"] for row in state["results"] if 0 < row["place"] < 20}
    for step in range(4, 8):
        moved(step)


def test_no_choice_is_made_unless_it_is_switched_on():
    assert choice_of(load("lookup"), panel(3)) is None
    assert choice_of(load("lookup", ["rollout.return_share=0.1"]), panel(3)) is not None
    with pytest.raises(ConfigError, match=r"rollout\.return_share"):
        load("lookup", ["rollout.return_share=1.1"])
    with pytest.raises(ConfigError, match=r"rollout\.return_when"):
        load("lookup", ["rollout.return_when=won"])


# --- through the real trainer


RETURNS = ["rollout.return_share=0.5"]


def trained(run: Path, *settings: str, source: str = "lookup", stop: Stop | None = None) -> Path:
    train_from(load(source, [f"run.dir={run}", *SMALL, *settings]), stop=stop)
    return run


def weights(run: Path, step: int = 6) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "run", *RETURNS)


def test_a_run_with_returning_tasks_says_how_many_came_back_and_how_they_went(whole):
    rows = logged(whole)
    assert rows[0]["rollout/returned_tasks"] == 0
    assert "rollout/returned_success" not in rows[0]
    assert {row["rollout/returned_tasks"] for row in rows[2:]} == {2}
    assert all(0 <= row["rollout/returned_success"] <= 1 for row in rows[2:])
    assert {row["rollout/episodes"] for row in rows} == {16}


def test_a_resumed_run_with_returning_tasks_ends_as_if_it_had_not_stopped(whole, tmp_path):
    run = trained(tmp_path / "run", *RETURNS, "run.steps=3", "algorithm.bonus.steps=6")
    trained(run, *RETURNS, "run.resume=true", "algorithm.bonus.steps=6")
    assert logged(run) == logged(whole)
    assert weights(run) == weights(whole)


def test_a_stop_in_the_middle_of_a_step_leaves_the_memory_of_the_last_whole_one(whole, tmp_path, monkeypatch):
    stop = Stop()
    stop.is_armed = True
    noted = TaskChoice.noted

    def interrupted(self, chosen, groups, step):
        found = noted(self, chosen, groups, step)
        if step == 4 and not stop.is_asked:
            stop.on_signal(15)
        return found

    monkeypatch.setattr(TaskChoice, "noted", interrupted)
    with pytest.raises(Stopped):
        trained(tmp_path / "run", *RETURNS, stop=stop)
    run = trained(tmp_path / "run", *RETURNS, "run.resume=true")
    assert logged(run) == logged(whole)
    assert weights(run) == weights(whole)


def test_switched_on_at_a_resume_it_begins_with_what_is_played_then(tmp_path):
    run = trained(tmp_path / "run", "run.steps=3")
    trained(run, "run.resume=true", *RETURNS)
    rows = logged(run)
    assert "rollout/returned_tasks" not in rows[2]
    assert (rows[3]["rollout/returned_tasks"], rows[5]["rollout/returned_tasks"]) == (0, 2)


def test_the_correction_of_another_sampler_keeps_the_memory(tmp_path):
    run = trained(tmp_path / "run", *RETURNS, "engine.importance_cap=2")
    assert logged(run)[-1]["rollout/returned_tasks"] == 2
    assert "rollout/sampler_gap" in logged(run)[-1]
