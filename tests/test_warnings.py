"""What a run warns of while it trains: each rule by a stream of metrics that breaks it, and none by healthy ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from conftest import logged
from spear_rl.app.build import warnings
from spear_rl.app.build.warnings import WINDOW, RunWatch
from spear_rl.app.config import Config, load
from spear_rl.app.show import run_overview
from spear_rl.io.jsonl import append_row
from spear_rl.train.callbacks import WARNINGS, Event
from spear_rl.train.step import rollout_metrics
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

DOCS = Path(__file__).parents[1] / "docs"
KINDS = {"tools", "entropy", "replay", "easy_wins", "flat_groups", "overlong", "invalid"}
Row = dict[str, float]


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


SILENT = {"replay__fired": 0.0, "replay__group_success": float("nan")}
EMPTY = SILENT | {"replay__buffer_size": 0.0, "replay__eligible": 0.0}
BREAKING: dict[str, tuple[str, Callable[[int], Row], list[str], list[str]]] = {
    "tools die": (
        "tools",
        changed(rollout__tool_turns=lambda s: 2.0 if s < 10 else 0.3, rollout__success=0.31),
        ["fell from 2.00 to", "algorithm.bonus.steps (it is 60)", "require_tool=true", "sft.episodes"],
        [],
    ),
    "entropy falls to a fraction": (
        "entropy",
        changed(policy__entropy=lambda s: 0.4 * 0.9**s),
        ["entropy fell from 0.3", "algorithm.entropy_bonus", "optim.learning_rate", "algorithm.imitation.weight"],
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
        ["algorithm.imitation.percentile=40"],
    ),
    "never full": (
        "replay",
        changed(**SILENT, replay__eligible=50.0),
        ["50 episodes qualify and more than 150 are needed", "algorithm.imitation.capacity (it is 100)"],
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
        ["solved 90% of theirs, all groups 50%", "rollout.group_size (it is 8)", "algorithm.imitation.max_age is"],
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
        changed(rollout__truncated_turns=0.6),
        ["60% of the turns hit their token limit: raise rollout.max_new_tokens (it is 9)", "filters.overlong=false"],
        ["rollout.max_new_tokens=9"],
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
        ["of the turns are invalid over 10 steps: raise algorithm.invalid_penalty (it is", "sft.episodes (it is"],
        [],
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


@pytest.mark.parametrize("broken", [{}, {"rollout/success": float("nan")}, {"rollout/success": None}, {"x": "y"}])
def test_metrics_that_are_missing_or_no_numbers_bring_no_warning(broken: dict[str, Any], tmp_path: Path) -> None:
    assert watched(tmp_path, [broken] * 40) == []


@pytest.mark.parametrize(("gone", "times"), [(4, 1), (8, 1), (9, 2), (40, 2)])
def test_a_warning_comes_again_only_after_it_was_gone_for_long(gone: int, times: int, tmp_path: Path) -> None:
    # Four low steps of ten leave the mean above one half; with n of them it is below for n + 1 steps.
    back = 30 + gone
    invalid = changed(rollout__invalid_turns=lambda s: 0.1 if 30 <= s < back else 0.8)
    assert len(watched(tmp_path, stream(invalid, steps=120))) == times


@pytest.mark.parametrize("name", ["tools die", "all too old", "more and more turns are cut off", "invalid turns"])
@pytest.mark.parametrize("cut", [1, 9, 12, 33, 59])
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
    "quickstart": ["sft.episodes=2500", "run.steps=20", "eval.tasks=0"],
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
        warnings.GROWN_TRUNCATED,
    ):  # fmt: skip
        assert f"{figure:g}" in table
