"""What many tests need: a tiny engine over the lookup toy, and stand-ins for the parts that cost time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported: no test asks the real hub

from spear_rl.engines.base import Batch, Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.rollout import Sampling
from spear_rl.types import Completion, Metrics

# A shell that starts tests in the background has them ignore Ctrl-C, and so would every program that they start.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

WORDS = ["red code ?", "green code 7", "blue code 3", "gold code 1 2 3 4 5 6 7 8 9 0", "look", "right", "wrong"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that begins last would leave all other processes idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer(WORDS)


@pytest.fixture
def make_engine(tokenizer):
    """Engines that start from the same weights."""

    def make(**options: object) -> HFEngine:
        options = {"sampling": Sampling(max_new_tokens=4), "learning_rate": 1e-3, "seed": 0} | options
        return HFEngine(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, **options)

    return make


@pytest.fixture
def spear(capsys, monkeypatch):
    """Runs a command of the command line in this process; (exit code, all it printed)."""
    from spear_rl import cli

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["spear", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(cli.console, "_width", 200)  # made before, perhaps with another width in the environment
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return int(stop.value.code or 0), printed.out + printed.err

    return call


def logged(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    """What a run wrote down, less how long it took."""
    lines = (run_dir / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in lines]


def killed_run(run_dir: Path, *settings: str, steps: int) -> None:
    """Start a run of `lookup` in a process of its own and kill -9 it after a few steps, before `steps` are done."""
    command = [
        sys.executable,
        "-m",
        "spear_rl.cli",
        "train",
        "lookup",
        f"run.dir={run_dir}",
        *settings,
        "run.steps=400",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, deadline = run_dir / "metrics.jsonl", time.time() + 120
    while time.time() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = sorted((run_dir / "checkpoints").glob("step_*"))
    assert 0 < int(done[-1].name.removeprefix("step_")) < steps, "the kill came too late to show anything"


class RecordingCritic:
    """Values every state by the token that follows it, and writes down what it was asked to learn."""

    def __init__(self, worth: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        self._worth = worth
        self.updates: list[tuple[Batch, Tensor, Tensor, float | None]] = []

    def values(self, batch: Batch) -> Tensor:
        return torch.where(batch.mask, self._worth(batch.input_ids.float()), 0.0)

    def update(self, batch: Batch, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Metrics:
        self.updates.append((batch, old_values, returns, clip))
        return {"critic/value_loss": 0.0}


class RecordingEngine:
    """Answers with given texts and writes down what it was asked to learn."""

    pad_id = 0

    def __init__(self, tokenizer, answers: Sequence[str], logprob: float = -0.5) -> None:
        self._tokenizer, self._answers, self._logprob = tokenizer, answers, logprob
        self._asked = 0
        self.updates: list[list[Term]] = []
        self.critic: RecordingCritic | None = RecordingCritic()

    def hold_critic(self, learning_rate: float) -> None:
        self.critic = RecordingCritic()

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        out = []
        for _ in prompts:
            text = self._answers[self._asked % len(self._answers)]
            ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
            out.append(Completion(ids, [self._logprob] * len(ids)))
            self._asked += 1
        return out

    def update(self, terms: Sequence[Term]) -> Metrics:
        self.updates.append(list(terms))
        return {f"{term.name}/loss": 0.0 for term in terms}

    def sync(self) -> None:
        pass


def random_batch(rng: random.Random, *, rows: int, vocabulary: int, widest: int = 24, extra: int = 0) -> Batch:
    """Rows of random length with random tokens, masks, old log-probabilities and advantages; `extra` more padding."""
    lengths = [rng.randint(4, widest) for _ in range(rows)]
    width = max(lengths) + extra
    ids = torch.zeros(rows, width, dtype=torch.long)
    attention, mask = torch.zeros(rows, width, dtype=torch.bool), torch.zeros(rows, width, dtype=torch.bool)
    old, advantages = torch.zeros(rows, width), torch.zeros(rows, width)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.tensor([rng.randrange(1, vocabulary) for _ in range(length)])
        attention[row, :length] = True
        written = [rng.random() < 0.5 for _ in range(length)]
        written[0], written[-1] = False, True
        mask[row, :length] = torch.tensor(written)
        old[row, :length] = torch.tensor([rng.uniform(-6, -4) for _ in range(length)])
        advantages[row, :length] = rng.gauss(0, 2)
    return Batch(ids, attention, mask, old, advantages)


def install_vllm(monkeypatch: pytest.MonkeyPatch, llm: object, *, is_cpu: bool) -> None:
    """Put a stand-in for the package vllm in its place, with `llm` as its LLM."""
    for name, contents in {
        "vllm": {"LLM": llm, "SamplingParams": lambda **given: SimpleNamespace(**given)},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
        "vllm.distributed": {"cleanup_dist_env_and_memory": lambda: None},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
