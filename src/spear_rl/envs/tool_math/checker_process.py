"""The process in which math-verify runs: a JSON line [right answer, given answer] in, true or false out."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from contextlib import suppress

SECONDS = 3
"""For reading an answer and for comparing two; math-verify keeps to it by signals, where a computation lets it."""
MEMORY = 2 << 30
"""Bytes: a formula must not take the machine's memory."""


def is_same(gold: str, given: str) -> bool:
    from math_verify import parse, verify

    try:
        mine, other = (parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS) for text in (gold, given))
        return bool(verify(mine, other, timeout_seconds=SECONDS))
    except Exception:  # sympy raises whatever a formula makes it raise
        return False


def main() -> None:
    """Answer until there are no more questions."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    logging.disable(logging.CRITICAL)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    is_same("1", "\\frac{2}{2}")  # the first one loads sympy
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        gold, given = json.loads(line)
        answers.write(b"true\n" if is_same(gold, given) else b"false\n")
        answers.flush()


if __name__ == "__main__":
    main()
