"""Every metric that a run writes is explained, and every explanation is of a metric that some run writes."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spear_rl.algorithms import grpo
from spear_rl.algorithms.base import Algorithm
from spear_rl.app import train
from spear_rl.app.config import load
from spear_rl.app.show.metrics import SOURCES, Explained, explained_metrics
from spear_rl.rollout import Observation, StepResult, Task
from spear_rl.train.callbacks import scalars

SMALL = [
    "run.threads=1", "run.checkpoint_every=100", "eval.tasks=4", "eval.every=0", "sft.episodes=160", "sft.epochs=1",
    "run.trajectories_every=0",
]  # fmt: skip
EVENLY = ["algorithm.imitation.warm_steps=2", "run.steps=5"]
NO_REPLAY = ["run.steps=1", "sft.episodes=0", "rollout.num_tasks=2", "rollout.group_size=2"]
TRAININGS: dict[str, list[str]] = {
    "everything on": [
        "lookup", "algorithm.name=spear-dr-bot-gigpo", "algorithm.kl=0.01", "algorithm.covariance.on_policy=clip",
        "algorithm.imitation.unit=turns", "engine.importance_cap=2",
        "algorithm.entropy_bonus=0.01", 'eval.also=["test"]', *EVENLY,
    ],
    "KL-Cov, replay apart": [
        "lookup", "algorithm.name=spear-grpo", "algorithm.covariance.on_policy=kl", "algorithm.covariance.replay=kl",
        "algorithm.imitation.update=separate", "optim.num_minibatches=2", *EVENLY,
    ],
    "RLOO when full": [
        "lookup", "algorithm.name=spear-rloo", "algorithm.imitation.draw=when_full", "algorithm.imitation.capacity=4",
        "algorithm.imitation.per_family=true", *EVENLY,
    ],
    "beyond the paper": [
        "lookup", 'algorithm.imitation.priority=["medium"]', "algorithm.imitation.max_second_moment=1.5",
        "algorithm.imitation.baseline=siblings", "algorithm.entropy_floor=1", *EVENLY,
    ],
    "nothing trains on-policy": ["lookup", f"algorithm.name=spear-{__name__}:nothing_after_three", *EVENLY],
    "a base": ["lookup", "algorithm.name=dr-bot-grpo", *NO_REPLAY],
    "webshop": ["webshop-tiny", "rollout.max_turns=2", "eval.max_turns=2", *NO_REPLAY],
    "tasks return, wins join, groups restart": [
        "lookup", "rollout.return_share=0.3", "rollout.restart_share=0.3", "algorithm.imitation.join_lost=true",
        *EVENLY,
    ],
    "own measures": ["lookup", f"task.env={__name__}:coins", *NO_REPLAY],
}  # fmt: skip
MEASURES = {"rollout/coins", "rollout/odd name/x"}
"""Of the environment below: no module of ours can explain them."""


def nothing_after_three() -> Algorithm:
    """GRPO whose turns stop training after three steps, so that replay trains alone."""

    def late(groups):
        reason = "late" if groups[0].step >= 3 else ""
        return [[reason] * len(t.turns) for group in groups for t in group.trajectories]

    return replace(grpo(), filters=(late,))


class Coin:
    def __init__(self, number: int) -> None:
        self._number = number

    def reset(self) -> Observation:
        return Observation("heads or tails?", choices=("heads", "tails"))

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("over"), reward=1.0, done=True, metrics={"coins": 1.0, "odd name/x": 2.0})

    def close(self) -> None:
        pass


def coins(split: str = "train", **options: object) -> list[Task]:
    return [Task(f"{split}/{n}", partial(Coin, n), family=f"f{n % 2}") for n in range(4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, set[str]]:
    """Training -> the names of all that it told trackers, wrote to files and summed up."""
    found: dict[str, set[str]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, __name__, sys.modules[__name__])
        patch.syspath_prepend(str(Path(__file__).parent))
        for label, (source, *settings) in TRAININGS.items():
            names: set[str] = set()

            def note(event, names=names) -> None:
                names.update(scalars(event))
                prefix = {"step": "", "eval": "eval/"}.get(event.kind)
                names.update(f"{prefix}{name}" for name in (event.metrics or {}) if prefix is not None)

            run_dir = tmp_path_factory.mktemp("run") / "run"
            config = load(source, [f"run.dir={run_dir}", *SMALL, *settings])
            config.run.trackers = ["jsonl"]
            summary = train.train_from(config, [note])
            found[label] = names | {f"time/{name}" for name in summary["seconds"]}
    return found


def explained(name: str, known: list[Explained]) -> bool:
    """Whether a module explains it; the pattern of environments' measures is not for names of ours."""
    entries = [entry for entry in known if entry.is_of(name)]
    return any(entry.name != "rollout/{measure}" for entry in entries) or name in MEASURES


@pytest.mark.slow
def test_every_metric_that_a_run_writes_is_explained_where_it_is_made(written):
    known = explained_metrics()
    missing = {name: label for label, names in written.items() for name in sorted(names) if not explained(name, known)}
    places = ", ".join(f"spear_rl.{module}" for module, _ in SOURCES)
    assert not missing, (
        f"{missing} (metric: a training that writes it) are not explained. Add `name: one sentence` to METRICS in the "
        f"module that makes the metric (those with one: {places}). If it is another module, give it a METRICS dict and "
        "add it to SOURCES in src/spear_rl/app/show/metrics.py. Then run docs/tools/metrics_page.py."
    )


@pytest.mark.slow
def test_every_explanation_is_of_a_metric_that_a_run_writes(written):
    names = set().union(*written.values())
    unused = [entry for entry in explained_metrics() if not any(entry.is_of(name) for name in names)]
    assert not unused, (
        f"{[(e.name, f'METRICS of spear_rl.{e.module}') for e in unused]}: no training of this test writes these. "
        "Remove the explanation, or add a training to TRAININGS here that writes the metric."
    )


@pytest.mark.slow
def test_the_trainings_go_where_they_are_meant_to(written):
    assert "policy/dropped_late" in written["nothing trains on-policy"]
    assert {"replay/sampler_gap", "replay/grad_norm"} <= written["nothing trains on-policy"]
    assert written["own measures"] >= MEASURES
    assert not [name for name in written["a base"] if name.startswith("replay/")]


def test_an_explanation_is_one_sentence_and_no_name_has_two():
    known = explained_metrics()
    names = [entry.name for entry in known]
    assert len(set(names)) == len(names)
    for entry in known:
        assert re.fullmatch(r"[A-Za-z0-9].{10,110}[.]", entry.meaning), entry
        assert ". " not in entry.meaning, entry


def test_a_pattern_is_of_every_name_that_it_stands_for_and_of_no_other():
    stop = next(entry for entry in explained_metrics() if entry.name == "rollout/stop_{reason}")
    assert stop.is_of("rollout/stop_done")
    assert not stop.is_of("rollout/stop_")
    assert not stop.is_of("rollout/stopped")
    assert not stop.is_of("eval/rollout/stop_done")


def test_show_metrics_lists_all_or_those_with_a_part_of_the_name(spear):
    code, text = spear("show", "metrics")
    assert code == 0
    assert all(f"  {entry.name} " in text and entry.meaning in text for entry in explained_metrics())
    code, text = spear("show", "metrics", "replay")
    shown = re.findall(r"^  (\S+)", text, re.MULTILINE)
    assert shown == [entry.name for entry in explained_metrics() if "replay" in entry.name]
    assert "of spear_rl.replay.buffer:" in text
    code, text = spear("show", "metrics", "policy/dropped_flat_group")
    assert (code, re.findall(r"^  (\S+)", text, re.MULTILINE)) == (0, ["policy/dropped_{reason}"])
    code, text = spear("show", "metrics", "\x1bnothing")
    assert (code, "no metric has" in text, "\x1b" in text) == (2, True, False)
