"""Trackers from outside: one that records, and those that go wrong."""

from __future__ import annotations

import json
import os

from spear_rl.train.callbacks import Event
from spear_rl.train.trackers import RunInfo


def recording(run: RunInfo):
    """Writes every event's kind, step and reward into the run folder."""
    path = run.dir / "mine.txt"
    run.id_of("mine")
    with path.open("a") as file:
        file.write(json.dumps({"name": run.name, "config": dict(run.config), "about": dict(run.about)}) + "\n")

    def track(event: Event) -> None:
        with path.open("a") as file:
            file.write(f"{event.kind} {event.step} {(event.metrics or {}).get('rollout/reward')}\n")

    return track


def never_starts(run: RunInfo):
    raise RuntimeError("no network")


def exits(run: RunInfo):
    raise SystemExit(0)


def fails_at_step_one(run: RunInfo):
    def track(event: Event) -> None:
        if event.metrics is not None:
            event.metrics.clear()
        os.chdir("/")
        if event.kind == "step" and event.step == 1:
            raise OSError(28, "No space left on device")

    return track


def returns_nothing(run: RunInfo) -> None:
    return None


no_function = 3
