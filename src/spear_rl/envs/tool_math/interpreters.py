"""The code interpreter of this process, shared by all its episodes and started at the first call."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from spear_rl.envs.tool_math.env import Session


def open_session(seconds: float, memory_mb: int, output_chars: int, backend: str) -> AbstractContextManager[Session]:
    """A place for the code of one episode."""
    session: AbstractContextManager[Session] = _interpreter(
        os.getpid(), seconds, memory_mb, output_chars, backend
    ).session(seed=0)  # an episode must repeat itself
    return session


@lru_cache(maxsize=4)
def _interpreter(pid: int, seconds: float, memory_mb: int, output_chars: int, backend: str) -> Any:
    # By process: what a fork inherits belongs to its parent.
    from spear_rl.sandbox import Interpreter, Limits

    return Interpreter(Limits(seconds=seconds, memory_mb=memory_mb, output_chars=output_chars), backend=backend)
