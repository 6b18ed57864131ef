"""Stop signals: Ctrl-C, SIGTERM and SIGHUP end a run where it can go on exactly. Standard library only."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

SAME_SIGNAL_SECONDS = 1.0
"""A signal so soon after the first is a copy of it: a terminal and a launcher may both send one."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal stopped the run. A KeyboardInterrupt, as code that catches every error lets those through."""

    def __init__(self, number: int, *, at_once: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number
        self.at_once = at_once
        """A second signal: what is not on disk is given up."""
        self.place = ""
        """Where it stopped and what is saved, in words."""


class Stop:
    """Whether a stop was asked for, and what that does to the code that is running. By default none is.

    Outside of all blocks, and in `abandoned`, the first signal raises Stopped at once. In `finished` it waits for the
    next `check`; a second signal raises. In `shielded`, for writing checkpoints, both wait.

    Args:
        notice: called in a thread of its own when a signal has to wait.
    """

    def __init__(self, notice: Callable[[], None] = lambda: None) -> None:
        self.is_armed = False
        """Whether signals can ask at all."""
        self._notice = notice
        self._number = 0
        self._since = 0.0
        self._mode: Literal["abandoned", "finished", "shielded"] = "abandoned"

    @property
    def is_asked(self) -> bool:
        return bool(self._number)

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        if self._number:
            raise Stopped(self._number)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """A block that a first signal does not interrupt."""
        before, self._mode = self._mode, "finished"
        try:
            yield
        finally:
            self._mode = before

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """A block that no signal interrupts."""
        before, self._mode = self._mode, "shielded"
        try:
            yield
        finally:
            self._mode = before

    @contextmanager
    def abandoned(self) -> Iterator[None]:
        """A block that a signal interrupts; it ends in Stopped even if code inside catches that."""
        before, self._mode = self._mode, "abandoned"
        try:
            self.check()
            yield
            self.check()
        except Exception as error:
            if self._number:
                raise Stopped(self._number) from error
            raise
        finally:
            self._mode = before

    def on_signal(self, number: int, _: FrameType | None = None) -> None:
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        if not self._number:
            self._number, self._since = number, now
            if self._mode == "abandoned":
                raise Stopped(number)
            # A handler that prints could meet a half-done print of the code that it interrupts.
            threading.Thread(target=self._notice, daemon=True).start()
        elif now - self._since >= SAME_SIGNAL_SECONDS and self._mode != "shielded":
            raise Stopped(number, at_once=True)


@contextmanager
def stop_on_signals(notice: Callable[[], None] = lambda: None) -> Iterator[Stop]:
    """A `Stop` that signals set during the block; ignored ones (nohup, a background job) stay ignored.

    Stopped leaves the block as such, also where Python or a library turned it into another exception on its way. Only
    the main thread is given signals; in another one no signal stops the block.
    """
    stop, before = Stop(notice), {}
    try:
        if threading.current_thread() is threading.main_thread():
            stop.is_armed = True
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before[number] = signal.signal(number, stop.on_signal)
        yield stop
    except Exception as error:
        if stopped := _stopped_behind(error):
            raise stopped from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped_behind(error: BaseException | None) -> Stopped | None:
    while error is not None and not isinstance(error, Stopped):
        error = error.__cause__ or error.__context__
    return error


def _leave_terminal() -> None:
    """Print to nowhere if the terminal is gone: an error of a print must not keep a checkpoint from being written."""
    for descriptor in (1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:  # hung up; a pipe or a file has another error
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, descriptor)
                os.close(nothing)
