"""From a row to a problem: which columns hold what, and the habits of the known sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spear_rl.envs.tool_math.data.problem import Problem
from spear_rl.envs.tool_math.data.rows import Row
from spear_rl.envs.tool_math.verification.answers import as_integer
from spear_rl.envs.tool_math.verification.boxed import boxed_answer

PROBLEM_COLUMNS = ("problem", "question", "prompt", "query", "input")
ANSWER_COLUMNS = (
    *("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "target", "label"),
    "solution",
)
FAMILY_COLUMNS = ("subject", "type", "category")
"""In the order in which they are looked for; a dot leads into a nested object."""

# DAPO's own files put these around every problem, and ask for another answer format than ours.
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_AFTER = "Remember to put your answer on its own line"
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


def problems_in(rows: Sequence[Row], *, place: str, problem: str = "", answer: str = "") -> tuple[list[Problem], int]:
    """(problems, how many rows were left out for want of a question or an answer).

    Args:
        place: what the rows come from, for a complaint.
        problem, answer: the columns; found by their usual names if left out.
    """
    if not rows:
        raise ValueError(f"{place} holds no problem")
    problem = _column(rows, problem, PROBLEM_COLUMNS, f"{place}: problem_column")
    answer = _column(rows, answer, ANSWER_COLUMNS, f"{place}: answer_column")
    family = next((name for name in FAMILY_COLUMNS if any(isinstance(row.get(name), str) for row in rows)), "")
    found = []
    for row in rows:
        text, right = _question(_value(row, problem)), _answer(_value(row, answer))
        if text and right:
            found.append(Problem(text, right, str(_value(row, family) or "") if family else ""))
    if not found:
        raise ValueError(f"{place}: no row has both a problem ({problem}) and an answer ({answer})")
    return found, len(rows) - len(found)


def distinct(problems: Iterable[Problem]) -> tuple[list[Problem], int]:
    """(each problem once, how many were left out because copies of them have different answers), by content hash."""
    by_content: dict[str, Problem] = {}
    disputed: set[str] = set()
    for problem in problems:
        content = problem.content_hash()
        first = by_content.setdefault(content, problem).answer
        if (as_integer(first) or first) != (as_integer(problem.answer) or problem.answer):
            disputed.add(content)
    kept = [by_content[content] for content in sorted(by_content) if content not in disputed]
    return kept, len(disputed)


def _column(rows: Sequence[Row], given: str, known: Sequence[str], what: str) -> str:
    for name in [given] if given else known:
        if any(_value(row, name) not in (None, "") for row in rows[:100]):
            return name
    there = ", ".join(map(str, rows[0]))
    wanted = f"there is no column {given!r}" if given else f"none of the columns {', '.join(known)} is there"
    raise ValueError(f"{what}: {wanted}; the file has: {there}")


def _value(row: Row, name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _question(value: Any) -> str:
    """A text, or the last thing a user says in a conversation."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        said = [m.get("content") for m in value if isinstance(m, Mapping) and m.get("role", "user") == "user"]
        value = said[-1] if said else ""
    if not isinstance(value, str):
        return ""
    return _without_frame(value)


def _without_frame(text: str) -> str:
    """The problem without what DAPO's files put before it, up to a blank line, and after it.

    Only whole passes over the text: it may be hostile, and a pattern that begins with blanks tries each of them.
    """
    start = text.find(_DAPO_BEFORE)
    if start >= 0 and (blank := _BLANK_LINE.search(text, start)):
        text = text[:start].rstrip() + text[blank.end() :]
    lines = text.split("\n")
    for number, line in enumerate(lines[1:], 1):
        if line.lstrip().startswith(_DAPO_AFTER):
            lines = lines[:number]
            break
    return "\n".join(lines).strip()


def _answer(value: Any) -> str:
    """The final answer: after GSM8K's ####, in the box of a worked solution, or the value itself."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[0] if len(value) == 1 else None
    if isinstance(value, bool) or value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    if "####" in text:
        text = text.rpartition("####")[2].strip().replace(",", "")
    boxed = boxed_answer(text)
    return text if boxed is None else boxed
