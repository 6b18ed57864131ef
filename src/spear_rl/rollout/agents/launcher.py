"""The program that runs agents: imports the agent's module once and forks one process per episode.

Lines of JSON on its standard input (`agent`, `run`, `kill`), lines of JSON on its standard output. It ends when its
input does, with every agent, so that none outlives a killed trainer. What an agent prints goes to standard error.
Needs the standard library and the agent's own packages only; never torch.
"""

import asyncio
import ctypes
import inspect
import json
import math
import os
import pickle
import random
import select
import signal
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.contract import MAX_NUMBER, described, with_location
from spear_rl.settings.names import loaded

MAX_LINE = 4000
"""Bytes of an answer: writes of up to 4096 bytes to a pipe are atomic, so that agents can share one."""
_KILL_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
_END_SECONDS = 1.0
"""How long the launcher waits at its end for what it kills."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to every process of a job
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    launcher = _Launcher(source, sink)
    _prctl(_ADOPT_ORPHANS, 1)
    received = b""
    try:
        while True:
            ready, _, _ = select.select([source, woken], [], [])
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, 4096)
                launcher.reap()
            if source in ready:
                chunk = os.read(source, 1 << 16)
                if not chunk:
                    return
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    launcher.obey(json.loads(line))
    finally:
        launcher.kill_all()


class _Launcher:
    """The running agents, by number."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._agent: Callable[..., Any] | None = None
        self._pids: dict[int, int] = {}
        self._kept: set[int] = set()
        """Processes that the agent's module started when it was imported."""

    def obey(self, order: dict[str, Any]) -> None:
        if "agent" in order:
            try:
                self._agent = loaded(order["agent"], kind="agent", example="my_agent:solve")
                _write(self._sink, {"ready": True})
            except UserError as error:
                _write(self._sink, {"refused": clipped(str(error), 1500)})
        elif "kill" in order:
            self._kill(order["kill"])
        else:
            self._run(order)

    def _run(self, order: dict[str, Any]) -> None:
        number = order["run"]
        try:
            task = pickle.loads(b64decode(order["task"]))  # here, so that its imports are made once
        except BaseException as error:
            _write(self._sink, {"number": number, "error": f"its task cannot be loaded: {_said(error)}"})
            return
        if not self._pids:
            self._kept.update(_children())
        pid = os.fork()
        if pid:
            with suppress(OSError):
                os.setpgid(pid, pid)
            self._pids[number] = pid
            return
        status = 1
        try:
            os.setpgid(0, 0)
            _end_with(os.getppid())
            _prctl(_ADOPT_ORPHANS, 1)  # what is left of a living agent's children stays with it
            os.close(self._source)
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(name, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            answer = {"number": number} | _outcome(self._agent, task, order)
            _write(self._sink, answer)
            status = 0
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def reap(self) -> None:
        """Report the agents that ended; one that reported its reward has done so before."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                for number in [number for number, other in self._pids.items() if other == pid]:
                    del self._pids[number]
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)  # what it started and left behind
                    code = os.waitstatus_to_exitcode(status)
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                    _write(self._sink, {"number": number, "ended": how})
        for pid in self._left_behind():  # in a session of its own, where the group's signal does not reach it
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _left_behind(self) -> set[int]:
        """Processes of agents that have ended: they are children of the launcher then."""
        return _children() - self._kept - set(self._pids.values())

    def _kill(self, number: int) -> None:
        if pid := self._pids.get(number):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """End every agent and what it started."""
        end = time.monotonic() + _END_SECONDS
        for number in list(self._pids):
            self._kill(number)
        while (self._pids or self._left_behind()) and time.monotonic() < end:
            with suppress(OSError):  # the trainer has ended
                self.reap()
            time.sleep(0.005)


def _outcome(agent: Callable[..., Any] | None, task: Any, order: dict[str, Any]) -> dict[str, Any]:
    """`reward`, or `error`: why there is none, as the end of a sentence about the agent."""
    url, key = order["base_url"], order["api_key"]
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    for name in ("NO_PROXY", "no_proxy"):  # the endpoint is on this machine
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))
    random.seed(order["seed"])  # all agents are forks of one process
    if numpy := sys.modules.get("numpy"):
        with suppress(Exception):
            numpy.random.seed(random.getrandbits(32))
    try:
        assert agent
        returned = agent(task, url, key)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    except BaseException as error:  # also SystemExit
        return {"error": f"raised {_said(error)}"}
    value = returned
    with suppress(Exception):
        value = returned.item() if hasattr(type(returned), "item") else returned
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= MAX_NUMBER
    if not is_number:
        return {"error": f"returned {clipped(described(returned), 200)}, not a number: return the episode's reward"}
    return {"reward": float(value)}


async def _awaited(value: Any) -> Any:
    return await value


def _said(error: BaseException) -> str:
    return clipped(with_location(error), 1500)


def _end_with(parent: int) -> None:
    """Die when the launcher does, even if that is killed; Linux only."""
    _prctl(_KILL_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def _children() -> set[int]:
    """The children of this process; Linux only."""
    with suppress(OSError, ValueError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(map(int, file.read().split()))
    return set()


def _write(sink: int, answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    if len(line) > MAX_LINE:  # escapes of an exotic text
        line = json.dumps({k: v[:300] if isinstance(v, str) else v for k, v in answer.items()}).encode() + b"\n"
    os.write(sink, line)
