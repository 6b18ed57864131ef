"""Environments for the tests of the pool: well-behaved ones and every kind of trouble. Workers import this file."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from spear_rl.rollout import Observation, StepResult, Task


class Chain:
    """Every answer depends on all that was said before; it ends after 3 to 7 turns."""

    def __init__(self, number: int) -> None:
        self.number, self.said = number, []

    def reset(self) -> Observation:
        return Observation(f"red code {self.number}", state_key="start", choices=("look", "\u2603 7"))

    def step(self, action: str) -> StepResult:
        self.said.append(action)
        digest = hashlib.sha256(repr((self.number, self.said)).encode()).hexdigest()
        done = len(self.said) >= 3 + self.number % 5
        reward = int(digest[:4], 16) / 3 if done else 0.1
        seen = Observation(f"code {digest[:8]}", state_key=digest[8:12], choices=(digest[12:14],))
        return StepResult(seen, reward, done, used_tool=self.number % 2 == 0, invalid="" if action else "no_action")

    def close(self) -> None:
        raise OSError("closing hurts")


class Troubled(Chain):
    """Has its trouble at one step: always, or only while the file `once` does not exist."""

    def __init__(self, number: int, at: int, once: str | None = None) -> None:
        super().__init__(number)
        self.at, self.once = at, once

    def step(self, action: str) -> StepResult:
        if len(self.said) == self.at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self.trouble()
        return super().step(action)

    def trouble(self) -> None:
        raise NotImplementedError


class Deadly(Troubled):
    def trouble(self) -> None:
        print("about to end it all", flush=True)
        os._exit(3)


class Hanging(Troubled):
    def trouble(self) -> None:
        while True:
            time.sleep(0.01)


class Raising(Troubled):
    def trouble(self) -> None:
        raise OSError("the wire came off")


class Thinking(Chain):
    def step(self, action: str) -> StepResult:
        time.sleep(0.001)
        return super().step(action)


class Slow(Chain):
    def step(self, action: str) -> StepResult:
        time.sleep(0.4)
        return super().step(action)


class Chatty(Chain):
    """Prints wherever it can, reads where it must not, and starts other programs."""

    def reset(self) -> Observation:
        print("x" * 3_000_000)
        os.write(1, b"\x00\x00\x00\x00\x00\x00\x00\x01x")
        sys.stdout.buffer.write(b"\xff" * 9)
        subprocess.run(["echo", "hello"], check=True)
        try:
            input()
        except EOFError:
            return super().reset()
        raise AssertionError("there was something to read")


class Moody(Troubled):
    """Dies once, and tells another story when it is played again."""

    def trouble(self) -> None:
        os._exit(3)

    def reset(self) -> Observation:
        seen = super().reset()
        return Observation("another story") if self.once and Path(self.once).exists() else seen


class Parent(Chain):
    """Leaves a child running."""

    def reset(self) -> Observation:
        child = subprocess.Popen(["sleep", "1000"])
        return Observation(str(child.pid))


class Large(Chain):
    def step(self, action: str) -> StepResult:
        result = super().step(action)
        return StepResult(Observation(action[::-1]), result.reward, result.done)


class Odd:
    """Answers with what is no answer."""

    def reset(self) -> str:
        return "hello"

    def step(self, action: str) -> str:
        return action


def chains(count: int) -> list[Task]:
    return [Task(f"chain/{number}", partial(Chain, number), family=f"kind {number % 3}") for number in range(count)]


def imported() -> list[str]:
    """What a worker has imported."""
    return sorted(sys.modules)


class Terminating(Chain):
    """Ends a program and a fork of its own with SIGTERM; the observation is how they ended."""

    def reset(self) -> Observation:
        program = subprocess.Popen(["sleep", "1000"])
        time.sleep(0.1)  # until it is a program of its own
        program.terminate()
        fork = os.fork()
        if not fork:
            time.sleep(1000)
            os._exit(0)
        time.sleep(0.2)  # until the fork has taken its own way with signals
        os.kill(fork, signal.SIGTERM)
        return Observation(f"{program.wait()} {os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])}")
