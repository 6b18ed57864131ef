"""Out of memory, as one sentence: what was being done, and which setting makes it smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from spear_rl.errors import ShortOfMemoryError
from spear_rl.rollout.generator import Stream
from spear_rl.types import Completion

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""How libraries below torch say it."""


@contextmanager
def memory_for(doing: str, way_out: Callable[[], str]) -> Iterator[None]:
    """What runs out of memory in the block becomes an error that says what to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        raise ShortOfMemoryError(f"out of memory while {doing}: {way_out()}") from error


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that there was not enough memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS)


class GuardedStream:
    """A stream of completions that says what to change where it runs out of memory."""

    def __init__(self, stream: Stream, way_out: Callable[[], str]) -> None:
        self._stream, self._way_out = stream, way_out

    def __len__(self) -> int:
        return len(self._stream)

    def add(self, key: int, prompt: list[int]) -> None:
        self._stream.add(key, prompt)

    def finished(self) -> list[tuple[int, Completion]]:
        with memory_for("generating", self._way_out):
            return self._stream.finished()
