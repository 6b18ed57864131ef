"""The generator protocol: the policy, a server or a script completes prompts. Token ids in, token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from spear_rl.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a completion."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Stop strings: a completion ends with the first one it contains, or with the model's end token."""


class Generator(Protocol):
    """Completes a batch of prompts; one of them may have a lower limit than others (`types.ShortPrompt`)."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...


class Stream(Protocol):
    """Continuous batching: prompts may be added while others are being completed.

    add       request a completion; `key` names the conversation, whose next prompt may reuse this one's prefix
    finished  wait for at least one completion and return those that are finished; empty if none is pending
    len()     the number of pending completions
    """

    def add(self, key: int, prompt: list[int]) -> None: ...
    def finished(self) -> list[tuple[int, Completion]]: ...
    def __len__(self) -> int: ...


@runtime_checkable
class Streaming(Protocol):
    """A generator with continuous batching.

    The completion of a key's n-th prompt must not depend on the other pending prompts: they arrive in whatever order
    environments answer.
    """

    def stream(self) -> Stream: ...


def drained(stream: Stream, prompts: Sequence[list[int]]) -> list[Completion]:
    """One completion per prompt from a stream, in the prompts' order."""
    for key, prompt in enumerate(prompts):
        stream.add(key, prompt)
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done |= dict(stream.finished())
    return [done[key] for key in range(len(prompts))]
