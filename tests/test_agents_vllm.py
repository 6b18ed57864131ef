"""Agents whose calls vLLM answers: our vLLM engine, endpoint and trainer, with a stand-in for the package `vllm`.

The stand-in holds a model of its own, made from the folder that it is given. It knows the policy only by the weights
that it is sent, and samples token by token.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import install_vllm

sys.path.insert(0, str(Path(__file__).parent))

RUN = [
    "task.env=lookup", "engine.model=tiny-xs", "engine.generator=vllm", "rollout.num_tasks=2", "rollout.group_size=2",
    "rollout.max_turns=24", "rollout.max_new_tokens=5", "rollout.temperature=0.7", "algorithm.name=grpo",
    "optim.learning_rate=1e-3", "sft.episodes=0", "eval.tasks=0", "run.threads=1", "run.trajectories_every=1",
    'run.trackers=["jsonl"]',
]  # fmt: skip


class StandIn:
    """vllm.LLM: a batch of token ids with sampling parameters goes in, sampled ids with log-probabilities come out."""

    made: ClassVar[list[StandIn]] = []

    def __init__(self, **settings: Any) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings["seed"])
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"])).eval()
        self.given: Counter[tuple[Any, ...]] = Counter()
        self.loaded, self.sizes = list[float](), list[int]()
        StandIn.made.append(self)

    @torch.no_grad()
    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        own = self.model.state_dict()
        for name, weight in kwargs["weights_iterator"]:
            own[name].copy_(weight)
        self.loaded.append(sum(float(weight.double().sum()) for weight in own.values()))

    def reset_prefix_cache(self) -> bool:
        return True

    def generate(self, inputs: list[dict[str, list[int]]], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        self.sizes.append(len(inputs))
        return [self._answered(entry["prompt_token_ids"], own) for entry, own in zip(inputs, params, strict=True)]

    @torch.no_grad()
    def _answered(self, prompt: list[int], params: Any) -> Any:
        dice, ids, steps = torch.Generator().manual_seed(params.seed), list[int](), []
        while len(ids) < params.max_tokens and self.model.config.eos_token_id not in ids:
            scores = self.model(torch.tensor([prompt + ids])).logits[0, -1].float() / params.temperature
            ids.append(int(torch.multinomial(scores.softmax(-1), 1, generator=dice)))
            steps.append({ids[-1]: SimpleNamespace(logprob=float(scores.log_softmax(-1)[ids[-1]]))})
        logprobs = [round(step[token].logprob, 4) for token, step in zip(ids, steps, strict=True)]
        self.given[tuple(prompt), tuple(ids), tuple(logprobs)] += 1
        reason = "stop" if self.model.config.eos_token_id in ids else "length"
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=reason)])


@pytest.fixture
def vllm(monkeypatch):
    StandIn.made.clear()
    install_vllm(monkeypatch, StandIn, is_cpu=True)
    return StandIn.made


def test_calls_that_vllm_answers_are_captured_with_its_tokens_and_train(spear, tmp_path, vllm):
    code, printed = spear(
        "train", *RUN, "task.agent=agent_examples:growing_at_length", "run.steps=2", f"run.dir={tmp_path}"
    )
    assert code == 0, printed
    [engine] = vllm
    files = [tmp_path / "episodes" / f"step_{step:06d}.jsonl" for step in (0, 1)]
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    captured = Counter(
        (tuple(turn["prompt_ids"]), tuple(turn["token_ids"]), tuple(round(score, 4) for score in turn["logprobs"]))
        for episode in episodes
        for turn in episode["turns"]
    )
    assert len(episodes) == 8
    assert captured == engine.given
    assert sum(captured.values()) == 8 * 5
    assert max(engine.sizes) > 1, "calls that wait together form a batch"
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["policy/turns"] > 0 for row in metrics)
    assert len(engine.loaded) == len(set(engine.loaded)) == 3, "new weights at the start and after either step"
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step_000002").state_dict()
    for name, weight in engine.model.state_dict().items():
        assert torch.equal(weight, trained[name]), name


def test_samples_seeds_stop_strings_and_a_stream_are_served_from_vllm(spear, tmp_path, vllm):
    options = ["task.agent=agent_examples:asks_for_everything", "run.steps=1", f"run.dir={tmp_path}"]
    code, printed = spear("train", *RUN, *options)
    assert code == 0, printed
    [metrics] = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics["rollout/episodes"] == 4
    assert metrics.get("rollout/failed_episodes", 0) == 0
