"""The engine over transformers: any causal LM, in this process. Loss functions are only called."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spear_rl.engines.base import Batch, NonFiniteLossError, Term
from spear_rl.engines.device import free_bytes
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.generation.native import NativeGenerator
from spear_rl.engines.generation.padded import Decoder
from spear_rl.engines.memory import automatic_tokens, footprint, memory_guard
from spear_rl.engines.models.lora import merged_weights, save_adapter
from spear_rl.engines.packed.attention import detach_cache, has_kernel, use_packed_attention
from spear_rl.engines.packed.parity import disagreement
from spear_rl.engines.scoring.logprobs import MicroBatch, has_plain_head, joined, micro_batches, token_scores
from spear_rl.engines.scoring.master_weights import MasterWeights, largest_entry
from spear_rl.engines.vision import Pixels, VisionDecoder
from spear_rl.errors import UserError
from spear_rl.functional.losses import LossInputs
from spear_rl.rollout.collect import Lockstep
from spear_rl.rollout.generator import Generator, Sampling, Stream
from spear_rl.types import Completion, Metrics

logger = logging.getLogger(__name__)


class Sampler(Protocol):
    """Generates in the engine's place."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator: ...
    def load(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the trainer's weights."""


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
        self.model, self.tokenizer, self.sampling = model.to(device or model.device).eval(), tokenizer, sampling
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if tokenizer.pad_token_id is None:
            logger.warning("the tokenizer has no padding token: its end token pads rows, which changes no result")
        self._max_grad_norm, self._weight_decay = max_grad_norm, weight_decay
        self._adapter, self._sampler, self.processor = adapter, sampler, processor
        self._pixels = None if processor is None else Pixels(model, processor)
        self._masters = MasterWeights(model, dtype)
        self._initial_largest = largest_entry(self._masters.trained)
        self._plain_head = has_plain_head(model)
        self.packed = self._is_packed(packed)
        self._compiled = self.packed and model.device.type == "cuda" if compiled is None else compiled
        self._checkpointing = checkpointing
        _prepare_layers(model, packed=self.packed, compiled=self._compiled, checkpointing=checkpointing)
        ends = _end_ids(model, tokenizer) if end_ids is None else list(end_ids)
        self._slots: SlotDecoder | None = None
        if self.packed:
            slots = {"num_slots": num_slots, "slot_tokens": slot_tokens}
            self._slots = SlotDecoder(model, tokenizer, end_ids=ends, plain_head=self._plain_head, **slots)
        decoder: Decoder | VisionDecoder = Decoder(model, tokenizer, pad_id=self.pad_id, end_ids=ends)
        if self._pixels is not None:
            decoder = VisionDecoder(model, tokenizer, self._pixels, pad_id=self.pad_id, end_ids=ends)
        self._native = NativeGenerator(
            decoder, self._slots, sampling, device=model.device, seed=seed, stream_seed=seed * 1_000_003
        )
        self._reference: Any = None
        self._has_fresh_rows = True
        self.reset_optimizer(learning_rate)
        fitting = self._fitting_tokens() if None in (micro_batch_tokens, max_kept_tokens) else (0, 0)
        self._micro_batch_tokens = fitting[0] if micro_batch_tokens is None else micro_batch_tokens
        self._max_kept_tokens = fitting[1] if max_kept_tokens is None else max_kept_tokens

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
        frozen = copy.deepcopy(self.model if model is None else model)
        detach_cache(frozen)
        frozen = frozen.eval().requires_grad_(False).to(self.model.device)
        MasterWeights(frozen, self.model.get_input_embeddings().weight.dtype)
        _prepare_layers(frozen, packed=self.packed, compiled=False, checkpointing=False)
        self._reference = frozen

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return (self._sampler or self._native).generate(prompts)

    def stream(self) -> Stream:
        """Completions as they finish; without KV-cache slots, batch by batch."""
        return self._native.stream() if self._sampler is None else Lockstep(self)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator:
        return (self._sampler or self._native).evaluation_generator(sampling, seed=seed)

    def update(self, terms: Sequence[Term]) -> Metrics:
        if self._checkpointing:
            _checkpoint_layers(self.model)
        self._optimizer.zero_grad(set_to_none=True)
        metrics: Metrics = {}
        with memory_guard(f"learning from the {terms[0].name} rows", self._smaller_settings()):
            beside: LossInputs | None = None
            for term in terms:
                found, beside = self._accumulate(term, beside)
                metrics |= found
            norm = float(nn.utils.clip_grad_norm_(self._masters.trained, self._max_grad_norm))
            if not math.isfinite(norm):
                raise NonFiniteLossError(f"the gradient's norm is {norm}; the weights were not changed")
            self._optimizer.step()
            self._masters.write_back()
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
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._weight_decay  # the present setting, not the saved one
        self._native.random.set_state(state["generator"].cpu())
        self._native.num_streams = state.get("num_streams", 0)
        self.sync()

    def check_weights(self, bound: float) -> None:
        """Raise if the trained weights or the optimizer's state are not finite, or a weight is larger than `bound`.

        A model that came with larger weights may have up to ten times those.
        """
        largest = largest_entry(self._masters.trained)
        moments = [x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        if not largest <= max(bound, 10 * self._initial_largest):
            raise NonFiniteLossError(f"the policy has diverged (its largest weight is {largest:g}) and was not saved")
        if not math.isfinite(largest_entry(moments)):
            raise NonFiniteLossError("the optimizer's state is not finite and was not saved")

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts = self._micro_batches(batch)
        with torch.no_grad(), memory_guard("scoring rows", self._smaller_settings()):
            scores = [self._scores(self.model, part) for part in parts]
        logprobs, entropy = (joined(batch, parts, list(values)) for values in zip(*scores, strict=True))
        return logprobs, entropy

    def _is_packed(self, asked: bool | None) -> bool:
        """Whether to pack rows: only where results agree with the model's own, and by default only if it is fast."""
        model = self.model
        if self._pixels is not None:
            if asked:
                raise UserError("engine.attention=packed: rows with images are padded; leave it out")
            return False
        is_fast = has_kernel(model.device, model.get_input_embeddings().weight.dtype)
        if not (is_fast if asked is None else asked):
            return False
        with memory_guard("testing packed attention", "the model leaves no room for anything else"):
            reason = disagreement(model, self.tokenizer, plain_head=self._plain_head, generates=self._sampler is None)
        if reason and asked:
            raise UserError(f"engine.attention=packed: {reason}; set engine.attention=padded")
        if reason:
            logger.warning("rows are padded, which is slower: %s", reason)
        return not reason

    def _fitting_tokens(self) -> tuple[int, int]:
        """(tokens per micro-batch, tokens whose activations are kept) that fit into memory."""
        device = self.model.device
        taken = footprint(
            self.model.config,
            num_weights=0,
            num_trained=sum(p.numel() for p in self._masters.trained),
            dtype=self.model.get_input_embeddings().weight.dtype,
            kept_tokens=1024,
            num_slots=self._slots.slots.count if self._slots else 0,
            slot_tokens=self._slots.slots.length if self._slots else 0,
            compiled=self._compiled,
            checkpointing=self._checkpointing,
            device_type=device.type,
        )
        free = free_bytes(device) - (taken.total - taken.activations)
        return automatic_tokens(free, taken.activations / 1024, device.type)

    def _smaller_settings(self) -> str:
        """What to set where training runs out of memory."""
        ways = []
        if self._micro_batch_tokens >= 512:
            smaller = self._micro_batch_tokens // 2
            ways.append(f"engine.micro_batch_tokens={smaller} (it is {self._micro_batch_tokens})")
        if not self._checkpointing:
            ways.append("engine.checkpointing=true")
        if self._adapter is None:
            ways.append("in a new run engine.lora_rank=16")
        known = f"set {' or '.join(ways)}" if ways else "take a smaller model or lower rollout.max_context"
        return f"{known}; the weights were not changed"

    def _accumulate(self, term: Term, beside: LossInputs | None) -> tuple[Metrics, LossInputs]:
        """Add the gradient of one term; `beside` is the input of the loss of the term before it."""
        batch = term.batch
        parts = self._micro_batches(batch)
        scored = []
        for part in parts:
            with torch.set_grad_enabled(part.is_kept):
                scored.append(self._scores(self.model, part))
        logprobs, entropy = (joined(batch, parts, [s[i] for s in scored]).requires_grad_() for i in range(2))
        ref_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                frozen = [self._scores(self._reference, part)[0] for part in parts]
            ref_logprobs = joined(batch, parts, frozen)

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
        limits = {"max_tokens": self._micro_batch_tokens, "max_kept_tokens": self._max_kept_tokens}
        return micro_batches(batch, self.model.device, packed=self.packed, **limits)

    def _scores(self, model: Any, part: MicroBatch) -> tuple[Tensor, Tensor]:
        inputs = part.inputs
        if part.images is not None:
            if self._pixels is None:
                raise ValueError("a Batch has images, and this engine has no processor to read them with")
            inputs = self._pixels.added(inputs, part.images)
        # At the sampling temperature, so that ratios start at 1.
        return token_scores(model, inputs, temperature=self.sampling.temperature or 1.0, plain_head=self._plain_head)


def _prepare_layers(model: Any, *, packed: bool, compiled: bool, checkpointing: bool) -> None:
    if packed:
        use_packed_attention(model)
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"engine.checkpointing: {type(model).__name__} does not support it; leave it out")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        kinds = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in kinds:
                # The layers are alike and sizes are symbolic, so only the first one is compiled, once.
                module.compile(dynamic=True)


def _checkpoint_layers(model: Any) -> None:
    """transformers checkpoints in training mode only; dropout stays off."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(module, name, 0.0)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and the model's (some models have several)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    return [token for token in [tokenizer.eos_token_id, *ends] if token is not None]
