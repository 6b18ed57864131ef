"""The problems of each split, in the same order on every machine."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spear_rl.envs.shared.generated_panels import content_split
from spear_rl.envs.tool_math.generated import NUM_PROBLEMS, generated_panels
from spear_rl.envs.tool_math.problems import HUGGING_FACE, Problem, distinct, problems_in, rows_in
from spear_rl.errors import OptionError
from spear_rl.io.escaping import one_line

_log = logging.getLogger(__name__)

SPLITS = tuple(NUM_PROBLEMS)
FOLDER = "SPEAR_RL_MATH_DATA"
"""The environment variable for the directory of the known sets."""

KNOWN: dict[str, tuple[str, ...]] = {
    "dapo": ("dapo_math_17k.parquet", "dapo-math-17k.parquet", "dapo_math_17k.jsonl", "dapo-math-17k.jsonl"),
    "gsm8k": ("gsm8k_train.jsonl", "gsm8k_train.parquet", "gsm8k/train.jsonl"),
    "gsm8k-test": ("gsm8k_test.jsonl", "gsm8k_test.parquet", "gsm8k/test.jsonl"),
    "math500": ("math500.jsonl", "math_500.jsonl", "math500.parquet", "MATH-500/test.jsonl"),
    "aime24": ("aime24.jsonl", "aime24_harness.jsonl", "aime_2024.jsonl", "aime24.parquet", "aime_2024.parquet"),
    "aime25": ("aime25.jsonl", "aime25_harness.jsonl", "aime_2025.jsonl", "aime25.parquet", "aime_2025.parquet"),
}
"""Known sets and the names their file may have in the directory."""
BENCHMARKS = ("gsm8k-test", "math500", "aime24", "aime25")
"""Sets whose every problem is in the split test."""
_OWN_TEST = {"gsm8k": "gsm8k-test"} | {name: name for name in BENCHMARKS}


class Entry(NamedTuple):
    """One problem of a split."""

    id: str
    """tool_math/<set>/...: the same on every machine."""
    problem: Problem


class Source(NamedTuple):
    """Where problems come from."""

    data: str = ""
    """A known set's name, a file, or hf:owner/name; several with commas between them; empty for generated problems.
    Of several, the family of a problem is its set."""
    test_data: str = ""
    """The same for the split test; empty for a part of `data`, or the sets' own test files where they have one."""
    data_folder: str = ""
    """The directory of the known sets, instead of the environment variable."""
    level: str = "small"
    """Of generated problems."""
    problem_column: str = ""
    answer_column: str = ""


def entries(split: str, source: Source) -> tuple[Entry, ...]:
    """The problems of a split, sorted by id."""
    tested = {name: _file_problems(name, source, "test") for name in _test_sets(source)}
    if split == "test" and tested:
        return _entries(tested, "test_data")
    if not source.data:
        panel = generated_panels(source.level)[split]
        return tuple(Entry(f"tool_math/{source.level}/{split}/{n:05d}", problem) for n, problem in enumerate(panel))
    names = _sets(source.data)
    if only_tested := [name for name in names if name in tested]:
        raise ValueError(
            f"data={only_tested[0]} is all for the split test; for {split} give other data, and this as test_data"
        )
    # No problem of the test files is trained on, even where two files share problems; nor is one in two sets.
    taken = {problem.content_hash() for problems in tested.values() for problem in problems}
    chosen: dict[str, list[Problem]] = {name: [] for name in names}
    for name in names:
        for problem in _file_problems(name, source, "train"):
            content = problem.content_hash()
            own_split = content_split(content)
            if tested and own_split == "test":
                own_split = "train"
            if own_split == split and content not in taken:
                taken.add(content)
                chosen[name].append(problem)
    return _entries(chosen, "data")


def _test_sets(source: Source) -> list[str]:
    """The sets of the split test."""
    return _sets(source.test_data) or [_OWN_TEST[name] for name in _sets(source.data) if name in _OWN_TEST]


def _sets(given: str) -> list[str]:
    """The names between commas, each once. A file's own name may have commas in it."""
    if os.path.isfile(os.path.expanduser(given)):
        return [given]
    return list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))


def _entries(problems: Mapping[str, Sequence[Problem]], option: str) -> tuple[Entry, ...]:
    """The problems of all sets, sorted by id."""
    names = [_name_of(data) for data in problems]
    if len(set(names)) < len(names):
        raise OptionError(f"{option}: two of its sets have the same name: {', '.join(names)}; rename a file")
    found = []
    for name, own in zip(names, problems.values(), strict=True):
        for problem in own:
            shown = replace(problem, family=name) if len(names) > 1 else problem
            found.append(Entry(f"tool_math/{name}/{problem.content_hash()[:16]}", shown))
    return tuple(sorted(found, key=lambda entry: entry.id))


def _name_of(data: str) -> str:
    if data.startswith(HUGGING_FACE):
        return data.removeprefix(HUGGING_FACE).strip("/").rpartition("/")[2]
    return data if data in KNOWN else Path(data).stem


def _file_problems(data: str, source: Source, split: str) -> tuple[Problem, ...]:
    columns = source.problem_column, source.answer_column
    if data.startswith(HUGGING_FACE):
        return _loaded(data, split, *columns, 0)
    place = os.path.abspath(os.path.expanduser(_known_file(data, source.data_folder) if data in KNOWN else data))
    if not os.path.isfile(place):
        option = "data" if data in _sets(source.data) else "test_data"
        raise OptionError(
            f"{option}: there is no file {place}; "
            f"give a .jsonl, .json, .csv or .parquet file, or one of {', '.join(KNOWN)}"
        )
    return _loaded(place, split, *columns, os.stat(place).st_mtime_ns)


@lru_cache(maxsize=8)
def _loaded(place: str, split: str, problem: str, answer: str, modified: int) -> tuple[Problem, ...]:
    """Read once, until the file's modification time changes."""
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
