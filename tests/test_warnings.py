"""What a run warns of while it trains: each rule by a stream of metrics that breaks it, and none by healthy ones."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import logged
from spear_rl.app.build import warnings
from spear_rl.app.build.warnings import WINDOW, RunWatch
from spear_rl.app.config import Config, flat, load
from spear_rl.app.show import run_overview
from spear_rl.io.jsonl import append_row
from spear_rl.rollout import Observation, StepResult, Task
from spear_rl.train.callbacks import WARNINGS, Event
from spear_rl.train.checkpoint import MANIFEST
from spear_rl.train.step import note_families, rollout_metrics
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

DOCS = Path(__file__).parents[1] / "docs"
KINDS = {"tools", "entropy", "replay", "easy_wins", "flat_groups", "overlong", "invalid", "penalties", "forgotten"}
Row = dict[str, Any]


def healthy(step: int, rng: random.Random | None = None) -> Row:
    """A step of a run that learns: noisy, with success that rises from 0.3 to 0.7 in 60 steps."""
    noise = rng.gauss(0, 0.04) if rng else 0.0
    wobble = rng.uniform(0.8, 1.2) if rng else 1.0
    progress = min(step / 60, 1.0)
    return {
        "rollout/success": min(max(0.3 + 0.4 * progress + noise, 0.0), 1.0),
        "rollout/tool_turns": 2.0 * wobble,
        "rollout/invalid_turns": max(0.3 - 0.25 * progress + noise / 2, 0.0),
        "rollout/truncated_turns": 0.04 * wobble,
        "rollout/flat_groups": 0.3 * wobble,
        "rollout/flat_lost": 0.2 * wobble,
        "rollout/flat_won": 0.1 * wobble,
        "rollout/episodes": 64.0,
        "policy/entropy": (0.2 - 0.1 * progress) * wobble,
        "replay/weight": min(step / 5, 1.0),
        "replay/fired": float(step > 1),
        "replay/buffer_size": 100.0,
        "replay/eligible": 80.0,
        "replay/baseline": 0.4,
        "replay/group_success": 0.55 * wobble,
    }


def stream(*changes: Callable[[int], Row], steps: int = 60, seed: int = 0) -> list[Row]:
    rng = random.Random(seed)
    rows = [healthy(step, rng) for step in range(steps)]
    for change in changes:
        rows = [row | change(step) for step, row in enumerate(rows)]
    return rows


def config(*overrides: str) -> Config:
    return load("lookup", ["algorithm.name=spear-dr-bot-grpo", "run.steps=60", *overrides])


def watched(folder: Path, rows: Iterable[Row], *overrides: str, first: int = 0) -> list[tuple[int, str, str]]:
    """Feeds a watch as the trainer does; (step, kind, text) of every warning that it wrote, which it also announced."""
    notes: list[Event] = []
    watch = RunWatch(config(*overrides), folder, [notes.append])
    for step, row in enumerate(rows, start=first):
        append_row(folder / "metrics.jsonl", {"step": step} | row)
        watch(Event("step", step, 60, row))
        watch(Event("checkpoint", step))
    written = logged(folder, WARNINGS) if (folder / WARNINGS).exists() else []
    found = [(row["step"], w["kind"], w["text"]) for row in written for w in row["warnings"]]
    assert all(note.kind == "note" for note in notes)
    assert [f"warning at step {step}: {text}" for step, _, text in found if step >= first] == [n.text for n in notes]
    return found


def after(step: int, value: float, before: float | None = None) -> Callable[[int], float]:
    return lambda now: value if now >= step or before is None else before


def changed(**values: Any) -> Callable[[int], Row]:
    """rollout__success=0.2, or a function of the step."""
    return lambda step: {
        name.replace("__", "/"): value(step) if callable(value) else value for name, value in values.items()
    }


def families(*, tasks: int = 16, seed: int = 0, **rates: Any) -> Callable[[int], Row]:
    """Groups of eight by family, most of which win or lose together; a rate may be a function of the step."""

    def row(step: int) -> Row:
        rng, found = random.Random(f"{seed}/{step}"), dict[str, list[float]]()
        for name in rng.choices(list(rates), k=tasks):
            rate = rates[name](step) if callable(rates[name]) else rates[name]
            chance = rng.betavariate(rate, 1 - rate)
            found.setdefault(name, []).append(sum(rng.random() < chance for _ in range(8)) / 8)
        return {"rollout/by_family": found}

    return row


FALL = after(25, 0.02, before=0.5)
FORGOTTEN = families(pick=0.6, heat=lambda s: 0.3 + 0.3 * s / 60, pick_two=FALL)
SILENT = {"replay__fired": 0.0, "replay__group_success": float("nan")}
EMPTY = SILENT | {"replay__buffer_size": 0.0, "replay__eligible": 0.0}
BREAKING: dict[str, tuple[str, Callable[[int], Row], list[str], list[str]]] = {
    "tools die": (
        "tools",
        changed(rollout__tool_turns=lambda s: 2.0 if s < 10 else 0.3, rollout__success=0.31),
        ["fell from 2.00 to", "algorithm.bonus.steps (it is 60)", "require_tool=true", "sft.episodes (it is 320)"],
        ["algorithm.bonus.mode=cosine"],
    ),
    "entropy falls to a fraction while success stands still": (
        "entropy",
        changed(policy__entropy=lambda s: 0.4 * 0.9**s, rollout__success=0.5),
        ["entropy fell from 0.3", "algorithm.entropy_bonus", "optim.learning_rate", "algorithm.imitation.weight"],
        [],
    ),
    "entropy falls to a fraction and success falls with it": (
        "entropy",
        changed(policy__entropy=lambda s: 0.4 * 0.9**s, rollout__success=lambda s: 0.85 - 0.01 * s),
        ["while success is 0.6"],
        [],
    ),
    "entropy is next to none": (
        "entropy",
        changed(policy__entropy=0.001),
        ["entropy is 0.001 nats per token", "algorithm.covariance.on_policy=clip"],
        [],
    ),
    "all lost, so nothing is stored": (
        "replay",
        changed(**EMPTY, rollout__flat_groups=0.97, rollout__flat_lost=0.97, rollout__flat_won=0.0),
        ["has not fired for 10 steps: the buffer is empty", "97% of the groups lost all", "easier tasks", "group_size"],
        [],
    ),
    "all won, so nothing is stored": (
        "replay",
        changed(**EMPTY, rollout__flat_groups=1.0, rollout__flat_lost=0.2, rollout__flat_won=0.8, rollout__success=0.8),
        ["the buffer is empty", "80% won them all", "harder tasks"],
        [],
    ),
    "all too old": (
        "replay",
        lambda s: (
            {}
            if s < 20
            else changed(**EMPTY, rollout__flat_groups=0.95, rollout__flat_lost=0.95, rollout__flat_won=0.0)(s)
        ),
        ["all stored episodes were older than algorithm.imitation.max_age=7 steps", "easier tasks"],
        ["algorithm.imitation.max_age=7"],
    ),
    "none used a tool": (
        "replay",
        changed(**EMPTY),
        ["no better episode used a tool", "require_tool=false"],
        ["algorithm.imitation.require_tool=true"],
    ),
    "the gate is shut": (
        "replay",
        changed(**SILENT, replay__eligible=0.0, replay__buffer_size=123.0, replay__baseline=1.0),
        ["none of the 123 stored episodes earns more than the baseline 1", "algorithm.imitation.percentile (it is 40)"],
        ["algorithm.imitation.baseline=percentile", "algorithm.imitation.percentile=40"],
    ),
    "the gate of siblings is shut": (
        "replay",
        changed(**SILENT, replay__eligible=0.0, replay__buffer_size=123.0, replay__baseline=1.0),
        ["baseline 1: set algorithm.imitation.baseline=percentile, or set algorithm.imitation.per_family=true"],
        ["algorithm.imitation.baseline=siblings"],
    ),
    "a priority draws nothing": (
        "replay",
        changed(**SILENT, replay__eligible=40.0, replay__never_drawn=40.0),
        ["draws none of the 40 that qualify", 'set algorithm.imitation.priority=["fresh"]'],
        ['algorithm.imitation.priority=["medium", "fresh"]'],
    ),
    "all replayed rows are held back": (
        "replay",
        changed(replay__held_back=0.97),
        [
            "97% of its rows do not train: raise algorithm.imitation.max_second_moment (it is 1.1)",
            "or lower algorithm.imitation.max_age (it is",
        ],
        ["algorithm.imitation.max_second_moment=1.1"],
    ),
    "tools die in spite of a bonus by success": (
        "tools",
        changed(rollout__tool_turns=lambda s: 2.0 if s < 10 else 0.3, rollout__success=0.31),
        ["0.31: raise algorithm.bonus.target (it is 0.5), or raise sft.episodes (it is 320)"],
        ["algorithm.bonus.mode=success", "algorithm.imitation.require_tool=true"],
    ),
    "tools die in spite of a constant bonus": (
        "tools",
        changed(rollout__tool_turns=lambda s: 2.0 if s < 10 else 0.3, rollout__success=0.31),
        ["0.31: begin with a cold start (sft.episodes)"],
        ["algorithm.bonus.mode=constant", "algorithm.imitation.enabled=false", "sft.episodes=0"],
    ),
    "entropy falls in spite of a bonus and a clip": (
        "entropy",
        changed(policy__entropy=0.001),
        ["any more: raise algorithm.entropy_bonus (it is 0.01), or lower optim.learning_rate"],
        ["algorithm.entropy_bonus=0.01", "algorithm.covariance.on_policy=clip"],
    ),
    "never full": (
        "replay",
        changed(**SILENT, replay__eligible=50.0),
        [
            "50 episodes qualify and more than 150 are needed: lower algorithm.imitation.capacity (it is 100), "
            "raise algorithm.imitation.max_age (it is 10), or set algorithm.imitation.draw=every_step",
        ],
        ["algorithm.imitation.draw=when_full", "algorithm.imitation.capacity=100"],
    ),
    "never full of turns": (
        "replay",
        changed(**SILENT, replay__eligible=500.0, replay__eligible_turns=lambda s: 60.0 + s),
        ["turns qualify and more than 150 are needed"],
        [
            "algorithm.imitation.draw=when_full",
            "algorithm.imitation.capacity=100",
            "algorithm.imitation.unit=turns",
            "run.steps=30",
        ],
    ),
    "a fraction of an episode": (
        "replay",
        changed(**SILENT),
        ["algorithm.imitation.fraction=0.001 of 64 episodes is less than one"],
        ["algorithm.imitation.fraction=0.001"],
    ),
    "easy wins": (
        "easy_wins",
        changed(replay__group_success=0.9, rollout__success=0.5),
        [
            "solved 90% of theirs, all groups 50%",
            "(it is 8) so that",
            "or raise algorithm.imitation.max_age (it is 10)",
        ],
        [],
    ),
    "groups are flat": (
        "flat_groups",
        changed(rollout__flat_groups=0.6, rollout__flat_lost=0.5, rollout__flat_won=0.1),
        ["60% of the groups", "50% of all lost every episode", "easier tasks", "a larger rollout.group_size (it is 8)"],
        [],
    ),
    "groups are flat in both ways": (
        "flat_groups",
        changed(rollout__flat_groups=0.6, rollout__flat_lost=0.3, rollout__flat_won=0.3),
        ["tasks between those that are always won and always lost or a larger rollout.group_size"],
        [],
    ),
    "groups are flat, far too hot": (
        "flat_groups",
        changed(rollout__flat_groups=0.9, rollout__flat_lost=0.9, rollout__flat_won=0.0),
        ["a cold start (sft.episodes)", "a lower rollout.temperature (it is 3)"],
        ["rollout.temperature=3", "sft.episodes=0"],
    ),
    "groups are flat, far too cold": (
        "flat_groups",
        changed(rollout__flat_groups=0.8, rollout__flat_lost=0.2, rollout__flat_won=0.6),
        ["harder tasks", "a higher rollout.temperature (it is 0.1)"],
        ["rollout.temperature=0.1"],
    ),
    "most turns are cut off": (
        "overlong",
        changed(rollout__truncated_turns=0.6, rollout__invalid_turns=0.45),
        ["60% of the turns hit their token limit: raise rollout.max_new_tokens (it is 9)", "filters.overlong=false"],
        ["rollout.max_new_tokens=9"],
    ),
    "most turns are cut off after a whole answer": (
        "overlong",
        changed(rollout__truncated_turns=0.6),
        ["if the task's answers end with a text of their own, set rollout.stop to it, or raise rollout.max_new_tokens"],
        ["rollout.max_new_tokens=9"],
    ),
    "most turns are cut off, answered or not, where answers end at a stop string": (
        "overlong",
        changed(rollout__truncated_turns=0.6),
        ["limit: raise rollout.max_new_tokens (it is 9)"],
        ["rollout.max_new_tokens=9", 'rollout.stop=["</action>"]'],
    ),
    "more and more turns are cut off": (
        "overlong",
        changed(rollout__truncated_turns=lambda s: min(0.01 * s, 0.4)),
        ["at the start: raise rollout.max_new_tokens"],
        [],
    ),
    "invalid turns": (
        "invalid",
        changed(rollout__invalid_turns=lambda s: 0.6 + 0.05 * (s % 3)),
        ["invalid over 10 steps: raise algorithm.invalid_penalty (it is 0.1), or raise sft.episodes (it is 320)"],
        ["algorithm.invalid_penalty=0.1"],
    ),
    "penalties are all that lost groups compare": (
        "penalties",
        changed(rollout__success=lambda s: 0.25 * 0.9**s, rollout__flat_lost=0.6),
        ["success fell from 0.2", "60% of the groups lost all", "algorithm.invalid_penalty=0 (it is 0.3)"],
        ["algorithm.name=spear-gigpo", "algorithm.invalid_penalty=0.3"],
    ),
    "penalties are divided because the settings say so": (
        "penalties",
        changed(rollout__success=lambda s: 0.25 * 0.9**s, rollout__flat_lost=0.6),
        ["or set algorithm.divide_by_std=false"],
        ["algorithm.divide_by_std=true", "algorithm.invalid_penalty=0.3"],
    ),
    "a family is forgotten": (
        "forgotten",
        FORGOTTEN,
        [
            "success in the task family 'pick_two' fell from 0.",
            "to 0.",
            "that of the others went from 0.",
            'set algorithm.imitation.priority=["family"], so',
        ],
        [],
    ),
    "a family is forgotten under another priority and draw": (
        "forgotten",
        FORGOTTEN,
        ['set algorithm.imitation.priority=["rare", "family"] and algorithm.imitation.draw=every_step, so'],
        ['algorithm.imitation.priority=["rare"]', "algorithm.imitation.draw=when_full"],
    ),
    "a family is forgotten although it is drawn": (
        "forgotten",
        FORGOTTEN,
        ["is being forgotten: lower algorithm.imitation.weight (it is 0.7)"],
        ['algorithm.imitation.priority=["family"]', "algorithm.imitation.weight=0.7"],
    ),
    "a family is forgotten without replay": (
        "forgotten",
        FORGOTTEN,
        ["is being forgotten: look at its episodes with `spear view`"],
        ["algorithm.name=grpo"],
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_every_warning_has_a_stream_that_brings_it_once(name: str, tmp_path: Path) -> None:
    kind, change, words, overrides = BREAKING[name]
    found = [entry for entry in watched(tmp_path, stream(change), *overrides) if entry[1] == kind]
    assert len(found) == 1
    [(step, _, text)] = found
    assert step >= WINDOW - 1
    for word in words:
        assert word in text
    assert "nan" not in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize("name", BREAKING)
def test_a_warning_names_settings_that_exist_and_recommends_a_value_that_changes_them(
    name: str, tmp_path: Path
) -> None:
    _, change, _, overrides = BREAKING[name]
    text = "; ".join(text for *_, text in watched(tmp_path, stream(change), *overrides))
    known = flat(config(*overrides))
    named = re.findall(r"\b((?:algorithm|rollout|sft|optim|run)\.[a-z_.]*[a-z_])", text)
    assert set(named) <= known.keys()
    for key, value in re.findall(r"(?:set|or|and) ([a-z_]+\.[a-z_.]+)=(\[[^]]*\]|[^\s,;:)]+)", text):
        assert flat(config(*overrides, f"{key}={value}"))[key] != known[key]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.invalid_penalty=0.3"],  # Dr.BoT does not divide
        ["algorithm.name=gigpo", "algorithm.invalid_penalty=0"],
        ["algorithm.name=gigpo", "algorithm.divide_by_std=false", "algorithm.invalid_penalty=0.3"],
        ["algorithm.name=rloo", "algorithm.invalid_penalty=0.3"],
    ],
)
def test_a_fall_that_penalties_cannot_cause_is_not_blamed_on_them(tmp_path: Path, overrides: list[str]) -> None:
    fall = changed(rollout__success=lambda s: 0.25 * 0.9**s, rollout__flat_lost=0.6)
    assert "penalties" not in {kind for _, kind, _ in watched(tmp_path, stream(fall), *overrides)}


def test_replay_that_rests_for_no_known_reason_brings_no_false_one(tmp_path: Path) -> None:
    assert watched(tmp_path, stream(changed(**SILENT))) == []


def test_the_streams_bring_every_kind() -> None:
    assert {kind for kind, *_ in BREAKING.values()} == KINDS


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_brings_no_warning(seed: int, tmp_path: Path) -> None:
    assert watched(tmp_path, stream(seed=seed, steps=150)) == []


@pytest.mark.parametrize("seed", range(10))
def test_noise_around_a_level_brings_no_warning(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    success, tools, entropy, flat = rng.uniform(0.1, 0.7), rng.uniform(0, 9), rng.uniform(0.02, 2), rng.uniform(0, 0.3)
    noise = changed(
        rollout__success=lambda _: min(max(rng.gauss(success, 0.1), 0), 1),
        rollout__tool_turns=lambda _: tools * rng.uniform(0.5, 1.5),
        policy__entropy=lambda _: entropy * rng.uniform(0.5, 1.5),
        rollout__flat_groups=lambda _: flat + rng.uniform(0, 0.2),
        rollout__invalid_turns=lambda _: rng.uniform(0, 0.6),
        rollout__truncated_turns=lambda _: rng.uniform(0, 0.15),
        replay__group_success=lambda _: rng.uniform(0.3, 0.8),
        replay__fired=lambda _: float(rng.random() < 0.7),
    )
    assert watched(tmp_path, stream(noise, steps=200)) == []


def test_a_solved_task_is_no_fault(tmp_path: Path) -> None:
    end = changed(
        **SILENT, rollout__success=0.97, rollout__flat_groups=0.9, rollout__flat_won=0.9, rollout__flat_lost=0.0,
        policy__entropy=lambda s: 0.3 * 0.8**s, replay__eligible=0.0, replay__baseline=1.0,
    )  # fmt: skip
    assert watched(tmp_path, stream(end)) == []


@pytest.mark.parametrize("end", [0.75, 0.88, 1.0])
def test_entropy_that_falls_while_success_rises_is_no_fault(end: float, tmp_path: Path) -> None:
    learns = changed(
        rollout__success=lambda s: min(0.2 + max(s - 10, 0) / 40, end), policy__entropy=lambda s: max(0.93**s, 0.13)
    )
    assert watched(tmp_path, stream(learns, steps=100 if end >= 0.8 else 33)) == []


@pytest.mark.parametrize("kind", ["tools die", "groups are flat, far too hot", "invalid turns"])
def test_a_run_that_begins_with_a_cold_starts_model_is_not_told_to_begin_with_one(kind: str, tmp_path: Path) -> None:
    name, change, _, overrides = BREAKING[kind]
    for model in ("trained", "plain"):
        (tmp_path / model).mkdir()
    (tmp_path / "trained" / MANIFEST).touch()
    told = {}
    for model in ("trained", "plain"):
        begins = [*overrides, "sft.episodes=0", f"engine.model={tmp_path / model}"]
        [(_, _, told[model])] = [w for w in watched(tmp_path / model, stream(change), *begins) if w[1] == name]
    assert "sft.episodes" not in told["trained"]
    assert "an engine.model of a longer cold start" in told["trained"]
    assert "a cold start (sft.episodes)" in told["plain"]


def test_fewer_tool_turns_with_more_success_are_no_fault(tmp_path: Path) -> None:
    shorter = changed(rollout__tool_turns=lambda s: 6.0 if s < 10 else 1.0)
    assert watched(tmp_path, stream(shorter)) == []


def test_a_buffer_that_fills_in_time_is_no_fault(tmp_path: Path) -> None:
    filling = changed(**SILENT, replay__eligible=lambda s: 12.0 * s)
    overrides = ["algorithm.imitation.draw=when_full", "algorithm.imitation.capacity=400", "run.steps=100"]
    assert watched(tmp_path, stream(filling, steps=45), *overrides) == []


def test_replay_that_is_off_or_not_due_is_no_fault(tmp_path: Path) -> None:
    assert watched(tmp_path, stream(changed(**EMPTY, replay__weight=0.0))) == []
    without = [{k: v for k, v in row.items() if not k.startswith("replay/")} for row in stream()]
    (tmp_path / "base").mkdir()
    assert watched(tmp_path / "base", without) == []


def test_families_that_only_differ_by_chance_are_next_to_never_a_fault(tmp_path: Path) -> None:
    found = 0
    for seed in range(100):
        (tmp_path / str(seed)).mkdir()
        level = families(seed=seed, a=0.1, b=0.2, c=0.3, d=0.4, e=0.5, f=0.7)
        found += len(watched(tmp_path / str(seed), stream(level)))
    assert found <= 3  # with three standard errors instead of four it is 25


@pytest.mark.parametrize("others", [FALL, after(25, 0.25, before=0.5)])
def test_families_that_fall_together_are_not_forgotten(others: Callable[[int], float], tmp_path: Path) -> None:
    assert watched(tmp_path, stream(families(pick=others, heat=others, pick_two=FALL))) == []


def test_a_single_family_or_none_is_never_forgotten(tmp_path: Path) -> None:
    assert watched(tmp_path, stream(families(pick_two=FALL), steps=60)) == []
    (tmp_path / "none").mkdir()
    assert watched(tmp_path / "none", stream(changed(rollout__by_family={}))) == []


@pytest.mark.parametrize(("tasks", "times"), [(3, 0), (16, 1)])
def test_few_groups_say_nothing_about_a_family(tasks: int, times: int, tmp_path: Path) -> None:
    assert len(watched(tmp_path, stream(families(tasks=tasks, pick=0.6, pick_two=FALL)))) == times


def test_a_family_that_falls_to_more_than_half_is_no_fault(tmp_path: Path) -> None:
    worse = families(tasks=200, pick=0.6, pick_two=after(25, 0.6, before=0.9))
    assert watched(tmp_path, stream(worse)) == []


def test_the_name_of_a_forgotten_family_cannot_break_the_line(tmp_path: Path) -> None:
    name = "pick\n\x1b[31m" + "two" * 100
    [(_, kind, text)] = watched(tmp_path, stream(families(**{"pick": 0.6, name: FALL})))
    assert (kind, "pick" in text, "\n" in text, "\x1b" in text, len(text) < 400) == (
        "forgotten",
        True,
        False,
        False,
        True,
    )


DAMAGED = [7, "pick", [0.1], {"pick": 0.3}, {"pick": None, "two": ["x", None, float("nan")]}, {"pick": [], "two": []}]


@pytest.mark.parametrize("value", DAMAGED, ids=str)
def test_families_that_are_not_as_they_are_written_bring_no_warning(value: Any, tmp_path: Path) -> None:
    assert watched(tmp_path, stream(changed(rollout__by_family=value))) == []
    (tmp_path / "later").mkdir()
    later = [row | ({"rollout/by_family": value} if step % 2 else {}) for step, row in enumerate(stream(FORGOTTEN))]
    assert {kind for _, kind, _ in watched(tmp_path / "later", later)} <= {"forgotten"}


PLAYED = Counter[str]()


class Fading:
    """A game that any answer wins; in the family `lost` only the first 240 episodes do."""

    def __init__(self, family: str) -> None:
        self._family = family

    def reset(self) -> Observation:
        PLAYED[self._family] += 1
        self._wins = self._family == "kept" or PLAYED[self._family] <= 240
        return Observation("heads or tails?", choices=("heads", "tails"))

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("over"), reward=float(self._wins), done=True, success=self._wins)

    def close(self) -> None:
        pass


def fading(split: str = "train", **options: object) -> list[Task]:
    kinds = ("kept", "lost", "")
    return [Task(f"{split}/{n}", partial(Fading, kinds[n % 3]), family=kinds[n % 3]) for n in range(9)]


def test_a_training_counts_the_groups_of_each_family_and_warns_of_the_one_that_it_forgets(spear, tmp_path) -> None:
    PLAYED.clear()
    run = tmp_path / "run"
    settings = [
        f"task.env={__name__}:fading", "run.steps=32", "rollout.num_tasks=9", "rollout.group_size=4", "eval.tasks=0",
        "sft.episodes=0", "run.threads=1", "run.checkpoint_every=26", "run.trajectories_every=0",
    ]  # fmt: skip
    code, text = spear("train", "lookup", f"run.dir={run}", *settings)
    assert code == 0, text
    rows = logged(run)
    counted = [row["rollout/by_family"] for row in rows]
    assert counted[:19] == [{"kept": [1.0] * 3, "lost": [1.0] * 3}] * 19  # a check before the run plays some, too
    assert counted[20:] == [{"kept": [1.0] * 3, "lost": [0.0] * 3}] * 12
    found = [
        (row["step"], w["text"]) for row in logged(run, WARNINGS) for w in row["warnings"] if w["kind"] == "forgotten"
    ]
    [(step, sentence)] = found
    assert 20 < step < 30
    assert sentence.startswith("success in the task family 'lost' fell from 1.00 to 0.")
    assert f"warning at step {step}: {sentence}" in text


def test_tasks_that_return_or_restart_and_those_without_a_family_do_not_count_for_one() -> None:
    def group(success: bool, **info: str) -> Group:
        return Group("t", [Trajectory([], stop=Stop.DONE, success=success)] * 3, info=info)

    groups = [
        group(True, family="a"), group(False, family="a", origin="fresh"), group(True, family="b", origin="fresh"),
        group(False, family="a", origin="returned"), group(True, family="b", origin="restarted"), group(True),
        Group("t", [], info={"family": "c"}, num_failed=3),
    ]  # fmt: skip
    found: dict[str, list[float]] = {}
    note_families(found, None, groups)
    assert found == {"a": [1.0, 0.0], "b": [1.0]}


@pytest.mark.parametrize("broken", [{}, {"rollout/success": float("nan")}, {"rollout/success": None}, {"x": "y"}])
def test_metrics_that_are_missing_or_no_numbers_bring_no_warning(broken: dict[str, Any], tmp_path: Path) -> None:
    assert watched(tmp_path, [broken] * 40) == []


@pytest.mark.parametrize(("gone", "times"), [(4, 1), (8, 1), (9, 2), (40, 2)])
def test_a_warning_comes_again_only_after_it_was_gone_for_long(gone: int, times: int, tmp_path: Path) -> None:
    # Four low steps of ten leave the mean above one half; with n of them it is below for n + 1 steps.
    back = 30 + gone
    invalid = changed(rollout__invalid_turns=lambda s: 0.1 if 30 <= s < back else 0.8)
    assert len(watched(tmp_path, stream(invalid, steps=120))) == times


def test_a_mean_that_swings_about_a_threshold_is_told_of_a_few_times_however_long_the_run(tmp_path: Path) -> None:
    swinging = changed(rollout__invalid_turns=lambda s: 0.8 if s % 40 < 20 else 0.1)
    assert [step for step, *_ in watched(tmp_path, stream(swinging, steps=1000))] == [9, 45, 85]


@pytest.mark.parametrize(
    "name", ["tools die", "all too old", "more and more turns are cut off", "invalid turns", "a family is forgotten"]
)
@pytest.mark.parametrize("cut", [1, 9, 12, 28, 33, 59])
def test_a_resumed_run_warns_as_a_whole_one_and_repeats_nothing(name: str, cut: int, tmp_path: Path) -> None:
    _, change, _, overrides = BREAKING[name]
    rows, whole, resumed = stream(change), tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    expected = watched(whole, rows, *overrides)
    watched(resumed, rows[:cut], *overrides)
    assert watched(resumed, rows[cut:], *overrides, first=cut) == expected


def test_flat_groups_are_counted_by_what_all_their_episodes_did() -> None:
    def group(*rewards: float) -> Group:
        return Group("t", [episode(reward) for reward in rewards])

    def episode(reward: float) -> Trajectory:
        cut = Completion([1], [0.0], truncated=reward == 0)
        return Trajectory([Turn(prompt_ids=[1], completion=cut, reward=reward)], stop=Stop.DONE, success=reward == 1.0)

    groups = [group(1, 1), group(1, 1, 1), group(0, 0), group(0.5, 0.5), group(0, 1), group(0.5, 0.0)]
    metrics = rollout_metrics(groups)
    assert metrics["rollout/flat_groups"] == pytest.approx(4 / 6)
    assert metrics["rollout/flat_won"] == pytest.approx(2 / 6)
    assert metrics["rollout/flat_lost"] == pytest.approx(2 / 6)
    assert metrics["rollout/truncated_turns"] == pytest.approx(4 / 13)


@pytest.mark.parametrize(
    ("success", "flat", "lost", "times"),
    [(0.85, 0.9, 0.05, 0), (0.85, 0.9, 0.15, 1), (0.75, 0.55, 0.05, 0), (0.75, 0.7, 0.05, 1), (0.75, 0.55, 0.15, 1)],
)
def test_groups_that_all_won_are_no_fault_unless_others_all_lost(
    success: float, flat: float, lost: float, times: int, tmp_path: Path
) -> None:
    stuck = changed(rollout__success=success, rollout__flat_groups=flat, rollout__flat_won=flat - lost)
    assert len(watched(tmp_path, stream(stuck, changed(rollout__flat_lost=lost)))) == times


HEALTHY = {
    "lookup": [],
    "quickstart": ["sft.episodes=4000", "run.steps=20", "eval.tasks=0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", HEALTHY)
def test_a_real_run_that_learns_brings_no_warning(preset: str, spear, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, text = spear("train", preset, f"run.dir={run}", "run.threads=1", *HEALTHY[preset])
    assert code == 0, text
    assert len(logged(run)) >= 20
    assert not (run / WARNINGS).exists(), (run / WARNINGS).read_text()
    assert "warning" not in text


ABSURD = [
    "run.steps=14", "rollout.temperature=60", "rollout.num_tasks=2", "rollout.group_size=2", "sft.episodes=0",
    "eval.tasks=0", "run.threads=1", "run.checkpoint_every=5", "run.trajectories_every=0", "rollout.max_new_tokens=2",
    "algorithm.imitation.warm_steps=1", "optim.learning_rate=1e-4",
]  # fmt: skip


def test_absurd_settings_are_warned_of_on_the_console_in_the_folder_and_by_show(spear, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, text = spear("train", "lookup", f"run.dir={run}", *ABSURD, f"run.trackers=['jsonl', '{__name__}:collected']")
    assert code == 0, text
    found = [(row["step"], w["kind"], w["text"]) for row in logged(run, WARNINGS) for w in row["warnings"]]
    kinds = [kind for _, kind, _ in found]
    assert {"flat_groups", "replay"} <= set(kinds)
    assert len(kinds) == len(set(kinds))
    shown = run_overview(run)
    for step, _, sentence in found:
        assert f"warning at step {step}: {sentence}" in text
        assert f"  step {step}: {sentence}" in shown
        assert f"warning at step {step}: {sentence}" in COLLECTED
    code, text = spear("train", f"run.dir={run}", "run.resume=true", "run.steps=20")
    assert code == 0, text
    again = [(row["step"], w["kind"], w["text"]) for row in logged(run, WARNINGS) for w in row["warnings"]]
    assert again[: len(found)] == found
    assert len({kind for _, kind, _ in again}) == len(again)


def test_a_run_that_goes_back_to_a_checkpoint_forgets_what_came_after_it(spear, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert spear("train", "lookup", f"run.dir={run}", *ABSURD)[0] == 0
    first = (run / WARNINGS).read_text()
    assert first
    for folder in sorted((run / "checkpoints").glob("step_*"))[1:]:
        folder.rename(tmp_path / folder.name)
    (run / "summary.json").unlink()
    code, text = spear("train", f"run.dir={run}", "run.resume=true")
    assert code == 0, text
    assert (run / WARNINGS).read_text() == first


COLLECTED: list[str] = []


def collected(run: Any) -> Callable[[Event], None]:
    def track(event: Event) -> None:
        if event.kind == "note":
            COLLECTED.append(event.text)

    return track


def test_replay_reports_the_success_of_the_groups_that_it_draws_from(spear, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["run.steps=6", "sft.episodes=320", "sft.epochs=1", "eval.tasks=0", "run.threads=1"]
    assert spear("train", "lookup", f"run.dir={run}", *settings, "algorithm.imitation.warm_steps=1")[0] == 0
    rows = logged(run)
    drawn = [row for row in rows if row["replay/fired"]]
    assert drawn
    for row in rows:
        assert ("replay/group_success" in row) == bool(row["replay/fired"])
    # A stored episode beat its siblings, so its group neither lost nor won all.
    assert all(0 < row["replay/group_success"] < 1 for row in drawn)


def test_a_damaged_file_of_warnings_is_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    rows = [{"step": 1, "warnings": [{"kind": "tools", "text": "good"}, 3, {}]}, {"step": 2, "warnings": 7}]
    (tmp_path / WARNINGS).write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    shown = run_overview(tmp_path)
    assert "  step 1: good" in shown
    assert f"{WARNINGS}, line 3 is not valid JSON" in shown


def test_the_documentation_has_the_thresholds_of_the_code() -> None:
    table = (DOCS / "read_a_run.md").read_text().partition("## What does a run warn of?")[2].partition("\n## ")[0]
    assert {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")} == KINDS
    for figure in (
        warnings.WINDOW, warnings.START, warnings.SOLVED, warnings.NEARLY_SOLVED, warnings.LEAST_TOOL_TURNS,
        warnings.RISE, warnings.LEAST_ENTROPY, warnings.EASY, warnings.EASY_GAP, warnings.LOST, warnings.MOSTLY_WON,
        warnings.GROWN_TRUNCATED, warnings.HELD_BACK, warnings.OTHERS_KEPT, warnings.LEAST_GROUPS, warnings.ERRORS,
    ):  # fmt: skip
        assert f"{figure:g}" in table
