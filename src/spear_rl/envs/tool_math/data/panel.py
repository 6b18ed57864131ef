"""Which problems make up a split, in an order that no machine changes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spear_rl.envs.tool_math.data.columns import distinct, problems_in
from spear_rl.envs.tool_math.data.problem import Problem, held_out
from spear_rl.envs.tool_math.data.rows import HUGGING_FACE, rows_in
from spear_rl.envs.tool_math.generated import LEVELS, generated_panel
from spear_rl.errors import OptionError
from spear_rl.io.escaping import one_line

_log = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
FOLDER = "SPEAR_RL_MATH_DATA"
"""The variable that names the folder of the known sets."""

KNOWN: dict[str, tuple[str, ...]] = {
    "dapo": ("dapo_math_17k.parquet", "dapo-math-17k.parquet", "dapo_math_17k.jsonl", "dapo-math-17k.jsonl"),
    "gsm8k": ("gsm8k_train.jsonl", "gsm8k_train.parquet", "gsm8k/train.jsonl"),
    "gsm8k-test": ("gsm8k_test.jsonl", "gsm8k_test.parquet", "gsm8k/test.jsonl"),
    "math500": ("math500.jsonl", "math_500.jsonl", "math500.parquet", "MATH-500/test.jsonl"),
    "aime24": ("aime24.jsonl", "aime24_harness.jsonl", "aime_2024.jsonl", "aime24.parquet", "aime_2024.parquet"),
    "aime25": ("aime25.jsonl", "aime25_harness.jsonl", "aime_2025.jsonl", "aime25.parquet", "aime_2025.parquet"),
}
"""Sets by name and what their file may be called in the folder."""
BENCHMARKS = ("gsm8k-test", "math500", "aime24", "aime25")
"""Sets to test on, whole."""
_OWN_TEST = {"gsm8k": "gsm8k-test"} | {name: name for name in BENCHMARKS}


class Entry(NamedTuple):
    """One problem of a panel."""

    id: str
    """tool_math/<set>/...: the same on every machine."""
    problem: Problem

    @property
    def sha256(self) -> str:
        """Of question and answer."""
        return hashlib.sha256(f"{self.problem.content_hash()}\n{self.problem.answer}".encode()).hexdigest()


class Source(NamedTuple):
    """Where problems come from."""

    data: str = ""
    """Generated if empty; a known set's name, a file, or hf:owner/name."""
    test_data: str = ""
    """The same for the split test; a part of `data` if empty, or the set's own test file where it has one."""
    data_folder: str = ""
    """Of the known sets, instead of the variable."""
    level: str = "small"
    """Of the generated problems."""
    problem_column: str = ""
    answer_column: str = ""


def entries(split: str, source: Source) -> tuple[Entry, ...]:
    """The problems of a split, sorted by id."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: there is {', '.join(SPLITS)}")
    if not source.data and not source.test_data:
        return _generated(split, source.level)
    test_data = source.test_data or _OWN_TEST.get(source.data, "")
    held = _file_problems(test_data, source, "test") if test_data else ()
    if split == "test" and test_data:
        return _named(_set_name(test_data), held)
    if not source.data:
        return _generated(split, source.level)
    if source.data == test_data:
        raise ValueError(
            f"data={test_data} is all for the split test; for {split} give other data, and this as test_data"
        )
    own = _file_problems(source.data, source, "train")
    if test_data:
        # What is tested on must not be trained on, also where two files share problems.
        tested = {problem.content_hash() for problem in held}
        own = tuple(problem for problem in own if problem.content_hash() not in tested)
    places = [held_out(problem.content_hash()) for problem in own]
    if test_data:
        places = ["train" if place == "test" else place for place in places]
    chosen = [problem for problem, place in zip(own, places, strict=True) if place == split]
    return _named(_set_name(source.data), chosen)


def _generated(split: str, level: str) -> tuple[Entry, ...]:
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: there is {', '.join(LEVELS)}")
    panel = generated_panel(level, split)
    return tuple(Entry(f"tool_math/{level}/{split}/{number:05d}", problem) for number, problem in enumerate(panel))


def _named(name: str, problems: Sequence[Problem]) -> tuple[Entry, ...]:
    named = (Entry(f"tool_math/{name}/{problem.content_hash()[:16]}", problem) for problem in problems)
    return tuple(sorted(named, key=lambda entry: entry.id))


def _set_name(data: str) -> str:
    if data in KNOWN:
        return data
    if data.startswith(HUGGING_FACE):
        return data.removeprefix(HUGGING_FACE).strip("/").rpartition("/")[2]
    return Path(data).stem


def _file_problems(data: str, source: Source, split: str) -> tuple[Problem, ...]:
    place = _known_file(data, source.data_folder) if data in KNOWN else data
    stamp = 0
    if not place.startswith(HUGGING_FACE):
        place = os.path.abspath(os.path.expanduser(place))
        if not os.path.isfile(place):
            known = ", ".join(KNOWN)
            option = "test_data" if data == source.test_data != source.data else "data"
            raise OptionError(
                f"{option}: there is no file {place}; give a .jsonl, .json or .parquet file, or one of {known}"
            )
        stamp = os.stat(place).st_mtime_ns
    return _loaded(place, split, source.problem_column, source.answer_column, stamp)


@lru_cache(maxsize=8)
def _loaded(place: str, split: str, problem: str, answer: str, stamp: int) -> tuple[Problem, ...]:
    """Read once, unless the file's time (`stamp`) changes."""
    found, num_empty = problems_in(rows_in(place, split=split), place=place, problem=problem, answer=answer)
    kept, num_disputed = distinct(found)
    if num_empty or num_disputed:
        _log.warning("%s: left out %d rows without question or answer and %d problems whose copies have different "
                     "answers", one_line(place), num_empty, num_disputed)  # fmt: skip
    return tuple(kept)


def _known_file(name: str, folder: str) -> str:
    base = folder or os.environ.get(FOLDER, "")
    if not base:
        raise ValueError(f"data={name} is looked for in a folder: set {FOLDER} or the option data_folder to it")
    for file in KNOWN[name]:
        if os.path.isfile(os.path.join(base, file)):
            return os.path.join(base, file)
    raise ValueError(f"data={name}: {base} has none of {', '.join(KNOWN[name])}; put the file there or give its path")
