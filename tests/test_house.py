"""The shape of the code base: short files, small folders, and a training step that can be read in one sitting."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest

import spear_rl

HOME = Path(spear_rl.__file__).parent
ROOT = Path(__file__).parent.parent
MAX_FILES, MAX_LINES = 12, 900


def python_files() -> dict[Path, int]:
    return {path: len(path.read_text("utf-8").splitlines()) for path in HOME.rglob("*.py")}


def test_no_file_is_longer_than_four_hundred_lines():
    assert not {str(path): lines for path, lines in python_files().items() if lines > 400}


def test_half_of_the_files_have_at_most_a_hundred_and_thirty_lines():
    assert median(python_files().values()) <= 130


def test_no_room_has_more_than_twelve_entries():
    """The root holds the rooms themselves: their number is the architecture's."""
    rooms = {path.parent for path in python_files()} - {HOME}
    sizes = {str(room): sum(1 for entry in room.iterdir() if entry.name != "__pycache__") for room in rooms}
    assert not {room: size for room, size in sizes.items() if size > 12}


@pytest.fixture(scope="module")
def walk(tmp_path_factory) -> dict[str, set[int]]:
    """The lines of ours, by file, that run in one training step of `lookup` in which replay fires."""
    from spear_rl.app import config, train
    from spear_rl.train import loop

    lines: dict[str, set[int]] = {}
    step_with_replay = 6

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(str(HOME)):
            return None
        lines_of(frame).add(frame.f_code.co_firstlineno)
        return visit

    def visit(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines_of(frame).add(frame.f_lineno)
        return visit

    def lines_of(frame: FrameType) -> set[int]:
        return lines.setdefault(str(Path(frame.f_code.co_filename).relative_to(HOME)), set())

    def followed(step: int, **parts: Any) -> Any:
        if step != step_with_replay:
            return train_step(step, **parts)
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            metrics = train_step(step, **parts)
        finally:
            sys.settrace(before)
        assert metrics["replay/fired"] == 1
        return metrics

    train_step = loop.train_step
    settings = [f"run.dir={tmp_path_factory.mktemp('run')}", "run.steps=7", "run.trajectories_every=0", "eval.tasks=0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", followed)
        train.train_from(config.load("lookup", [*settings, "sft.episodes=160", "algorithm.imitation.warm_steps=2"]))
    return lines


def test_a_reader_who_follows_every_call_of_a_step_reads_at_most_twelve_files_and_nine_hundred_lines(walk):
    read = {file: len(numbers) for file, numbers in sorted(walk.items(), key=lambda entry: -len(entry[1]))}
    assert len(read) <= MAX_FILES, read
    assert sum(read.values()) <= MAX_LINES, read


def test_the_readme_says_how_long_the_walk_is(walk):
    said = re.search(r"is (\d+) files and about\s+(\d+) lines", (ROOT / "README.md").read_text("utf-8"))
    assert said, "the README names no number of files and lines"
    assert int(said[1]) == len(walk)
    assert abs(int(said[2]) - sum(map(len, walk.values()))) <= 25
