"""The shape of the code base: short files, small folders, and a training step that can be read in one sitting."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import pytest

import spear_rl

HOME = Path(spear_rl.__file__).parent
MAX_FILES, MAX_LINES = 12, 900


def python_files() -> dict[Path, int]:
    return {path: len(path.read_text("utf-8").splitlines()) for path in HOME.rglob("*.py")}


def test_no_file_is_longer_than_four_hundred_lines():
    assert not {str(path): lines for path, lines in python_files().items() if lines > 400}


def test_half_of_the_files_have_at_most_a_hundred_and_thirty_lines():
    assert median(python_files().values()) <= 130


def test_the_package_is_not_longer_than_before_it_was_rearranged():
    assert sum(python_files().values()) <= 21_976


def test_no_room_has_more_than_twelve_entries():
    """The root holds the rooms themselves: their number is the architecture's."""
    rooms = {path.parent for path in python_files()} - {HOME}
    sizes = {str(room): sum(1 for entry in room.iterdir() if entry.name != "__pycache__") for room in rooms}
    assert not {room: size for room, size in sizes.items() if size > 12}


@pytest.fixture
def walked(tmp_path, monkeypatch) -> set[CodeType]:
    """Every function of ours that runs in one training step of `lookup` in which replay fires."""
    from spear_rl.app import config, train
    from spear_rl.train import loop

    codes: set[CodeType] = set()
    step_with_replay = 6

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(HOME)):
            codes.add(frame.f_code)

    def followed(step: int, **parts: Any) -> Any:
        if step != step_with_replay:
            return train_step(step, **parts)
        sys.setprofile(watch)
        try:
            metrics = train_step(step, **parts)
        finally:
            sys.setprofile(None)
        assert metrics["replay/fired"] == 1
        return metrics

    train_step = loop.train_step
    monkeypatch.setattr(loop, "train_step", followed)
    settings = ["run.steps=7", "run.trajectories_every=0", "eval.tasks=0", "sft.episodes=160"]
    train.train_from(config.load("lookup", [f"run.dir={tmp_path}", *settings, "algorithm.imitation.warm_steps=2"]))
    return codes


def test_a_reader_who_follows_every_call_of_a_step_reads_twelve_files_and_nine_hundred_lines(walked):
    lines: dict[str, set[int]] = {}
    for code in walked:
        source, first = inspect.getsourcelines(code)
        lines.setdefault(str(Path(code.co_filename).relative_to(HOME)), set()).update(range(first, first + len(source)))
    read = {file: len(numbers) for file, numbers in sorted(lines.items(), key=lambda entry: -len(entry[1]))}
    assert len(read) <= MAX_FILES, read
    assert sum(read.values()) <= MAX_LINES, read
