"""Environments that return, raise and do what they must not, by name. Workers and the command line import this file."""

from __future__ import annotations

import ctypes
import json
import locale
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from spear_rl.rollout import Observation, StepResult, Task

SEEN = Observation("red code 7", state_key="k", choices=("look", "7"))
TURN = StepResult(SEEN, reward=0.5, success=True)


class Game:
    """Three turns; `kind` names what it does instead at one point."""

    def __init__(self, kind: str) -> None:
        self.kind, self.taken = kind, 0

    def reset(self) -> Any:
        self.act("reset")
        return RESETS[self.kind]() if self.kind in RESETS else SEEN

    def step(self, action: str) -> Any:
        self.taken += 1
        self.act("step")
        if self.kind in STEPS:
            return STEPS[self.kind]()
        return replace(TURN, done=self.taken == 3)

    def close(self) -> None:
        self.act("close")

    def act(self, method: str) -> None:
        place, _, name = self.kind.partition(":")
        if place == method:
            DEEDS[name]()


class Touchy(StepResult):
    """Cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "reward":
            raise OSError("hands off")
        return super().__getattribute__(name)


class Numpylike:
    """A scalar as numpy has them."""

    def __init__(self, value: object) -> None:
        self._value = value

    def item(self) -> object:
        return self._value

    def __bool__(self) -> bool:
        return True


class Text(str):
    """A text of one's own that lies about itself."""

    def __str__(self) -> str:
        raise OSError("not in words")

    __slots__ = ()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("stay here")


class OwnBase(BaseException):
    pass


async def _later() -> StepResult:
    return TURN


def _result(**fields: Any) -> Callable[[], StepResult]:
    return lambda: replace(TURN, **fields)


def _seen(**fields: Any) -> Callable[[], Observation]:
    return lambda: replace(SEEN, **fields)


def _empty(kind: type) -> Any:
    return object.__new__(kind)


_OBSERVATIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "text_none": (_seen(text=None), "text is None, not a text"),
    "text_bytes": (_seen(text=b"x"), "text is b'x', not a text"),
    "text_int": (_seen(text=3), "text is 3, not a text"),
    "text_huge": (_seen(text="x" * 10_000_001), "10,000,001 characters"),
    "key_list": (_seen(state_key=["k"]), "state_key is a list, not a text"),
    "key_int": (_seen(state_key=7), "state_key is 7, not a text"),
    "choices_text": (_seen(choices="look"), "choices is 'look', not a tuple of texts"),
    "choices_none": (_seen(choices=None), "choices is None, not a tuple of texts"),
    "choices_mixed": (_seen(choices=("look", 7)), "choices is a tuple, not a tuple of texts"),
    "choices_set": (_seen(choices={"look"}), "choices is a set, not a tuple of texts"),
    "images_text": (_seen(images=("x.png",)), "images is a tuple, not a tuple of PNG files"),
    "images_bytes": (_seen(images=b"\x89PNG"), "not a tuple of PNG files"),
    "images_no_png": (_seen(images=(b"GIF89a",)), "not a tuple of PNG files"),
    "fields_unset": (partial(_empty, Observation), "reading whose text raised AttributeError"),
}
RESETS = {
    f"reset_{name}": make
    for name, (make, _) in {
        "none": (lambda: None, ""),
        "tuple": (lambda: (SEEN, {}), ""),
        "result": (lambda: TURN, ""),
        "dict": (lambda: {"text": "x"}, ""),
        "coroutine": (_later, ""),
        **_OBSERVATIONS,
    }.items()
}


def _showing(made: Callable[[], Any]) -> StepResult:
    return replace(TURN, observation=made())


_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "step returned None, not a StepResult"),
    "observation": (lambda: SEEN, "step returned an Observation, not a StepResult"),
    "gymnasium": (lambda: (SEEN, 1.0, True, False, {}), "step returned a tuple, not a StepResult (Gymnasium"),
    "dict": (lambda: {"reward": 1}, "step returned a dict, not a StepResult"),
    "kind_itself": (lambda: StepResult, "step returned a type, not a StepResult"),
    "coroutine": (_later, "leave out `async`"),
    "no_observation": (_result(observation=None), "observation is None, not an Observation"),
    "text_observation": (_result(observation="x"), "observation is 'x', not an Observation"),
    "reward_text": (_result(reward="1.0"), "reward is '1.0', not a finite number"),
    "reward_bool": (_result(reward=True), "reward is True, not a finite number"),
    "reward_none": (_result(reward=None), "reward is None, not a finite number"),
    "reward_nan": (_result(reward=float("nan")), "reward is nan, not a finite number"),
    "reward_inf": (_result(reward=float("-inf")), "reward is -inf, not a finite number"),
    "reward_huge": (_result(reward=1e300), "reward is 1e+300, not a finite number of at most 1e+15"),
    "reward_huge_int": (_result(reward=10**5000), "not a finite number"),
    "reward_complex": (_result(reward=1j), "reward is 1j, not a finite number"),
    "reward_list": (_result(reward=[1.0]), "reward is a list, not a finite number"),
    "reward_scalar_nan": (_result(reward=Numpylike(float("nan"))), "not a finite number"),
    "done_text": (_result(done="no"), "done is 'no', not True or False"),
    "done_none": (_result(done=None), "done is None, not True or False"),
    "done_int": (_result(done=0), "done is 0, not True or False"),
    "success_text": (_result(success="no"), "success is 'no', not True, False or None"),
    "success_int": (_result(success=1), "success is 1, not True, False or None"),
    "success_scalar_text": (_result(success=Numpylike("no")), "not True, False or None"),
    "used_tool_int": (_result(used_tool=2), "used_tool is 2, not True or False"),
    "used_tool_text": (_result(used_tool="no"), "used_tool is 'no', not True or False"),
    "invalid_none": (_result(invalid=None), "invalid is None, not a reason"),
    "invalid_true": (_result(invalid=True), "invalid is True, not a reason"),
    "metrics_list": (_result(metrics=["a"]), "metrics is a list, not a dict"),
    "metrics_none": (_result(metrics=None), "metrics is None, not a dict"),
    "metrics_key": (_result(metrics={7: 1.0}), "metrics have the name 7, not a text"),
    "metrics_text": (_result(metrics={"score": "high"}), "metrics have 'high' for 'score', not a finite number"),
    "metrics_nan": (_result(metrics={"score": float("nan")}), "metrics have nan for 'score', not a finite number"),
    "metrics_success": (_result(metrics={"success": 1.0}), "metrics have the name 'success', which is one of ours"),
    "metrics_reward": (_result(metrics={"reward": 9.0}), "metrics have the name 'reward', which is one of ours"),
    "metrics_stop": (_result(metrics={"stop_done": 9.0}), "metrics have the name 'stop_done', which is one of ours"),
    "unreadable": (lambda: Touchy(SEEN), "reading whose reward raised OSError: hands off"),
    "unset": (partial(_empty, StepResult), "reading whose observation raised AttributeError"),
    **{f"seen_{name}": (partial(_showing, made), words) for name, (made, words) in _OBSERVATIONS.items()},
}
STEPS: dict[str, Callable[[], Any]] = {f"step_{name}": make for name, (make, _) in _STEPS.items()}
VIOLATIONS = {
    "reset_none": "Game.reset returned None, not an Observation",
    "reset_tuple": "Game.reset returned a tuple, not an Observation (Gymnasium",
    "reset_result": "Game.reset returned a StepResult, not an Observation",
    "reset_dict": "Game.reset returned a dict, not an Observation",
    "reset_coroutine": "leave out `async`",
    **{f"reset_{name}": words for name, (_, words) in _OBSERVATIONS.items()},
    **{f"step_{name}": words for name, (_, words) in _STEPS.items()},
}
"""Kind -> what the one sentence about it says."""

_BENIGN: dict[str, tuple[Callable[[], Any], StepResult]] = {
    "reward_int": (_result(reward=2), replace(TURN, reward=2.0)),
    "reward_scalar": (_result(reward=Numpylike(0.25)), replace(TURN, reward=0.25)),
    "done_scalar": (_result(done=Numpylike(True)), replace(TURN, done=True)),
    "not_done_scalar": (_result(done=Numpylike(False)), TURN),
    "success_scalar": (_result(success=Numpylike(False)), replace(TURN, success=False)),
    "success_none": (_result(success=None), replace(TURN, success=None)),
    "choices_list": (lambda: replace(TURN, observation=replace(SEEN, choices=["a"])),
                     replace(TURN, observation=replace(SEEN, choices=("a",)))),
    "own_text": (lambda: replace(TURN, observation=replace(SEEN, text=Text("mine"))),
                 replace(TURN, observation=replace(SEEN, text="mine"))),
    "surrogate": (lambda: replace(TURN, observation=replace(SEEN, text="a\ud800b")),
                  replace(TURN, observation=replace(SEEN, text="a\ufffdb"))),
    "metrics_scalar": (_result(metrics={"score": Numpylike(1)}), replace(TURN, metrics={"score": 1.0})),
}  # fmt: skip
STEPS |= {f"benign_{name}": make for name, (make, _) in _BENIGN.items()}
BENIGN = {f"benign_{name}": result for name, (_, result) in _BENIGN.items()}
"""Kind -> what its step comes to."""


def _raise(error: BaseException) -> None:
    raise error


def _recurse() -> None:
    _recurse()


def _hang() -> None:
    while True:
        time.sleep(0.05)


def _fork() -> None:
    os.fork()


def _write_to_all_pipes() -> None:
    """What an environment that gets hold of the worker's pipe could write."""
    for number in range(3, 20):
        with suppress(OSError):
            os.write(number, b"\x00\x00\x00\x00\x00\x00\x00\x02hi")


def _forge() -> None:
    """An answer past the worker: a reward that is no number."""
    entry = json.dumps([-1, "result", ["x", "", []], float("nan"), False, False, "", None, {}]).encode()
    for number in range(3, 20):
        with suppress(OSError):
            os.write(number, len(entry).to_bytes(8, "big") + entry)


def _patch_json() -> None:
    json.dumps = lambda *_, **__: "broken"  # type: ignore[assignment]
    json.loads = lambda *_, **__: None  # type: ignore[assignment]


def _start_threads() -> None:
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    subprocess.Popen(["sleep", "30"])


def _set_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _print_and_read() -> None:
    print("noise " * 10_000)
    print("noise", file=sys.stderr)
    with suppress(EOFError):
        input()


DEEDS: dict[str, Callable[[], Any]] = {
    "error": lambda: _raise(OSError("the wire came off")),
    "exit": lambda: sys.exit(0),
    "exit_text": lambda: sys.exit("good bye"),
    "generator_exit": lambda: _raise(GeneratorExit()),
    "own_base": lambda: _raise(OwnBase("mine")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "memory": lambda: _raise(MemoryError()),
    "recursion": _recurse,
    "stop_iteration": lambda: _raise(StopIteration(3)),
    "unspeakable": lambda: _raise(UnspeakableError()),
    "unpicklable": lambda: _raise(UnpicklableError("x")),
    "long": lambda: _raise(OSError("long\n" * 20_000_000)),
    "os_exit": lambda: os._exit(0),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "hang": _hang,
    "fork": _fork,
    "garble": _write_to_all_pipes,
    "forge": _forge,
    "close_pipes": lambda: os.closerange(3, 50),
    "close_std": lambda: os.closerange(0, 3),
    "patch_json": _patch_json,
    "chdir": lambda: os.chdir("/"),
    "seed": lambda: random.seed(0),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "threads": _start_threads,
    "signals": _set_signals,
    "print": _print_and_read,
}
RAISING = ("error", "exit", "exit_text", "generator_exit", "own_base", "memory", "recursion", "stop_iteration",
           "unspeakable", "unpicklable", "long")  # fmt: skip
"""Deeds that fail an episode, in this process as in a worker."""
DEADLY = ("os_exit", "abort", "segfault", "hang", "garble", "forge", "close_pipes")
"""Deeds that only a worker saves the trainer from."""
HARMLESS = ("fork", "patch_json", "close_std", "chdir", "seed", "locale", "threads", "signals", "print")
"""Deeds that a worker's episode survives."""


def make(kind: str) -> Any:
    place, _, name = kind.partition(":")
    if place == "make":
        DEEDS[name]()
    return {"make_none": None, "make_kind": Game, "make_text": "game"}.get(kind, Game(kind))


def expert(kind: str, seed: int) -> Any:
    place, _, name = kind.partition(":")
    if place == "expert":
        DEEDS[name]()
    return {
        "expert_text": "look",
        "expert_none": None,
        "expert_numbers": [1, 2],
        "expert_endless": iter(int, 1),
        "expert_nothing": [],
    }.get(kind, ["look", "7", "look"])


def task(kind: str, number: int = 0, **fields: Any) -> Task:
    return Task(f"hostile/{kind}/{number}", partial(make, kind), demonstrate=partial(expert, kind), **fields)


class Panel(Sequence[Task]):
    """Makes its tasks as they are looked at."""

    def __init__(self, tasks: list[Any]) -> None:
        self._tasks = tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, place: Any) -> Any:
        return self._tasks[place]


def tasks(split: str, *, kind: str = "", others: int = 0, panel: str = "", number: int = 3) -> Any:
    """`number` tasks of a kind, after `others` well-behaved ones; or a panel that is none."""
    good = [task("good", 1000 * len(split) + n) for n in range(others)]
    bad = [replace(task(kind or "good", 1000 * len(split) + n), id=f"{split}/{kind}/{n}") for n in range(number)]
    wrong: dict[str, Callable[[], Any]] = {
        "": lambda: [*good, *bad],
        "lazy": lambda: Panel([*good, *bad]),
        "lazy_wrong": lambda: Panel([*good, *bad, "task"]),
        "none": lambda: None,
        "generator": lambda: (each for each in bad),
        "set": lambda: {1, 2},
        "dict": lambda: {"a": bad[0]},
        "text": lambda: "tasks",
        "empty": list,
        "no_tasks": lambda: ["a", "b"],
        "same_id": lambda: [bad[0], bad[0]],
        "number_id": lambda: [replace(bad[0], id=7)],
        "empty_id": lambda: [replace(bad[0], id="")],
        "no_make": lambda: [replace(bad[0], make_env=None)],
        "family": lambda: [replace(bad[0], family=None)],
        "instructions": lambda: [replace(bad[0], instructions=None)],
        "format": lambda: [replace(bad[0], answer_format="{other}")],
        "demonstrate": lambda: [replace(bad[0], demonstrate=["look"])],
        "unfinished": lambda: [replace(bad[0], unfinished_reward=float("nan"))],
        "raising": lambda: _raise(RuntimeError("no data")),
        "key_error": lambda: _raise(KeyError("train")),
        "exit": lambda: sys.exit(0),
    }
    return wrong[panel]()


PANELS = ("lazy_wrong", "none", "generator", "set", "dict", "text", "empty", "no_tasks", "same_id", "number_id",
          "empty_id", "no_make", "family", "instructions", "format", "demonstrate", "unfinished", "raising",
          "key_error", "exit")  # fmt: skip
