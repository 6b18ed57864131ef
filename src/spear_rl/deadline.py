"""Reading from a connection until a deadline, however slowly the other side sends. Standard library only."""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class DeadlineReader(io.RawIOBase):
    """A connection's bytes; TimeoutError once `until` has passed. A socket's own time-out starts anew with every byte.

    Args:
        raw: what `connection.makefile` reads from; it keeps the connection open until it is closed.
        until: on the clock of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket, raw: io.RawIOBase, *, until: float) -> None:
        self._connection, self._raw, self.until = connection, raw, until

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._connection.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._raw.close()
