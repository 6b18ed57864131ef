"""What completes prompts: the policy itself, a server, or a scripted stand-in. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spear_rl.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a completion."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """A completion ends with the first of these it contains, besides the model's own end token."""


class Generator(Protocol):
    """Anything that completes prompts."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
