"""A first-in-first-out semaphore. With the one of `threading` a caller in a loop overtakes those who wait."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Places:
    """At most `number` callers at once; a freed slot goes to the longest waiter."""

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_free:  # nobody waits then: a free place is handed on before it is counted
                self._num_free -= 1
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # an interrupt while waiting
            with self._lock:
                if gate in self._waiting:
                    self._waiting.remove(gate)
                else:
                    self._leave()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._num_free += 1
