"""A first-in-first-out semaphore. With `threading.Semaphore`, a caller in a loop overtakes those who wait."""

import threading
from collections import deque


class FairSemaphore:
    """At most `number` callers at once; a freed slot goes to the one who has waited longest."""

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_free:  # nobody is waiting: a freed slot is handed on before it is counted
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
                    self._release()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._release()

    def _release(self) -> None:
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._num_free += 1
