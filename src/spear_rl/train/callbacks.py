"""Callbacks: functions of one event. None of them can change the training."""

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spear_rl.io.files import writing
from spear_rl.io.jsonl import append_row
from spear_rl.types import Metrics

WARNINGS = "warnings.jsonl"
"""Of a run folder: what went wrong by the metrics, a row per step that brought a warning."""


def warning_texts(by_step: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, str]]:
    """(step, text) of every warning in rows of that file; what is none is left out."""
    lists = [(step, row.get("warnings")) for step, row in sorted(by_step.items())]
    found = [(step, given) for step, here in lists if isinstance(here, list) for given in here]
    return [(step, str(given["text"])) for step, given in found if isinstance(given, dict) and "text" in given]


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at a step."""

    kind: Literal["sft", "step", "eval", "checkpoint", "end", "note"]
    step: int
    total: int = 0
    metrics: Metrics | dict[str, Any] | None = None
    text: str = ""
    """Of a note: the message. Of an end: why the run failed, or empty."""


Callback = Callable[[Event], None]


class JsonLines:
    """One row per event of one kind; a checkpoint waits until they are on disk."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._kind = path, kind

    def __call__(self, event: Event) -> None:
        if event.kind == self._kind and event.metrics is not None:
            append_row(self._path, {"step": event.step} | event.metrics)


def scalars(event: Event) -> dict[str, float]:
    """The numbers of an event by the name of their curve; of an evaluation eval/, of eval.also eval/SPLIT/."""
    prefix = {"sft": "", "step": "", "eval": "eval/"}.get(event.kind)
    if prefix is None:
        return {}
    metrics: Mapping[str, Any] = event.metrics or {}
    others = metrics.get("also", {}) if event.kind == "eval" else {}
    numbers = {f"{prefix}{name}": float(value) for name, value in metrics.items() if isinstance(value, int | float)}
    return numbers | {f"eval/{split}/{name}": float(v) for split, rate in others.items() for name, v in rate.items()}


class TensorBoard:
    """Curves for TensorBoard in `folder`; the first record purges what a killed run wrote from that step on.

    Writes records itself: tensorboard's own writer does so in a thread, where a full disk ends in a traceback.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._path: Path | None = None

    def __call__(self, event: Event) -> None:
        values = scalars(event)
        if not values:
            return
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        curves = Summary(value=[Summary.Value(tag=tag, simple_value=v) for tag, v in values.items()])
        records = [Record(wall_time=now, step=event.step, summary=curves)]
        if self._path is None:
            start = SessionLog(status=SessionLog.START)
            records.insert(0, Record(wall_time=now, step=event.step, session_log=start))
            records.insert(0, Record(wall_time=now, step=event.step, file_version="brain.Event:2"))
        whole = io.BytesIO()
        writer = RecordWriter(whole)
        for record in records:
            writer.write(record.SerializeToString())
        with writing(self._folder):
            if self._path is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._path = self._folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
            with self._path.open("ab") as file:
                file.write(whole.getvalue())
