"""Generation by vLLM in this process, beside an engine that trains: its weights are copied in, never read from disk.

vLLM's log-probabilities are of one of two distributions, fixed when it starts. Ours are always of the whole
distribution at the temperature of sampling, as training scores them:

    top_p = 1               vLLM's `processed_logprobs` (after temperature, and there is nothing else): the same
    top_p < 1, temperature 1    `raw_logprobs` (before temperature and top_p): the same
    top_p < 1, another one      neither: refused
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.models.lora import merged_weights
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion

NamedWeights = Iterable[tuple[str, Tensor]]
"""Of a transformers model, under its own names."""

_HEADS = {
    "embed_tokens.weight": "lm_head.weight",
    "embed_in.weight": "embed_out.weight",
    "wte.weight": "lm_head.weight",
}
"""What input embeddings are called -> what the head tied to them is."""


class VLLMGenerator:
    """Completes prompts with vLLM's engine in this process.

    Args:
        model: a transformers model, whose weights never touch the disk, or a transformers folder.
        tokenizer: the model's; a folder has its own.
        dtype: what vLLM keeps weights and computes in.
        gpu_memory_utilization: share of the GPU that vLLM takes for weights and key-value cache, beside the trainer.
        max_model_len: longest prompt and completion together.
        end_ids: tokens that end a completion besides the model's own; empty switches all of them off.
        trust_remote_code: run the Python files that a folder may bring along for its model.
        options: further arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        dtype: torch.dtype = torch.bfloat16,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int = 4096,
        max_num_seqs: int = 256,
        seed: int = 0,
        end_ids: Sequence[int] | None = None,
        trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if sampling.top_p < 1 and sampling.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"rollout.top_p={sampling.top_p} with rollout.temperature={sampling.temperature}: vLLM reports no "
                "log-probabilities that fit both; set one of them to 1, or engine.generator to another"
            )
        self.sampling, self._seed, self._num_calls = sampling, seed, 0
        self._max_model_len, self._end_ids = max_model_len, end_ids
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        has_folder = isinstance(model, str | Path)
        if not has_folder:
            self._folder = tempfile.TemporaryDirectory(prefix="spear_rl_vllm_")
            for part in (model.config, model.generation_config, tokenizer):
                part.save_pretrained(self._folder.name)
        settings: dict[str, Any] = {
            "model": str(model if self._folder is None else self._folder.name),
            "load_format": "auto" if has_folder else "dummy",
            "dtype": str(dtype).removeprefix("torch."),
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            "logprobs_mode": "processed_logprobs" if sampling.top_p == 1 else "raw_logprobs",
        }
        # In another process vLLM could not be handed the trainer's tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._vllm = _imported()
        with _undisturbed():
            self._llm = self._vllm.LLM(**(settings | dict(options or {})))
        if not has_folder:
            self.load(merged_weights(model, {}))

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        """One completion a prompt; the same calls in the same order give the same completions."""
        self._num_calls += 1
        return self._completions(prompts, self.sampling, seed=self._seed * 1_000_003 + self._num_calls)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> VLLMEvaluationGenerator:
        """A generator with its own settings and random stream; its log-probs are as vLLM was started to report them."""
        return VLLMEvaluationGenerator(self, sampling, seed)

    def load(self, weights: NamedWeights) -> None:
        """Copy all of the trainer's weights into the running model, and forget what was cached under the old ones.

        Names are those of the transformers model. A weight that vLLM has and did not get is an error: it would go on
        sampling from a mixture of two policies.
        """
        named = _with_head(weights)
        with torch.no_grad(), _undisturbed():
            if self._is_on_cpu:  # there vLLM repacks weights for its kernels, which copying into them would not do
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            else:
                self._llm.apply_model(lambda model: _copied(model, named))
                torch.cuda.synchronize()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM is still generating: its cache cannot be cleared, so its weights must not change")

    def close(self) -> None:
        """Give the GPU's memory back."""
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(AttributeError):
                llm.llm_engine.engine_core.shutdown()
            del llm
            with suppress(ImportError, AttributeError):
                import_module("vllm.distributed").cleanup_dist_env_and_memory()
        if self._folder is not None:
            self._folder.cleanup()

    def _completions(self, prompts: Sequence[list[int]], sampling: Sampling, *, seed: int) -> list[Completion]:
        if not prompts:
            return []
        longest = max(map(len, prompts))
        if longest >= self._max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in vLLM's {self._max_model_len}: "
                "lower rollout.max_context or raise max_model_len"
            )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [self._params(sampling, seed * 65_537 + number) for number in range(len(prompts))]
        with _undisturbed():
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [_completion(output.outputs[0]) for output in outputs]

    def _params(self, sampling: Sampling, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(self._end_ids or ()),
            ignore_eos=self._end_ids is not None and not self._end_ids,
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # a stop string may be one
            detokenize=bool(sampling.stop),
            logprobs=0,  # of the sampled token alone
            seed=seed % 2**63,  # its own for every prompt, so that nothing depends on what is generated beside it
        )

    @property
    def _is_on_cpu(self) -> bool:
        return bool(import_module("vllm.platforms").current_platform.is_cpu())


class VLLMEvaluationGenerator:
    """The same weights under other sampling settings."""

    def __init__(self, generator: VLLMGenerator, sampling: Sampling, seed: int) -> None:
        self._generator, self._sampling, self._seed, self._num_calls = generator, sampling, seed, 0

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        self._num_calls += 1
        return self._generator._completions(prompts, self._sampling, seed=self._seed * 1_000_003 + self._num_calls)


def _imported() -> Any:
    if find_spec("vllm") is None:
        raise MissingExtraError("engine.generator=vllm needs vLLM: pip install 'spear-rl[vllm]'")
    return import_module("vllm")


def _completion(output: Any) -> Completion:
    """vLLM's answer in our words."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM gave up on a prompt: {output.finish_reason}")
    token_ids = list(output.token_ids)
    logprobs = [float(step[token].logprob) for token, step in zip(token_ids, output.logprobs, strict=True)]
    return Completion(token_ids, logprobs, output.finish_reason == "length")


def _with_head(weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """The same, and a tied head under its own name if it was left out: else vLLM might keep the old one unnoticed."""
    tied: tuple[str, Tensor] | None = None
    has_head = False
    for name, weight in weights:
        has_head = has_head or name in _HEADS.values()
        if head := next((head for embedding, head in _HEADS.items() if name.endswith(embedding)), None):
            tied = head, weight
        yield name, weight
    if tied and not has_head:
        yield tied


def _copied(model: Any, weights: NamedWeights) -> None:
    """Runs inside vLLM's worker: each weight into its place, which captured CUDA graphs go on reading."""
    loaded = model.load_weights(weights)
    expected = {name for name, _ in model.named_parameters()}
    if loaded is not None and expected - set(loaded):
        raise RuntimeError(f"vLLM did not get all weights; missing: {', '.join(sorted(expected - set(loaded))[:3])}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """vLLM seeds this process's random streams when it starts; training's go on as if nothing had happened."""
    state = random.getstate()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    random.setstate(state)
