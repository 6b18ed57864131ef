"""The engine over transformers: any causal LM, in this process. Loss functions are only called, never looked into."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spear_rl.engines.base import NonFiniteLossError, Term
from spear_rl.engines.decoding import Decoder
from spear_rl.engines.scoring import has_plain_head, token_scores
from spear_rl.functional.inputs import LossInputs
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion, Metrics


class HFEngine:
    """Generates with a key-value cache and trains with AdamW.

    A loss sees a whole mini-batch at once. The engine computes its log-probabilities in micro-batches of at most
    `micro_batch_tokens` tokens, differentiates the loss by them, and carries that gradient back through each
    micro-batch. So no result depends on how a batch is cut, padded or ordered. Activations are kept while a mini-batch
    has at most `max_kept_tokens` tokens; a larger one is computed twice instead.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        learning_rate: float = 1e-6,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 4096,
        max_kept_tokens: int = 65536,
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._max_grad_norm, self._weight_decay = max_grad_norm, weight_decay
        self._micro_batch_tokens, self._max_kept_tokens = micro_batch_tokens, max_kept_tokens
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._decoder = Decoder(model, tokenizer, pad_id=self.pad_id, end_ids=_end_ids(model, tokenizer))
        self._plain_head = has_plain_head(model)
        self._reference: Any = None
        self.reset_optimizer(learning_rate)

    def reset_optimizer(self, learning_rate: float) -> None:
        """Forget all momentum, as between the cold start and RL."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=self._weight_decay)

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def set_reference(self, model: Any | None = None) -> None:
        """Freeze a copy of the policy (or `model`) as what the KL term compares with."""
        self._reference = copy.deepcopy(self.model if model is None else model).eval().requires_grad_(False)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        """Sample from the policy's own random stream."""
        return self._decoder.completions(prompts, self.sampling, self._generator)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> EvaluationGenerator:
        """A generator with its own settings and random stream: evaluating leaves training as it was."""
        self._decoder.forget()
        return EvaluationGenerator(self._decoder, sampling, torch.Generator(self.model.device).manual_seed(seed))

    def update(self, terms: Sequence[Term]) -> Metrics:
        """Accumulate the gradient of every term, then take one optimizer step."""
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        metrics: Metrics = {}
        for term in terms:
            metrics |= self._accumulate(term)
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteLossError(f"the gradient's norm is {norm}; the weights were not changed")
        self._optimizer.step()
        return metrics | {f"{terms[0].name}/grad_norm": norm}

    def sync(self) -> None:
        """The sampler reads the trained weights themselves; only its cache is out of date."""
        self._decoder.forget()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        return {"optimizer": self._optimizer.state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._generator.set_state(state["generator"])
        self._decoder.forget()

    def _accumulate(self, term: Term) -> Metrics:
        """Add the gradient of one term."""
        batch = term.batch
        pieces = self._micro_batches(batch.attention)
        kept = sum(len(index) * width for index, width in pieces) <= self._max_kept_tokens
        scored = []
        for index, width in pieces:
            with torch.set_grad_enabled(kept):
                scored.append(self._scores(self.model, term, index, width))
        logprobs, entropy = (self._joined(term, pieces, [s[i] for s in scored]).requires_grad_() for i in range(2))
        ref_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                frozen = [self._scores(self._reference, term, index, width)[0] for index, width in pieces]
            ref_logprobs = self._joined(term, pieces, frozen)

        mask, old, advantages = (x.to(logprobs.device) for x in (batch.mask, batch.old_logprobs, batch.advantages))
        out = term.loss(LossInputs(logprobs, old, advantages, mask, entropy=entropy, ref_logprobs=ref_logprobs))
        if not torch.isfinite(out.loss):
            raise NonFiniteLossError(
                f"the {term.name} loss is {float(out.loss.detach())}; the weights were not changed"
            )
        gradients = torch.autograd.grad(term.weight * out.loss, (logprobs, entropy), allow_unused=True)
        for piece, (index, width) in enumerate(pieces):
            tensors = scored[piece] if kept else self._scores(self.model, term, index, width)
            pairs = [(t, g[index, :width]) for t, g in zip(tensors, gradients, strict=True) if g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        values = {"loss": out.loss.detach()} | out.metrics
        return {f"{term.name}/{name}": float(value) for name, value in values.items()}

    def _micro_batches(self, attention: Tensor) -> list[tuple[Tensor, int]]:
        """(row indices, their longest row) of pieces of similar length within the token budget."""
        lengths = attention.sum(1)
        if not torch.equal(attention, torch.arange(attention.shape[1]) < lengths[:, None]):
            raise ValueError("a Batch must be padded on the right")
        pieces: list[tuple[Tensor, int]] = []
        rows: list[int] = []
        for row in lengths.argsort(stable=True).tolist():
            width = int(lengths[row])
            if rows and width * (len(rows) + 1) > self._micro_batch_tokens:
                pieces.append((torch.tensor(rows), int(lengths[rows[-1]])))
                rows = []
            rows.append(row)
        return [*pieces, (torch.tensor(rows), int(lengths[rows[-1]]))]

    def _scores(self, model: Any, term: Term, index: Tensor, width: int) -> tuple[Tensor, Tensor]:
        ids, mask = (x[index, :width].to(model.device) for x in (term.batch.input_ids, term.batch.mask))
        return token_scores(model, ids, mask, temperature=self._temperature, plain_head=self._plain_head)

    def _joined(self, term: Term, pieces: list[tuple[Tensor, int]], parts: list[Tensor]) -> Tensor:
        """The micro-batches' values as one [B, T] tensor that starts a graph of its own."""
        whole = torch.zeros(term.batch.input_ids.shape, dtype=parts[0].dtype, device=parts[0].device)
        for (index, width), part in zip(pieces, parts, strict=True):
            whole[index, :width] = part.detach()
        return whole

    @property
    def _temperature(self) -> float:
        """Rows are scored at the temperature they were sampled at, so that ratios start at 1."""
        return self.sampling.temperature or 1.0


class EvaluationGenerator:
    """The policy under other sampling settings."""

    def __init__(self, decoder: Decoder, sampling: Sampling, generator: torch.Generator) -> None:
        self._decoder, self._sampling, self._generator = decoder, sampling, generator

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return self._decoder.completions(prompts, self._sampling, self._generator)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and the model's own (some models have several)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    return [token for token in [tokenizer.eos_token_id, *ends] if token is not None]
