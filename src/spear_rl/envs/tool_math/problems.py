"""Problems, and how they are read from data files: jsonl, json, csv, parquet or a Hugging Face dataset."""

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from spear_rl.envs.tool_math.verification.answers import boxed_answer
from spear_rl.envs.tool_math.verification.integers import as_integer
from spear_rl.errors import MissingExtraError

Row = Mapping[str, Any]

HUGGING_FACE = "hf:"
"""hf:owner/name or hf:owner/name:config:split."""
PROBLEM_COLUMNS = ("problem", "question", "prompt", "query", "input", "messages", "conversations")
SOLUTION_COLUMNS = ("solution", "response", "output", "completion", "messages", "conversations")
"""Columns of whole solutions, whose answer is in a box or after ####."""
ANSWER_COLUMNS = (
    *("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "target", "label"),
    *SOLUTION_COLUMNS,
)
FAMILY_COLUMNS = ("subject", "type", "category")
"""Columns in order of preference, in any case; a dot leads into a nested object."""

# DAPO's own files put these around every problem; they ask for another answer format than ours.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line"
_BOX = "\\boxed"
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True, slots=True)
class Problem:
    text: str
    answer: str
    family: str = ""
    code: str = ""
    """Python that prints the answer, if known."""

    def content_hash(self) -> str:
        """Of the question without its white space: problems with the same hash are the same problem."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()


def distinct(problems: Iterable[Problem]) -> tuple[list[Problem], int]:
    """(each problem once, by content hash; how many were dropped because their copies have different answers)."""
    by_content: dict[str, Problem] = {}
    disputed: set[str] = set()
    for problem in problems:
        content = problem.content_hash()
        first = by_content.setdefault(content, problem).answer
        if (as_integer(first) or first) != (as_integer(problem.answer) or problem.answer):
            disputed.add(content)
    return [by_content[content] for content in sorted(by_content) if content not in disputed], len(disputed)


def problems_in(rows: Sequence[Row], *, place: str, problem: str = "", answer: str = "") -> tuple[list[Problem], int]:
    """(problems, number of rows without a question or an answer).

    Args:
        place: the rows' origin, for error messages.
        problem, answer: the columns; found by their usual names if empty.
    """
    if not rows:
        raise ValueError(f"{place} holds no problem")
    problem = _column(rows, problem, PROBLEM_COLUMNS, f"{place}: problem_column")
    answer = _column(rows, answer, ANSWER_COLUMNS, f"{place}: answer_column")
    family = next((name for name in FAMILY_COLUMNS if any(isinstance(_value(row, name), str) for row in rows)), "")
    is_solution = answer.lower() in SOLUTION_COLUMNS
    found = []
    for row in rows:
        text, right = _question(_value(row, problem)), _answer(_value(row, answer), is_solution=is_solution)
        if text and right:
            found.append(Problem(text, right, str(_value(row, family) or "") if family else ""))
    if not found:
        needed = ", in a \\boxed{} or after ####" if is_solution else ""
        raise ValueError(f"{place}: no row has both a problem ({problem}) and an answer ({answer}{needed})")
    return found, len(rows) - len(found)


def _column(rows: Sequence[Row], given: str, known: Sequence[str], what: str) -> str:
    for name in [given] if given else known:
        if any(_value(row, name) not in (None, "") for row in rows[:100]):
            return name
    wanted = f"there is no column {given!r}" if given else f"none of the columns {', '.join(known)} is there"
    raise ValueError(f"{what}: {wanted}; the file has: {', '.join(map(str, rows[0]))}")


def _value(row: Row, name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        spelled = part if part in value else next((n for n in value if str(n).strip().lower() == part.lower()), part)
        value = value.get(spelled)
    return value


def _question(value: Any) -> str:
    """A text, or the last user message of a conversation, without the sentences that DAPO puts around it.

    Linear in the text's length, which may be hostile: a pattern that begins with white space would not be.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = _said_by(("user", "human"), value)
    if not isinstance(value, str):
        return ""
    text, start = value, value.find(_DAPO_BEFORE)
    if start >= 0 and (blank := _BLANK_LINE.search(text, start)):
        text = text[:start].rstrip() + text[blank.end() :]
    lines = text.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if line.lstrip().startswith(_DAPO_AFTER):
            lines = lines[:number]
            break
    return "\n".join(lines).strip()


def _answer(value: Any, *, is_solution: bool = False) -> str:
    """The final answer: after GSM8K's ####, in the box of a worked solution, or the value itself.

    The text of a solution with neither is not an answer, unless it is an integer.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if any(isinstance(message, Mapping) for message in value):
            value = _said_by(("assistant", "gpt"), value)
        else:
            value = value[0] if len(value) == 1 else None
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if "####" in text:
        text, is_solution = text.rpartition("####")[2].strip().replace(",", ""), False
    boxed = boxed_answer(text)
    if boxed is None and ((is_solution and as_integer(text) is None) or _BOX in text):
        return ""
    return text if boxed is None else boxed


def _said_by(roles: Sequence[str], messages: Sequence[Any]) -> Any:
    """The last message of a role, in OpenAI's or ShareGPT's form; one without a role is the user's."""
    said = [
        message.get("content", message.get("value"))
        for message in messages
        if isinstance(message, Mapping) and message.get("role", message.get("from", "user")) in roles
    ]
    return said[-1] if said else ""


def rows_in(source: str, *, split: str) -> list[Row]:
    """All rows of a file, or of a Hugging Face dataset (there of `split`, or of the only split)."""
    if source.startswith(HUGGING_FACE):
        return _hugging_face_rows(source, split)
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet_rows(path)
    if suffix not in (".jsonl", ".json", ".csv"):
        raise ValueError(f"{path}: a file of problems ends in .jsonl, .json, .csv or .parquet")
    try:
        rows = list(_csv_rows(path) if suffix == ".csv" else _json_rows(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid UTF-8: {error}") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not valid CSV: {error}") from error
    return [_row(place, row) for place, row in rows]


def _row(place: str, value: Any) -> Row:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
        value = dict(zip(("problem", "answer"), value, strict=True))
    elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        value = {"messages": value}
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{place}: an object with a problem and an answer, or a list of the two, was expected, not "
            f"{f'a list of {len(value)}' if isinstance(value, list) else type(value).__name__}"
        )
    return value


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, row by the names in the first line)."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(csv.DictReader(lines), 1))


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, value) of every line or list entry."""
    if path.suffix.lower() == ".json":
        table = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
        if not isinstance(table, list):
            raise ValueError(f"{path}: a list of problems was expected; for one object per line use .jsonl")
        yield from ((f"{path}, entry {number}", row) for number, row in enumerate(table, 1))
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parsed(line, place)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not valid JSON: {error}") from error


def _parquet_rows(path: Path) -> list[Row]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{path.name} is a parquet file, which needs pyarrow: pip install pyarrow, or 'spear-rl[math]'"
        ) from error
    version = str(import_module("pyarrow").__version__)
    if [int(part) for part in version.split(".")[:3] if part.isdecimal()] < [14, 0, 1]:
        raise MissingExtraError(f"pyarrow {version} can run code that a file holds: pip install 'pyarrow>=14.0.1'")
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow has a dozen of its own
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error
    return rows


def _hugging_face_rows(source: str, split: str) -> list[Row]:
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{source} needs the package datasets: pip install datasets") from error
    name, config, own_split = [*source.removeprefix(HUGGING_FACE).split(":"), "", ""][:3]
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # from a wrong name to no network
        raise ValueError(f"{source} cannot be loaded: {type(error).__name__}: {error}") from error
    names = list(found)
    chosen = own_split or (split if split in names else names[0] if len(names) == 1 else "")
    if chosen not in names:
        there = ", ".join(names)
        raise ValueError(f"{source} has no split {chosen or split!r} (there is {there}): name one after the config's :")
    return list(found[chosen])
