"""What completes prompts: the policy itself, a server, or a scripted stand-in. Token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


class Stream(Protocol):
    """Completions as they come: prompts may be added while others are being written."""

    def add(self, key: int, prompt: list[int]) -> None:
        """Ask for a completion; `key` names the conversation, whose next prompt may reuse what is kept of this one."""
        ...

    def finished(self) -> list[tuple[int, Completion]]:
        """Go on until at least one is done, and give all that are done; nothing when nothing is under way."""
        ...

    def __len__(self) -> int:
        """How many are under way."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """A generator that can take a prompt while it writes others.

    What it writes for the n-th prompt of a key must depend on nothing that is under way beside it: prompts arrive in
    whatever order environments answer.
    """

    def stream(self) -> Stream: ...


class Lockstep:
    """A stream over a generator that only knows batches: all that was asked for is written together, in that order."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._asked: list[tuple[int, list[int]]] = []

    def add(self, key: int, prompt: list[int]) -> None:
        self._asked.append((key, prompt))

    def finished(self) -> list[tuple[int, Completion]]:
        asked, self._asked = self._asked, []
        if not asked:
            return []
        completions = self._generator.generate([prompt for _, prompt in asked])
        return list(zip((key for key, _ in asked), completions, strict=True))

    def __len__(self) -> int:
        return len(self._asked)


def drained(stream: Stream, prompts: Sequence[list[int]]) -> list[Completion]:
    """One completion a prompt from a stream, in the prompts' order."""
    for key, prompt in enumerate(prompts):
        stream.add(key, prompt)
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done |= dict(stream.finished())
    return [done[key] for key in range(len(prompts))]
