"""The engine over transformers: any causal LM, in this process. Loss functions are only called."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spear_rl.engines.base import Batch, EpisodeBatch, NonFiniteLossError, Sampler, Term
from spear_rl.engines.critic import Critic
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.generation.padded import Decoder
from spear_rl.engines.memory import MAX_LOGITS, OUT_OF_MEMORY, memory_guard, raise_shortage, smaller_settings
from spear_rl.engines.models import prepare
from spear_rl.engines.models.lora import merged_weights, save_adapter
from spear_rl.engines.models.master_weights import MasterWeights
from spear_rl.engines.packed.layout import can_share, packed_cuts, packed_inputs, row_order
from spear_rl.engines.vision import Pixels, VisionDecoder
from spear_rl.functional.losses import LossInputs
from spear_rl.rollout.collect import Lockstep
from spear_rl.rollout.generator import Generator, Sampling, Stream, drained
from spear_rl.types import Completion, Metrics

logger = logging.getLogger(__name__)


class HFEngine:
    """A TrainableEngine: generates with a KV cache and trains with AdamW.

    A loss sees a whole mini-batch. The engine computes log-probabilities in micro-batches of at most
    `micro_batch_tokens` tokens, differentiates the loss by them, and backpropagates that gradient through each
    micro-batch. So results do not depend on how a batch is split, padded or ordered. Activations are kept for the first
    `max_kept_tokens` tokens of a mini-batch; the rest is computed twice.

    On a GPU in bfloat16 rows are packed and generation uses continuous batching (`packed`). Elsewhere rows are padded
    to the longest of a micro-batch, and generation goes batch by batch.

    Args:
        micro_batch_tokens, max_kept_tokens: None chooses by the device's memory.
        dtype: what the model computes in; weights are trained in float32 in any case.
        packed: None packs where the model and the device allow it.
        share_prefixes: compute what packed rows have in common at their beginning once.
        compiled: compile the model's layers (half a minute at the start, then faster); None does so on a GPU.
        checkpointing: gradient checkpointing: a third slower, a tenth of the memory.
        num_slots, slot_tokens: of the KV cache; longer conversations make it grow, with a pause.
        end_ids: tokens that end a completion; None takes those of the model and of the tokenizer.
        adapter: the peft model around `model`, if only its adapter is trained.
        processor: of a vision-language model, whose rows are padded.
        sampler: generates instead (vLLM); it gets the new weights after every step.
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
        micro_batch_tokens: int | None = 4096,
        max_kept_tokens: int | None = 65536,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        packed: bool | None = None,
        share_prefixes: bool = True,
        compiled: bool | None = None,
        checkpointing: bool = False,
        num_slots: int = 256,
        slot_tokens: int = 512,
        end_ids: Sequence[int] | None = None,
        adapter: Any = None,
        sampler: Sampler | None = None,
        processor: Any = None,
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.sampling = prepare.on_device(model, device, dtype), tokenizer, sampling
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if tokenizer.pad_token_id is None:
            logger.warning("the tokenizer has no padding token: its end token pads rows, which changes no result")
        self._max_grad_norm, self._weight_decay = max_grad_norm, weight_decay
        self._adapter, self._sampler, self.processor = adapter, sampler, processor
        self._pixels = None if processor is None else Pixels(model, processor)
        self._masters = MasterWeights(model, dtype)
        self._plain_head = prepare.has_plain_head(model)
        self.packed = prepare.packs_rows(
            model, tokenizer, packed, plain_head=self._plain_head, generates=sampler is None,
            has_images=processor is not None,
        )  # fmt: skip
        compiled = self.packed and model.device.type == "cuda" if compiled is None else compiled
        self._checkpointing, self._share_prefixes = checkpointing, share_prefixes and self.packed and can_share(model)
        prepare.prepare_layers(model, packed=self.packed, compiled=compiled, checkpointing=checkpointing)
        ends = prepare.all_end_ids(model, tokenizer) if end_ids is None else list(end_ids)
        self._slots: SlotDecoder | None = None
        if self.packed and sampler is None:
            slots = {"num_slots": num_slots, "slot_tokens": slot_tokens}
            self._slots = SlotDecoder(model, tokenizer, end_ids=ends, plain_head=self._plain_head, **slots)
        decoder: Decoder | VisionDecoder = Decoder(model, tokenizer, pad_id=self.pad_id, end_ids=ends)
        if self._pixels is not None:
            decoder = VisionDecoder(model, tokenizer, self._pixels, pad_id=self.pad_id, end_ids=ends)
        self._native = NativeGenerator(
            decoder, self._slots, sampling, device=model.device, seed=seed, stream_seed=seed * 1_000_003
        )
        self._reference: Any = None
        self.critic: Critic | None = None
        self._has_fresh_rows = True
        self.reset_optimizer(learning_rate)
        self._micro_batch_tokens, self._max_kept_tokens = prepare.token_limits(
            micro_batch_tokens, max_kept_tokens, model, self._masters, self._slots, compiled, checkpointing
        )
        size, lora = self._micro_batch_tokens, adapter is not None
        self._advice = partial(smaller_settings, micro_batch_tokens=size, checkpointing=checkpointing, has_adapter=lora)

    def reset_optimizer(self, learning_rate: float) -> None:
        fused = self.model.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._masters.trained, lr=learning_rate, weight_decay=self._weight_decay, fused=fused or None
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def set_reference(self, model: Any | None = None) -> None:
        """Freeze a copy of `model`, or of the policy, as the reference of the KL term."""
        origin = self.model if model is None else model
        self._reference = prepare.frozen_copy(origin, like=self.model, packed=self.packed)

    def hold_critic(self, learning_rate: float) -> None:
        self.critic = Critic(
            self.model, lambda batch: map(self._with_pixels, self._micro_batches(batch)), learning_rate=learning_rate,
            weight_decay=self._weight_decay, max_grad_norm=self._max_grad_norm, packed=self.packed,
            checkpointing=self._checkpointing, advice=self._advice(0),
        )  # fmt: skip

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return (self._sampler or self._native).generate(prompts)

    def stream(self) -> Stream:
        """Completions as they finish; without KV-cache slots, batch by batch."""
        return self._native.stream() if self._sampler is None else Lockstep(self)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator:
        return (self._sampler or self._native).evaluation_generator(sampling, seed=seed)

    def update(self, terms: Sequence[Term]) -> Metrics:
        if self._checkpointing:
            prepare.checkpoint_layers(self.model)
        self._optimizer.zero_grad(set_to_none=True)
        metrics: Metrics = {}
        try:
            beside: LossInputs | None = None
            for term in terms:
                found, beside = self._accumulate(term, beside)
                metrics |= found
            norm = float(nn.utils.clip_grad_norm_(self._masters.trained, self._max_grad_norm))
            if not math.isfinite(norm):
                raise NonFiniteLossError(f"the gradient's norm is {norm}; the weights were not changed")
            self._optimizer.step()
            if self._masters.pairs:
                self._masters.write_back()
        except OUT_OF_MEMORY as error:
            longest = max(term.batch.input_ids.shape[1] for term in terms)
            raise_shortage(error, f"learning from the {terms[0].name} rows", self._advice(longest))
            raise
        return metrics | {f"{terms[0].name}/grad_norm": norm}

    def sync(self) -> None:
        """Generation reads the trained weights themselves; only KV caches and another sampler are out of date."""
        self.model.eval()
        self._native.forget()
        if self._sampler is not None:
            self._sampler.load(merged_weights(self.model, self._masters.exact_weights()))
        self._has_fresh_rows = True

    def save(self, folder: Path) -> None:
        """A transformers folder (or a peft adapter) with the float32 weights."""
        exact = self._masters.exact_weights()
        if self._adapter is not None:
            save_adapter(self._adapter, folder, exact)
        else:
            self.model.save_pretrained(folder, state_dict=self.model.state_dict() | exact)
        (self.tokenizer if self.processor is None else self.processor).save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "generator": self._native.random.get_state(),
            "num_streams": self._native.num_streams,
        } | ({"critic": self.critic.state_dict()} if self.critic else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._weight_decay  # the present setting, not the saved one
        self._native.random.set_state(state["generator"].cpu())
        self._native.num_streams = state.get("num_streams", 0)
        if self.critic:
            self.critic.load_state_dict(state["critic"])
        self.sync()

    def check_weights(self, bound: float) -> None:
        self._masters.check(bound, self._optimizer)
        if self.critic:
            self.critic.check(bound)

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts = self._micro_batches(batch)
        with torch.no_grad(), memory_guard("scoring rows", self._advice(batch.input_ids.shape[1])):
            scores = [self._scores(self.model, part) for part in parts]
        logprobs, entropy = (joined(batch, parts, list(values)) for values in zip(*scores, strict=True))
        return logprobs, entropy

    def _accumulate(self, term: Term, beside: LossInputs | None) -> tuple[Metrics, LossInputs]:
        """Add the gradient of one term; `beside` is what the previous term's loss was given."""
        batch, parts = term.batch, self._micro_batches(term.batch)
        scored = []
        for part in parts:
            with torch.set_grad_enabled(part.is_kept):
                scored.append(self._scores(self.model, part))
        logprobs, entropy = (joined(batch, parts, [s[i] for s in scored]).requires_grad_() for i in range(2))
        ref_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                ref_logprobs = joined(batch, parts, [self._scores(self._reference, part)[0] for part in parts])

        mask, old, advantages = (x.to(logprobs.device) for x in (batch.mask, batch.old_logprobs, batch.advantages))
        inputs = LossInputs(logprobs, old, advantages, mask, entropy, ref_logprobs, term.generator, beside)
        out = term.loss(inputs)
        if not torch.isfinite(out.loss):
            raise NonFiniteLossError(f"the {term.name} loss is {out.loss.item()}; the weights were not changed")
        gradients = torch.autograd.grad(term.weight * out.loss, (logprobs, entropy), allow_unused=True)
        for number, part in enumerate(parts):
            tensors = scored[number] if part.is_kept else self._scores(self.model, part)
            scored[number] = (logprobs, entropy)  # frees the micro-batch's activations
            pairs = [(t, g[part.rows, : part.width]) for t, g in zip(tensors, gradients, strict=True) if g is not None]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        values = {"loss": out.loss.detach()} | out.metrics
        if self._has_fresh_rows:  # sampled with these weights: any difference is the sampler's arithmetic
            values["sampler_gap"] = (logprobs.detach() - old)[mask].abs().mean()
            self._has_fresh_rows = False
        return {f"{term.name}/{name}": float(value) for name, value in values.items()}, inputs

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """Rows of similar length, or that begin alike, within the token budget, all transferred at once."""
        device, lengths = self.model.device, batch.attention.sum(1)
        sent = partial(Tensor.to, device=device, non_blocking=True)
        if not torch.equal(batch.attention, torch.arange(batch.attention.shape[1]) < lengths[:, None]):
            raise ValueError("a Batch must be padded on the right")
        if self.packed:
            order, shared = row_order(batch.input_ids, lengths, share=self._share_prefixes)
            cuts = packed_cuts(lengths[order], shared, self._micro_batch_tokens)
        else:
            order, cuts = lengths.argsort(stable=True), [0]
            for place, width in enumerate(lengths[order].tolist()):
                if place > cuts[-1] and width * (place - cuts[-1] + 1) > self._micro_batch_tokens:
                    cuts.append(place)
        pictures = batch.images if isinstance(batch, EpisodeBatch) else ()
        out, room = [], self._max_kept_tokens
        for start, end in pairwise([*cuts, len(order)]):
            rows = order[start:end]
            sizes, width = lengths[rows], int(lengths[rows].max())
            ids, mask = batch.input_ids[rows, :width], batch.mask[rows, :width]
            row, column = torch.nonzero(mask[:, 1:], as_tuple=True)
            predictors: tuple[Tensor | int, Tensor]
            if self.packed:
                inputs, places = packed_inputs(ids, sizes, shared[start:end], device)
                predictors = (0, sent(places[row, column].long()))
            else:  # no attention mask: causal attention never sees padding on the right
                inputs, predictors = {"input_ids": sent(ids)}, (sent(row), sent(column))
            room -= inputs["input_ids"].numel()
            targets, target_index = sent(ids[row, column + 1]), (sent(row), sent(column + 1))
            images = tuple(pictures[n] for n in rows.tolist()) if pictures else None
            out.append(MicroBatch(sent(rows), width, room >= 0, inputs, predictors, targets, target_index, images))
        return out

    def _scores(self, model: Any, part: MicroBatch) -> tuple[Tensor, Tensor]:
        # At the sampling temperature, so that ratios start at 1.
        temperature = self.sampling.temperature or 1.0
        return token_scores(model, self._with_pixels(part), temperature=temperature, plain_head=self._plain_head)

    def _with_pixels(self, part: MicroBatch) -> MicroBatch:
        if part.images is None:
            return part
        if self._pixels is None:
            raise ValueError("a Batch has images, and this engine has no processor to read them with")
        pixels = self._pixels.inputs(part.model_inputs["input_ids"], part.images)
        return replace(part, model_inputs=part.model_inputs | pixels)


class NativeGenerator:
    """Completes prompts with the trained model: continuous batching where it has KV-cache slots, else padded batches.

    Args:
        seed: of padded batches.
        stream_seed: of the streams, which are numbered from it.
    """

    def __init__(
        self, decoder: Decoder | VisionDecoder, slots: SlotDecoder | None, sampling: Sampling, *, device: torch.device,
        seed: int, stream_seed: int,
    ) -> None:  # fmt: skip
        self._decoder, self._slots, self.sampling = decoder, slots, sampling
        self.random, self.num_streams = torch.Generator(device).manual_seed(seed), 0
        self._stream_seed = stream_seed

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        if self._slots is not None:
            return drained(self.stream(), prompts)
        try:
            return self._decoder.completions(prompts, self.sampling, self.random)
        except OUT_OF_MEMORY as error:
            raise_shortage(error, "generating", "lower rollout.num_tasks or rollout.group_size, or rollout.max_context")
            raise

    def stream(self) -> Stream:
        """Completions as they finish; without slots, batch by batch."""
        if self._slots is None:
            return Lockstep(self)
        self.num_streams += 1
        return self._slots.stream(self.sampling, seed=self._stream_seed + self.num_streams)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> NativeGenerator:
        """A generator with its own sampling and random stream."""
        self._decoder.forget()
        device = self.random.device
        return NativeGenerator(self._decoder, self._slots, sampling, device=device, seed=seed, stream_seed=seed)

    def forget(self) -> None:
        """Drop KV caches, which were made with other weights."""
        self._decoder.forget()
        if self._slots is not None:
            self._slots.slots.forget()


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass, on the device."""

    rows: Tensor
    """Their indices in the batch."""
    width: int
    is_kept: bool
    """Whether activations are kept for the backward pass, or computed again."""
    model_inputs: dict[str, Any]
    predictors: tuple[Tensor | int, Tensor]
    """Index of the model's outputs that predict a trained token."""
    targets: Tensor
    """[K] the trained tokens."""
    target_index: tuple[Tensor, Tensor]
    """Their rows and columns."""
    images: tuple[tuple[bytes, ...], ...] | None = None


def token_scores(
    model: Any, part: MicroBatch, *, temperature: float = 1.0, plain_head: bool = True
) -> tuple[Tensor, Tensor]:
    """[rows, width] log-probabilities and entropies of the trained tokens; 0 elsewhere."""
    targets = part.targets
    if plain_head:
        hidden = model.base_model(**part.model_inputs, use_cache=False).last_hidden_state[part.predictors]
        head = model.get_output_embeddings()
        most = MAX_LOGITS * (4 if model.device.type == "cuda" else 1)
        size = max(most // model.config.get_text_config().vocab_size, 1)
        if len(targets) <= size:
            logprobs, entropies = _scores(head(hidden), targets, temperature)
        else:
            chunks = [
                checkpoint(lambda h, t: _scores(head(h), t, temperature), h, t, use_reentrant=False)
                for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
            ]
            logprobs, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    else:
        logits = model(**part.model_inputs, use_cache=False).logits[part.predictors]
        logprobs, entropies = _scores(logits, targets, temperature)
    zeros = torch.zeros((len(part.rows), part.width), dtype=logprobs.dtype, device=model.device)
    return zeros.index_put(part.target_index, logprobs), zeros.index_put(part.target_index, entropies)


def _scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[K, V] logits and [K] targets to [K] log-probabilities and [K] entropies."""
    full = (logits.float() / temperature).log_softmax(-1)
    return full.gather(-1, targets[:, None]).squeeze(-1), -(full.exp() * full).sum(-1)


def joined(batch: Batch, parts: Sequence[MicroBatch], values: Sequence[Tensor]) -> Tensor:
    """The micro-batches' values as one detached [B, T] tensor."""
    whole = torch.zeros(batch.input_ids.shape, dtype=values[0].dtype, device=values[0].device)
    for part, value in zip(parts, values, strict=True):
        whole[part.rows, : part.width] = value.detach()
    return whole
