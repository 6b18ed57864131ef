"""The interpreter's side of one child: hands it code, waits no longer than allowed, reads what came of it.

Everything a child says is untrusted bytes of bounded length. What it does not say in time it does not say at all.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from spear_rl.sandbox.client.forkserver import ForkServer
from spear_rl.sandbox.limits import Limits
from spear_rl.sandbox.protocol import BROKEN, CELL, DONE, HEADER, OUT_OF_MEMORY, RAISED, READY, SEED, frame, is_readable
from spear_rl.sandbox.result import Result
from spear_rl.sandbox.unavailable import SandboxUnavailable

START_SECONDS = 60.0
END_SECONDS = 10.0
LOST = " The variables of earlier calls are lost."


class Episode:
    """One child process and its state. Not for two threads at once. Ends when it breaks a rule or is closed."""

    def __init__(self, server: ForkServer, limits: Limits, *, seed: int | None) -> None:
        self._server, self._limits = server, limits
        self._child, (self._code, self._reply, self._stdout, self._stderr) = server.take()
        self.is_alive, self._is_stopped = True, False
        for descriptor in (self._code, self._reply):
            os.set_blocking(descriptor, False)
        try:
            kind, text = self._answer(b"", START_SECONDS)
            if kind != READY:
                raise SandboxUnavailable(
                    f"the interpreter could not shut itself in: {text if kind == BROKEN else kind!r}"
                )
            self._unsent = b"" if seed is None else frame(SEED, str(int(seed)).encode())
        except BaseException:
            self.close()
            raise

    def run(self, code: str, *, is_last: bool) -> Result:
        """Run a piece of code; after the last one the child is not waited for."""
        started, lost = time.monotonic(), "" if is_last else LOST
        try:
            if is_readable(self._reply, 0):
                raise _Misbehaved("The interpreter spoke out of turn or died between two calls.")
            for stream in (self._stdout, self._stderr):
                os.ftruncate(stream, 0)
            self._continue()
            request = self._unsent + frame(CELL, code.encode("utf-8", "surrogatepass"))
            self._unsent = b""
            kind, text = self._answer(request, self._limits.seconds)
            if kind not in (DONE, RAISED, OUT_OF_MEMORY):
                raise _Misbehaved("The interpreter's reply makes no sense.")
        except TimeoutError:
            self._kill()
            return self._result(started, f"Timed out after {self._limits.seconds:g} seconds.{lost}", timed_out=True)
        except (EOFError, BrokenPipeError):
            why, out_of_memory = self._death()
            return self._result(started, why + lost, out_of_memory=out_of_memory)
        except (_Misbehaved, OSError) as error:
            self._kill()
            return self._result(started, f"{error}{lost}")
        if is_last:
            self._server.forget(self._child)
            self.is_alive = False
        else:
            self._stop()
        told = None if kind == DONE else text or "Error"
        return self._result(started, told, out_of_memory=kind == OUT_OF_MEMORY)

    def close(self) -> None:
        """Leave nothing of it behind."""
        if self.is_alive:
            self._kill()
        descriptors, self._code = (self._code, self._reply, self._stdout, self._stderr), -1
        if descriptors[0] >= 0:
            for descriptor in descriptors:
                os.close(descriptor)

    def _result(
        self, started: float, error: str | None, *, timed_out: bool = False, out_of_memory: bool = False
    ) -> Result:
        seconds = time.monotonic() - started
        stdout, cut = self._printed(self._stdout)
        stderr, cut_too = self._printed(self._stderr)
        return Result(
            stdout=stdout,
            error=None if error is None else error[: self._limits.output_chars],
            timed_out=timed_out,
            out_of_memory=out_of_memory,
            state_lost=not self.is_alive,
            truncated=cut or cut_too,
            stderr=stderr,
            seconds=seconds,
        )

    def _printed(self, stream: int) -> tuple[str, bool]:
        """(what is kept of a stream, whether there was more)."""
        most = self._limits.output_chars
        try:
            text = os.pread(stream, 4 * most + 4, 0).decode("utf-8", "replace")
            return text[:most], len(text) > most or os.fstat(stream).st_size > 4 * most + 4
        except OSError:  # the child shares the descriptor's flags and can spoil them
            return "", True

    def _answer(self, request: bytes, seconds: float) -> tuple[bytes, str]:
        """Send a request and read the reply to it; TimeoutError, EOFError or _Misbehaved if there is none."""
        deadline = time.monotonic() + seconds
        received, needed = b"", HEADER.size
        poller = select.poll()
        poller.register(self._reply, select.POLLIN)
        if request:
            poller.register(self._code, select.POLLOUT)
        while len(received) < needed:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for descriptor, _ in poller.poll(left * 1000):
                if descriptor == self._code:
                    with suppress(BlockingIOError):
                        request = request[os.write(self._code, request[:65536]) :]
                    if not request:
                        poller.unregister(self._code)
                elif piece := os.read(self._reply, needed - len(received)):
                    received += piece
                else:
                    raise EOFError
            if needed == HEADER.size == len(received):
                needed += HEADER.unpack(received)[1]
                if needed > HEADER.size + self._limits.reply_bytes:
                    raise _Misbehaved("The interpreter's reply is too long.")
        return received[:1], received[HEADER.size :].decode("utf-8", "replace")

    def _stop(self) -> None:
        """Freeze it until the next call, so that nothing it left behind (a timer, a signal handler) runs meanwhile."""
        self._server.signal(self._child, signal.SIGSTOP)
        self._is_stopped = True

    def _continue(self) -> None:
        if self._is_stopped:
            self._server.signal(self._child, signal.SIGCONT)
            self._is_stopped = False

    def _kill(self) -> int:
        """End it; its wait status."""
        self.is_alive = False
        self._server.signal(self._child, signal.SIGKILL)
        # Its end of the pipe closes when it is gone, its memory included: wait here, where nobody else has to.
        deadline = time.monotonic() + END_SECONDS
        with suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if is_readable(self._reply, left) and not os.read(self._reply, 1 << 16):
                    break
        return self._server.end(self._child)

    def _death(self) -> tuple[str, bool]:
        """(how it died by itself, whether for want of memory as far as one can tell)."""
        self.is_alive = False
        status = self._server.end(self._child)
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            if number == signal.SIGKILL:
                return "The interpreter was killed, most likely for want of memory.", True
            return f"The interpreter crashed ({name}).", False
        return f"The interpreter ended with code {os.waitstatus_to_exitcode(status)}.", False


class _Misbehaved(Exception):  # noqa: N818
    """The child broke the protocol."""
