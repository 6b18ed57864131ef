"""Ctrl-C, SIGTERM and SIGHUP end a run where it can go on bit for bit, also in its cold start; run.resume=auto."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import logged

HERE = Path(__file__).parent
SMALL = [
    "run.steps=5", "run.checkpoint_every=3", "run.threads=1", "sft.episodes=48", "sft.epochs=2", "sft.batch_size=4",
    "sft.checkpoint_seconds=0", "eval.tasks=4", "eval.every=2", "rollout.num_tasks=2", "rollout.group_size=2",
    "rollout.max_turns=4", "algorithm.kl=0.01",
]  # fmt: skip
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(scope="session")
def spear_signalled() -> Iterator[Callable[..., dict]]:
    """Runs a command and sends it signals, each some seconds after its start; the outcome."""
    driver = subprocess.Popen(
        [sys.executable, HERE / "stop_driver.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
    )
    assert driver.stdout.readline() == "ready\n"

    def run(*arguments: object, signals: tuple[tuple[float, int], ...] = ()) -> dict:
        driver.stdin.write(json.dumps({"arguments": list(map(str, arguments)), "signals": signals}) + "\n")
        driver.stdin.flush()
        return json.loads(driver.stdout.readline())

    yield run
    driver.stdin.close()
    driver.wait()


def result(run: Path, verb: str) -> dict:
    """All of a run that must not depend on how often it was stopped."""
    assert not (run / "cold_start").exists()
    if verb == "sft":
        summary = json.loads((run / "summary.json").read_text())
        weights = (run / "model" / "model.safetensors").read_bytes()
        return {name: summary[name] for name in ("loss", "success_before", "success_after")} | {"weights": weights}
    kept = sorted((run / "checkpoints").iterdir())
    return {
        "metrics": logged(run),
        "evals": logged(run, "eval.jsonl"),
        "weights": (kept[-1] / "model.safetensors").read_bytes(),
        "last": kept[-1].name,
        "best": [json.loads((folder / "checkpoint.json").read_text())["evaluation"] for folder in kept[-1:]],
        "steps": json.loads((run / "summary.json").read_text())["steps"],
    }


@pytest.fixture(scope="module")
def whole(spear_signalled, tmp_path_factory) -> Callable[[str], tuple[dict, float]]:
    """The end of a run that nobody stopped, and how long it took."""
    known: dict[str, tuple[dict, float]] = {}

    def find(verb: str) -> tuple[dict, float]:
        if verb not in known:
            run = tmp_path_factory.mktemp(verb) / "run"
            outcome = spear_signalled(verb, "lookup", f"run.dir={run}", *SMALL)
            assert outcome["code"] == 0, outcome["text"]
            known[verb] = result(run, verb), outcome["seconds"]
        return known[verb]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_run_stopped_or_killed_at_any_moment_ends_as_if_it_had_not_been(
    spear_signalled, whole, tmp_path, verb, seed
):
    expected, seconds = whole(verb)
    rng, run, texts = random.Random(f"{verb}/{seed}"), tmp_path / "it's a run", []
    line = [verb, "lookup", f"run.dir={run}", *SMALL, "run.resume=auto"]
    for _ in range(5):
        number = rng.choice([*STOPS, signal.SIGTERM, signal.SIGKILL])
        outcome = spear_signalled(*line, signals=((rng.uniform(0, seconds), number),))
        texts.append(f"{number.name} {outcome}")
        if outcome["code"] == 0:
            break
        assert "Traceback" not in outcome["text"], texts
        assert outcome["code"] == (-number if number == signal.SIGKILL else 128 + number), texts
        if number != signal.SIGKILL:
            way_on = f"go on: spear {verb} {shlex.quote(f'run.dir={run}')} run.resume=true"
            assert way_on in outcome["text"] or "give the same command again" in outcome["text"], texts
    outcome = spear_signalled(*line)
    assert outcome["code"] == 0, [*texts, outcome]
    assert result(run, verb) == expected, texts
    assert "nothing is left to do" in spear_signalled(*line)["text"]
