"""A problem: a text and its answer. Where it comes from and how it is played are the business of others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked and what is right."""

    text: str
    answer: str
    family: str = ""
    code: str = ""
    """Python that prints the answer, where that is known."""

    def content_hash(self) -> str:
        """Of the question alone, its white space apart: two problems with the same one are the same problem."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()


def held_out(content_hash: str) -> str:
    """The split a problem belongs to by what it says: one in twelve is for validation, one in twelve for test."""
    return {0: "validation", 1: "test"}.get(int(content_hash[:8], 16) % 12, "train")
