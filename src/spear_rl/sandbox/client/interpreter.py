"""The code interpreter: a pool of sandboxed Python processes, for one-off calls and for episodes with state."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from spear_rl.io.escaping import one_line
from spear_rl.sandbox.client.episode import Episode
from spear_rl.sandbox.client.forkserver import ForkServer, NoProcessError, ServerGoneError
from spear_rl.sandbox.client.semaphore import FairSemaphore
from spear_rl.sandbox.isolation.backends import ISOLATING, UNSAFE
from spear_rl.sandbox.types import Limits, Result, SandboxUnavailable

if TYPE_CHECKING:
    from spear_rl.sandbox.client.fusion import FusionEpisode

FUSION = "sandbox-fusion"
BACKENDS = ("auto", *ISOLATING, UNSAFE, FUSION)
FEATURES = ("landlock", "user", "oom_score_adj", "cgroup")
UNSAFE_WARNING = (
    f"UNSAFE: backend={UNSAFE!r} runs untrusted code WITHOUT ISOLATION. It can read and change every file of this "
    "user, use the network and outlive this program. Use backend='auto' for code that a model writes."
)

log = logging.getLogger("spear_rl.sandbox")

# Each attempt must fail. Run at every start, to detect a kernel that accepts the rules and does not enforce them.
SELF_TEST = """
import os, socket, sys
broken = []
def attempt(name, action):
    try:
        action()
    except OSError:
        return
    broken.append(name)
def fork():
    if os.fork() == 0:
        os._exit(0)
attempt("reading files", lambda: open("/etc/passwd"))
attempt("reading folders", lambda: os.listdir("/proc/1"))
attempt("writing files", lambda: open("/spear_rl_self_test", "x"))
attempt("sockets", socket.socket)
attempt("processes", fork)
attempt("signals", lambda: os.kill(os.getppid(), 0))
print("isolated" if not broken else ", ".join(broken))
"""


class Interpreter(AbstractContextManager["Interpreter"]):
    """Runs untrusted Python. Thread-safe.

    backend: "auto" takes the first of "namespaces" and "landlock" that works here and refuses to run if none does;
        "sandbox-fusion" sends the code to the service at `url`; "unsafe-subprocess" isolates nothing.
    packages: imported beforehand; no other package can be imported.
    modules: name -> source of further modules to import. They run once, in the server, outside the sandbox and after
        the packages: pass trusted source only.
    max_running: maximum concurrent calls, by default twice the number of cores; others queue first in, first out.
    max_sessions: maximum sessions with a process. Beyond it the session idle longest loses its variables
        (`Result.state_lost`): waiting for a free one would deadlock a thread that keeps all its sessions open.
    spares: processes started ahead of time.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        backend: str = "auto",
        packages: Sequence[str] = ("numpy", "sympy"),
        modules: Mapping[str, str] | None = None,
        max_running: int | None = None,
        max_sessions: int = 4096,
        spares: int = 2,
        url: str | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend is one of {', '.join(BACKENDS)}, not {backend!r}")
        if (url is not None) != (backend == FUSION):
            raise ValueError(f"url is given with backend={FUSION!r} and with no other")
        if max_sessions < 1 or (max_running is not None and max_running < 1):
            raise ValueError("max_running and max_sessions are 1 or more")
        self.limits = limits or Limits()
        self._requested, self._spares, self._url = backend, spares, url
        self._loaded = {"packages": tuple(packages), "modules": dict(modules or {})}
        # No more calls than sessions, so that there is always an idle session to evict.
        self._max_running = min(max_running or 2 * (os.cpu_count() or 1), max_sessions)
        self._slots, self._max_sessions = FairSemaphore(self._max_running), max_sessions
        self._alive: dict[int, weakref.ref[Session]] = {}
        """Sessions with a process by id, longest idle first."""
        self._alive_lock = threading.RLock()  # the garbage collector may close a session in the thread that holds it
        self._has_evicted = False
        self._lock, self._owner, self._is_closed = threading.Lock(), os.getpid(), False
        self._server: ForkServer | None = None
        self._finalizer: weakref.finalize[..., Interpreter] | None = None
        if backend != FUSION:
            self._running_server()

    @property
    def backend(self) -> str:
        """The backend in use."""
        return self._requested if self._requested == FUSION else self._running_server().backend

    @property
    def pid(self) -> int | None:
        """Of the fork server; None if the code runs at a service."""
        return self._server.pid if self._server is not None else None

    @property
    def features(self) -> dict[str, str]:
        """The active layers of isolation: backend, Landlock version, user, OOM score, control group."""
        about = {} if self._requested == FUSION else self._running_server().about
        shown = {name: str(about[name]) for name in FEATURES if name in about}
        return {"backend": self.backend} | shown | {"max_sessions": str(self._max_sessions)}

    def run(self, code: str) -> Result:
        """Run code in a fresh process that ends with the call."""
        with self._slots, closing(self._new_episode(seed=None)) as episode:
            return replace(self._run_in(episode, code, is_last=True), state_lost=False)

    def session(self, *, seed: int | None = None) -> Session:
        """An episode: variables persist between its calls. `seed` is for `random` and `numpy.random`."""
        self._check_open()
        return Session(self, seed)

    def close(self) -> None:
        """End all processes. Open sessions lose their state and cannot run again."""
        with self._lock:
            self._is_closed = True
            if self._finalizer is not None:
                self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_in(self, episode: Episode | FusionEpisode, code: str, *, is_last: bool) -> Result:
        if not isinstance(code, str):
            raise TypeError(f"code is a str, not {type(code).__name__}")
        if len(code) > self.limits.code_chars:
            return Result("", f"The code has {len(code)} characters, more than the {self.limits.code_chars} allowed.")
        return episode.run(code, is_last=is_last)

    def _admit(self, session: Session) -> None:
        """Mark a session as the most recently used; evict the one idle longest if there are too many."""
        while self._url is None:  # a service keeps no process per episode
            with self._alive_lock:
                if self._alive.pop(id(session), None) or len(self._alive) < self._max_sessions:
                    self._alive[id(session)] = weakref.ref(session)
                    return
            if not self._evict(f"{self._max_sessions} are open: raise max_sessions or open fewer at once"):
                time.sleep(0.001)  # the idle one has just been called

    def _dismiss(self, session: Session) -> None:
        with self._alive_lock:
            self._alive.pop(id(session), None)

    def _evict(self, why: str) -> bool:
        """End the process of the session idle longest; False if none is idle."""
        with self._alive_lock:
            oldest_first = list(self._alive.values())
        for reference in oldest_first:
            session = reference()
            if session is not None and session._evict():
                if not self._has_evicted:
                    log.warning("idle sessions lose their variables from now on (%s)", why)
                self._has_evicted = True
                return True
        return False

    def _new_episode(self, *, seed: int | None) -> Episode | FusionEpisode:
        """A fresh process. Replaces a server that is gone, once; evicts idle sessions if there is no room."""
        server: ForkServer | None = None
        is_second = False
        while True:
            self._check_open()
            if self._url is not None:
                from spear_rl.sandbox.client.fusion import FusionEpisode

                return FusionEpisode(self._url, self.limits, seed=seed)
            try:
                server = self._running_server(instead_of=server)
                return Episode(server, self.limits, seed=seed)
            except ServerGoneError as error:
                if is_second:
                    raise SandboxUnavailable(f"the sandbox's server keeps dying: {error}") from error
                log.warning("the sandbox's server is gone (%s); starting another", one_line(str(error)))
                is_second = True
            except NoProcessError as error:
                if not self._evict(f"{error}; see `ulimit -n`, `ulimit -u` and max_sessions"):
                    raise
                server, is_second = None, False

    def _running_server(self, *, instead_of: ForkServer | None = None) -> ForkServer:
        with self._lock:
            if instead_of is not None and self._server is instead_of and self._finalizer is not None:
                self._finalizer()
                self._server = None
            if self._server is None:
                max_children = self._max_sessions + self._max_running + self._spares
                settings = self._loaded | {"backend": self._requested, "spares": self._spares}
                server = ForkServer(self.limits, max_children=max_children, **settings)
                self._finalizer = weakref.finalize(self, server.close)
                if server.backend == UNSAFE:
                    log.warning(UNSAFE_WARNING)
                else:
                    self._test_isolation(server)
                self._server = server  # not before it has passed the test
                log.info("sandbox: %s", server.about)
            return self._server

    def _test_isolation(self, server: ForkServer) -> None:
        try:
            with closing(Episode(server, replace(self.limits, seconds=30.0), seed=None)) as episode:
                result = episode.run(SELF_TEST, is_last=True)
            if result.stdout != "isolated\n":
                what = result.error or result.stdout
                raise SandboxUnavailable(f"backend {server.backend} does not isolate on this machine: {what}")
        except BaseException:
            server.close()
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this interpreter is closed")
        if os.getpid() != self._owner:
            raise RuntimeError("this interpreter was made in another process; make one in each")


class Session(AbstractContextManager["Session"]):
    """One episode. Calls from several threads run one after another."""

    def __init__(self, interpreter: Interpreter, seed: int | None) -> None:
        self._interpreter, self._seed = interpreter, seed
        self._episode: Episode | FusionEpisode | None = None
        self._calls = FairSemaphore(1)
        self._guard = threading.Lock()  # held only by a call that has a slot to run, or briefly
        self._was_lost = self._is_closed = False

    def run(self, code: str) -> Result:
        """Run code that sees the variables of earlier calls, unless `Result.state_lost`."""
        with self._calls, self._interpreter._slots, self._guard:
            if self._is_closed:
                raise RuntimeError("this session is closed")
            self._interpreter._check_open()
            self._interpreter._admit(self)
            if self._episode is None:
                try:
                    self._episode = self._interpreter._new_episode(seed=self._seed)
                except BaseException:
                    self._interpreter._dismiss(self)
                    raise
            result = self._interpreter._run_in(self._episode, code, is_last=False)
            was_lost, self._was_lost = self._was_lost, not self._episode.is_alive
            if self._was_lost:
                self._end()
            return replace(result, state_lost=True) if was_lost else result

    def close(self) -> None:
        """End its process and discard its state."""
        with self._guard:
            self._is_closed = True
            self._end()

    def _evict(self) -> bool:
        """Give up the process and the variables; False if there are none or a call is running."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._episode is None:
                return False
            self._end()
            self._was_lost = True
            return True
        finally:
            self._guard.release()

    def _end(self) -> None:
        if self._episode is not None:
            self._interpreter._dismiss(self)
            self._episode.close()
            self._episode = None

    def __del__(self) -> None:
        with suppress(Exception):  # never closed by its owner, perhaps only partly constructed
            self.close()

    def __exit__(self, *_: object) -> None:
        self.close()
