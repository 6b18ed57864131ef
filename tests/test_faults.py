"""A kill, a full disk, a disk that fails: at every file operation of a run, of a resume and of a cold start.

Whatever happens, there is no traceback, and the next command goes on bit for bit or says in a sentence why it does not.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import logged

HERE = Path(__file__).parent
STEPS = 2
SMALL = [
    f"run.steps={STEPS}", "run.checkpoint_every=1", "run.trajectories_every=2", "run.threads=1", "sft.episodes=4",
    "sft.epochs=1", "eval.tasks=2", "rollout.num_tasks=1", "rollout.group_size=2", "rollout.max_turns=2",
    "algorithm.kl=0.01",
]  # fmt: skip
ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES]


@pytest.fixture(scope="session")
def spear_with(tmp_path_factory) -> Iterator[Callable[..., dict]]:
    """Runs a command with a fault at its Nth file operation under `folder`; the outcome."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    shim = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, HERE / "faults.c", "-ldl"], check=True)
    surroundings = os.environ | {"LD_PRELOAD": str(shim), "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"}
    driver = subprocess.Popen(
        [sys.executable, HERE / "fault_driver.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=surroundings,
    )
    assert driver.stdout.readline() == "ready\n"

    def run(*arguments: object, folder: Path, at: int = 0, error: int = 0, stays: bool = False) -> dict:
        command = {"arguments": list(map(str, arguments)), "folder": str(folder)}
        driver.stdin.write(json.dumps(command | {"at": at, "error": error, "stays": int(stays)}) + "\n")
        driver.stdin.flush()
        return json.loads(driver.stdout.readline())

    yield run
    driver.stdin.close()
    driver.wait()


class Scenario:
    """A command, the folder it starts from, and what it leaves when nothing goes wrong."""

    def __init__(self, spear_with: Callable[..., dict], home: Path, verb: str, *, from_step: int | None = None) -> None:
        self._spear, self.home, self.verb = spear_with, home, verb
        self.before: Path | None = None
        if from_step is not None:
            self.before = home / "before"
            settings = [
                *SMALL,
                f"run.steps={from_step}",
                f"algorithm.bonus.steps={STEPS}",
                "algorithm.imitation.warm_steps=1",
            ]
            outcome = spear_with(verb, "lookup", f"run.dir={self.before}", *settings, folder=self.before)
            assert outcome["code"] == 0, outcome["text"]
        whole = self.fresh("whole")
        outcome = self._spear(*self.command(whole), folder=whole)
        assert outcome["code"] == 0, outcome["text"]
        self.num_operations, self.expected = outcome["count"], self.result(whole)
        assert self.num_operations > 40

    def fresh(self, name: str) -> Path:
        run = self.home / name
        shutil.rmtree(run, ignore_errors=True)
        if self.before:
            shutil.copytree(self.before, run)
        return run

    def command(self, run: Path) -> list[object]:
        if self.before:
            return [self.verb, f"run.dir={run}", "run.resume=true", f"run.steps={STEPS}"]
        return [self.verb, "lookup", f"run.dir={run}", *SMALL]

    def result(self, run: Path) -> dict:
        """All of a run that must not depend on what happened to it on its way."""
        if self.verb == "sft":
            return {"weights": (run / "model" / "model.safetensors").read_bytes()}
        newest = run / "checkpoints" / f"step_{STEPS:06d}"
        return {
            "metrics": logged(run),
            "evals": logged(run, "eval.jsonl"),
            "episodes": {str(p.relative_to(run)): p.read_bytes() for p in sorted(run.glob("*/*.jsonl"))},
            "weights": (newest / "model.safetensors").read_bytes(),
            "steps": json.loads((run / "summary.json").read_text())["steps"],
        }

    def survive(self, at: int, *, error: int = 0, stays: bool = False) -> str:
        """Let one operation fail, then go on; says what is wrong with how that went, or nothing."""
        run = self.fresh("faulty")
        outcome = self._spear(*self.command(run), folder=run, at=at, error=error, stays=stays)
        what = f"operation {at} of {self.num_operations}, {os.strerror(error) if error else 'kill'}: "
        if "Traceback" in outcome["text"] or outcome["code"] not in ((0, 2) if error else (0, -9)):
            return what + f"exit {outcome['code']}: {outcome['text'][-2000:]}"
        if outcome["code"] == 2 and "error: " not in outcome["text"]:
            return what + f"no sentence: {outcome['text'][-500:]}"
        again = self._spear(self.verb, f"run.dir={run}", "run.resume=true", f"run.steps={STEPS}", folder=run)
        if again["code"] == 2 and "holds no run" in again["text"] and not (run / "config.toml").exists():
            again = self._spear(*self.command(run), folder=run)
        elif again["code"] == 2 and self.verb == "sft" and "is finished" in again["text"]:
            again["code"] = 0
        if again["code"] != 0:
            return what + f"cannot go on: {again['text'][-1500:]}"
        if self.result(run) != self.expected:
            return what + "went on, but to another end"
        rubbish = [path.name for path in run.rglob(".*") if path.name not in (".lock", ".gitattributes")]
        return what + f"left {rubbish}" if rubbish else ""


SCENARIOS = {"a run": ("train", None), "a resume": ("train", 1), "a cold start": ("sft", None)}


@pytest.fixture(scope="module", params=SCENARIOS)
def scenario(request, spear_with, tmp_path_factory) -> Scenario:
    verb, from_step = SCENARIOS[request.param]
    return Scenario(spear_with, tmp_path_factory.mktemp(request.param.replace(" ", "_")), verb, from_step=from_step)


def spread(count: int, total: int) -> list[int]:
    """`count` numbers from 1 to `total`, evenly spread."""
    return sorted({1 + round(i * (total - 1) / max(count - 1, 1)) for i in range(count)})


@pytest.mark.slow
def test_a_kill_at_some_file_operations_loses_nothing(scenario):
    faults = [scenario.survive(at) for at in spread(12, scenario.num_operations)]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.slow
@pytest.mark.parametrize("stays", [True, False], ids=["and all after it", "alone"])
def test_some_file_operations_that_fail_end_in_a_sentence_and_lose_nothing(scenario, stays):
    places = spread(8, scenario.num_operations)
    faults = [scenario.survive(at, error=ERRORS[n % len(ERRORS)], stays=stays) for n, at in enumerate(places)]
    assert not any(faults), "\n".join(filter(None, faults))


@pytest.mark.skipif(not os.environ.get("SPEAR_ALL_FAULTS"), reason="takes half an hour: set SPEAR_ALL_FAULTS=1")
@pytest.mark.parametrize("error", [0, *ERRORS], ids=["kill", *(errno.errorcode[e] for e in ERRORS)])
def test_every_file_operation_may_fail(scenario, error):
    places = range(1, scenario.num_operations + 1)
    faults = [scenario.survive(at, error=error, stays=error == errno.ENOSPC) for at in places]
    assert not any(faults), "\n".join(filter(None, faults))
