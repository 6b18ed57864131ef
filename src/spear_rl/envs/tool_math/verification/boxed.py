r"""The answer in a policy's text: what stands in its last \boxed{}."""

from __future__ import annotations

import re
from typing import NamedTuple

_MARKS = re.compile(r"(\\{1,4}(?:boxed|fbox)\s*\{)|\\.|([{}])", re.DOTALL)
_VISIBLE = re.compile(r"\S")


class _Box(NamedTuple):
    start: int
    """Of the command itself."""
    inside: int
    until: int
    """What is in it, from `inside` to here."""
    end: int


def boxed_answer(text: str) -> str | None:
    r"""What is in the last closed box that is not empty, or None; escaped braces are text.

    r"so \boxed{\frac{1}{2}}"           -> r"\frac{1}{2}"
    r"\boxed{3}, no: \boxed{4"          -> "3"
    r"\boxed{\boxed{5}}", r"\boxed{ }"  -> "5", None
    """
    opened: list[tuple[int, int] | None] = []  # where a box and its content start; None is a plain brace
    boxes: list[_Box] = []
    for mark in _MARKS.finditer(text):
        if mark.group(1):
            opened.append((mark.start(), mark.end()))
        elif mark.group(2) == "{":
            opened.append(None)
        elif mark.group(2) and opened and (box := opened.pop()):
            _close(text, boxes, _Box(*box, until=mark.start(), end=mark.end()))
    return text[boxes[-1].inside : boxes[-1].until].strip() if boxes else None


def _close(text: str, boxes: list[_Box], box: _Box) -> None:
    """Add a box that was just closed; those within it are part of it, and a box in a box is one box."""
    if not _VISIBLE.search(text, box.inside, box.until):
        return
    inner = boxes[-1] if boxes and boxes[-1].start >= box.inside else None
    if inner is not None:
        has_more = _VISIBLE.search(text, box.inside, inner.start) or _VISIBLE.search(text, inner.end, box.until)
        if not has_more:
            box = _Box(box.start, inner.inside, inner.until, box.end)
    while boxes and boxes[-1].start >= box.start:
        boxes.pop()
    boxes.append(box)
