"""Generation by vLLM in this process, beside an engine that trains: weights are copied in memory, never through files.

vLLM reports log-probabilities of one of two distributions, chosen at its start. Training scores the full distribution
at the sampling temperature:

    top_p = 1                        vLLM's `processed_logprobs` (after temperature): the same
    top_p < 1, temperature 0 or 1    `raw_logprobs` (before temperature and top_p): the same
    top_p < 1, other temperatures    neither: refused
"""

from __future__ import annotations

import copy
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
from spear_rl.types import Completion, limit_of, seed_of

NamedWeights = Iterable[tuple[str, Tensor]]
"""Under the names of the transformers model."""

_HEADS = {
    "embed_tokens.weight": "lm_head.weight",
    "embed_in.weight": "embed_out.weight",
    "wte.weight": "lm_head.weight",
}
"""Name of the input embeddings -> name of the head tied to them."""


class VLLMGenerator:
    """Completes prompts with vLLM's engine in this process.

    Args:
        model: a transformers model, whose weights never touch the disk, or a transformers folder.
        tokenizer: the model's; a folder has its own.
        dtype: of vLLM's weights and computation.
        gpu_memory_utilization: share of the GPU that vLLM takes for weights and KV cache, beside the trainer.
        max_model_len: longest prompt and completion together.
        end_ids: tokens that end a completion besides the model's own; empty switches all of them off.
        trust_remote_code: run Python files of a model's folder.
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
        with _random_state_kept():
            self._llm = self._vllm.LLM(**(settings | dict(options or {})))
        if not has_folder:
            self.load(merged_weights(model, {}))

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        """One completion per prompt; the same calls in the same order give the same completions."""
        self._num_calls += 1
        if not prompts:
            return []
        longest = max(map(len, prompts))
        if longest >= self._max_model_len:
            raise ConfigError(
                f"a prompt of {longest} tokens leaves no room in vLLM's {self._max_model_len}: "
                "lower rollout.max_context or raise max_model_len"
            )
        seed = self._seed * 1_000_003 + self._num_calls
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        params = [
            self._params(
                seed * 65_537 + n if (own := seed_of(prompt)) is None else own,
                limit_of(prompt, self.sampling.max_new_tokens),
            )
            for n, prompt in enumerate(prompts)
        ]
        with _random_state_kept():
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
        return [_completion(output.outputs[0]) for output in outputs]

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> VLLMGenerator:
        """The same weights with their own sampling and random stream; `logprobs_mode` stays."""
        other = copy.copy(self)
        other.sampling, other._seed, other._num_calls = sampling, seed, 0
        return other

    def load(self, weights: NamedWeights) -> None:
        """Copy all of the trainer's weights into the running model and clear the prefix cache.

        A weight that vLLM has and did not get is an error: it would sample from a mixture of two policies.
        """
        named = _with_head(weights)
        with torch.no_grad(), _random_state_kept():
            if self._is_on_cpu:  # there vLLM repacks weights for its kernels, which plain copies would skip
                self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            else:
                self._llm.apply_model(lambda model: _load_into(model, named))
                torch.cuda.synchronize()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM is still generating: its cache cannot be cleared, so its weights must not change")

    def close(self) -> None:
        """Free the GPU's memory."""
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(AttributeError):
                llm.llm_engine.engine_core.shutdown()
            del llm
            with suppress(ImportError, AttributeError):
                import_module("vllm.distributed").cleanup_dist_env_and_memory()
        if self._folder is not None:
            self._folder.cleanup()

    def _params(self, seed: int, max_tokens: int) -> Any:
        sampling = self.sampling
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(self._end_ids or ()),
            ignore_eos=self._end_ids is not None and not self._end_ids,
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # a stop string may be one
            detokenize=bool(sampling.stop),
            logprobs=0,  # of the sampled token only
            seed=seed % 2**63,  # one per prompt, so that a completion does not depend on the rest of the batch
        )

    @property
    def _is_on_cpu(self) -> bool:
        return bool(import_module("vllm.platforms").current_platform.is_cpu())


def _imported() -> Any:
    if find_spec("vllm") is None:
        raise MissingExtraError("engine.generator=vllm needs vLLM: pip install 'spear-rl[vllm]', or say native")
    return import_module("vllm")


def _completion(output: Any) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM stopped a completion: {output.finish_reason}")
    token_ids = list(output.token_ids)
    logprobs = [float(step[token].logprob) for token, step in zip(token_ids, output.logprobs, strict=True)]
    return Completion(token_ids, logprobs, output.finish_reason == "length")


def _with_head(weights: NamedWeights) -> Iterator[tuple[str, Tensor]]:
    """Adds a tied head under its own name if it was left out: else vLLM could keep the old one."""
    tied: tuple[str, Tensor] | None = None
    has_head = False
    for name, weight in weights:
        has_head = has_head or name in _HEADS.values()
        if head := next((head for embedding, head in _HEADS.items() if name.endswith(embedding)), None):
            tied = head, weight
        yield name, weight
    if tied and not has_head:
        yield tied


def _load_into(model: Any, weights: NamedWeights) -> None:
    """Runs inside vLLM's worker: copies in place, since captured CUDA graphs keep their addresses."""
    loaded = model.load_weights(weights)
    expected = {name for name, _ in model.named_parameters()}
    if loaded is not None and expected - set(loaded):
        raise RuntimeError(f"vLLM did not get all weights; missing: {', '.join(sorted(expected - set(loaded))[:3])}")


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds the random streams of this process; restore them."""
    state = random.getstate()
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    random.setstate(state)
