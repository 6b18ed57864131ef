"""One child process as the interpreter sees it: sends code, waits within the limits, reads the result.

Everything a child sends is untrusted and of bounded length.
"""

import os
import select
import signal
import time
from contextlib import suppress

from spear_rl.sandbox.client.forkserver import ForkServer
from spear_rl.sandbox.protocol import BROKEN, CELL, DONE, HEADER, OUT_OF_MEMORY, RAISED, READY, SEED, frame, is_readable
from spear_rl.sandbox.types import Limits, Result, SandboxUnavailable

START_SECONDS = 60.0
END_SECONDS = 10.0
LOST = " The variables of earlier calls are lost."


class Episode:
    """One child process and its state, for one thread at a time. Ends when it breaks a limit or is closed."""

    def __init__(self, server: ForkServer, limits: Limits, *, seed: int | None) -> None:
        self._server, self._limits = server, limits
        self._child, (self._code, self._reply, self._stdout, self._stderr) = server.take()
        self.is_alive, self._is_stopped = True, False
        for descriptor in (self._code, self._reply):
            os.set_blocking(descriptor, False)
        try:
            kind, text = self._exchange(b"", START_SECONDS)
            if kind != READY:
                raise SandboxUnavailable(
                    f"the interpreter could not isolate itself: {text if kind == BROKEN else kind!r}"
                )
            self._unsent = b"" if seed is None else frame(SEED, str(int(seed)).encode())
        except BaseException:
            self.close()
            raise

    def run(self, code: str, *, is_last: bool) -> Result:
        """Run code; after the last call the child is killed without waiting for it."""
        started, lost = time.monotonic(), "" if is_last else LOST
        try:
            if is_readable(self._reply, 0):
                raise _ProtocolError("The interpreter sent data or died between two calls.")
            for stream in (self._stdout, self._stderr):
                os.ftruncate(stream, 0)
            if self._is_stopped:
                self._server.signal(self._child, signal.SIGCONT)
                self._is_stopped = False
            request = self._unsent + frame(CELL, code.encode("utf-8", "surrogatepass"))
            self._unsent = b""
            kind, text = self._exchange(request, self._limits.seconds)
            if kind not in (DONE, RAISED, OUT_OF_MEMORY):
                raise _ProtocolError("The interpreter's reply is malformed.")
        except TimeoutError:
            self._kill()
            return self._result(started, f"Timed out after {self._limits.seconds:g} seconds.{lost}", timed_out=True)
        except (EOFError, BrokenPipeError):
            cause, out_of_memory = self._cause_of_death()
            return self._result(started, cause + lost, out_of_memory=out_of_memory)
        except (_ProtocolError, OSError) as error:
            self._kill()
            return self._result(started, f"{error}{lost}")
        if is_last:
            self._server.forget(self._child)
            self.is_alive = False
        else:  # stopped until the next call, so that no timer or signal handler of the code runs meanwhile
            self._server.signal(self._child, signal.SIGSTOP)
            self._is_stopped = True
        error_text = None if kind == DONE else text or "Error"
        return self._result(started, error_text, out_of_memory=kind == OUT_OF_MEMORY)

    def close(self) -> None:
        if self.is_alive:
            self._kill()
        descriptors, self._code = (self._code, self._reply, self._stdout, self._stderr), -1
        if descriptors[0] >= 0:
            for descriptor in descriptors:
                os.close(descriptor)

    def _result(self, started: float, error: str | None, **flags: bool) -> Result:
        seconds = time.monotonic() - started
        stdout, is_stdout_cut = self._output(self._stdout)
        stderr, is_stderr_cut = self._output(self._stderr)
        is_cut, is_lost = is_stdout_cut or is_stderr_cut, not self.is_alive
        error = None if error is None else error[: self._limits.output_chars]
        return Result(stdout, error, state_lost=is_lost, truncated=is_cut, stderr=stderr, seconds=seconds, **flags)

    def _output(self, stream: int) -> tuple[str, bool]:
        """(text of a stream within the limit, whether there was more)."""
        max_chars = self._limits.output_chars
        try:
            text = os.pread(stream, 4 * max_chars + 4, 0).decode("utf-8", "replace")
            return text[:max_chars], len(text) > max_chars or os.fstat(stream).st_size > 4 * max_chars + 4
        except OSError:  # the child shares the descriptor's flags and can change them
            return "", True

    def _exchange(self, request: bytes, seconds: float) -> tuple[bytes, str]:
        """Send a request and return the reply; TimeoutError, EOFError or _ProtocolError if there is none."""
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
                elif chunk := os.read(self._reply, needed - len(received)):
                    received += chunk
                else:
                    raise EOFError
            if needed == HEADER.size == len(received):
                needed += HEADER.unpack(received)[1]
                if needed > HEADER.size + self._limits.reply_bytes:
                    raise _ProtocolError("The interpreter's reply is too long.")
        return received[:1], received[HEADER.size :].decode("utf-8", "replace")

    def _kill(self) -> None:
        self.is_alive = False
        self._server.signal(self._child, signal.SIGKILL)
        # The pipe closes once the child and its memory are gone: wait here, without holding the server's lock.
        deadline = time.monotonic() + END_SECONDS
        with suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                if is_readable(self._reply, left) and not os.read(self._reply, 1 << 16):
                    break
        self._server.end(self._child)

    def _cause_of_death(self) -> tuple[str, bool]:
        """(how the child ended by itself, whether probably out of memory)."""
        self.is_alive = False
        status = self._server.end(self._child)
        if not os.WIFSIGNALED(status):
            return f"The interpreter ended with code {os.waitstatus_to_exitcode(status)}.", False
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return "The interpreter was killed, most likely for want of memory.", True
        name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
        return f"The interpreter crashed ({name}).", False


class _ProtocolError(Exception):
    """The child broke the protocol."""
