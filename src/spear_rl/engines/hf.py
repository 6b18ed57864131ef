"""The engine over transformers: any causal LM, in this process. Loss functions are only called, never looked into."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spear_rl.engines.base import Batch, NonFiniteLossError, Term
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.generation.padded import Decoder
from spear_rl.engines.memory import automatic_tokens, footprint, free_bytes
from spear_rl.engines.models.lora import merged_weights, save_adapter
from spear_rl.engines.out_of_memory import GuardedStream, memory_for
from spear_rl.engines.packed.attention import attached_memory, detach_memory, has_kernel
from spear_rl.engines.packed.parity import disagreement
from spear_rl.engines.scoring.layers import checkpoint_layers, prepare_layers
from spear_rl.engines.scoring.logprobs import has_plain_head, token_scores
from spear_rl.engines.scoring.master_weights import Masters, largest_entry
from spear_rl.engines.scoring.micro_batches import Piece, joined, pieces_of
from spear_rl.engines.vision import Pixels, VisionDecoder
from spear_rl.errors import UserError
from spear_rl.functional.losses import LossInputs
from spear_rl.rollout.generator import Generator, Lockstep, Sampling, Stream, drained
from spear_rl.types import Completion, Metrics

logger = logging.getLogger(__name__)


class Sampler(Protocol):
    """Who generates in the engine's place."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator: ...
    def load(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the trainer's weights."""
        ...


class HFEngine:
    """Generates with a key-value cache and trains with AdamW.

    A loss sees a whole mini-batch at once. The engine computes its log-probabilities in micro-batches of at most
    `micro_batch_tokens` tokens, differentiates the loss by them, and carries that gradient back through each
    micro-batch. So no result depends on how a batch is cut, padded or ordered. Activations are kept for the first
    `max_kept_tokens` tokens of a mini-batch; the rest is computed twice.

    On a GPU in bfloat16 rows are laid end to end without padding, and generation streams (`packed`). Elsewhere rows are
    padded to the longest of a micro-batch, and generation goes batch by batch.

    Args:
        micro_batch_tokens, max_kept_tokens: None takes what the device's memory allows.
        dtype: what the model computes in; weights are learned in float32 all the same.
        packed: unset takes the fast way where the model and the device allow it.
        compiled: compile the model's layers (half a minute at the start, then faster); unset does so on a GPU.
        checkpointing: recompute activations layer by layer in the backward pass: a third slower, a tenth of the memory.
        num_slots: conversations generated side by side.
        slot_tokens: tokens each of them has room for at first; a longer one makes the room of all grow, with a pause.
        end_ids: tokens that end a completion; unset takes the model's and the tokenizer's own.
        adapter: the peft model around `model`, if only its adapter is trained.
        processor: of a vision-language model, whose prompts may hold pictures; its rows are padded.
        sampler: who generates instead (vLLM); it is given the new weights after every step.
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
            logger.warning("the tokenizer has no padding token: its end token fills up rows, which changes no result")
        self._max_grad_norm, self._weight_decay = max_grad_norm, weight_decay
        self._seed, self._num_streams = seed, 0
        self._adapter, self._sampler = adapter, sampler
        self.processor = processor
        self._pixels = None if processor is None else Pixels(model, processor)
        self._masters = Masters(model, dtype)
        self._largest_at_first = largest_entry(self._masters.trained)
        self._plain_head = has_plain_head(model)
        self.packed = self._packs(packed)
        self._compiled = self.packed and model.device.type == "cuda" if compiled is None else compiled
        self._checkpointing = checkpointing
        prepare_layers(model, packed=self.packed, compiled=self._compiled, checkpointing=checkpointing)
        ends = _end_ids(model, tokenizer) if end_ids is None else list(end_ids)
        self._generator = torch.Generator(device=model.device).manual_seed(seed)
        self._slots: SlotDecoder | None = None
        if self.packed:
            self._slots = SlotDecoder(
                model,
                tokenizer,
                end_ids=ends,
                num_slots=num_slots,
                slot_tokens=slot_tokens,
                plain_head=self._plain_head,
            )
        self._decoder: Decoder | VisionDecoder = Decoder(model, tokenizer, pad_id=self.pad_id, end_ids=ends)
        if self._pixels is not None:
            self._decoder = VisionDecoder(model, tokenizer, self._pixels, pad_id=self.pad_id, end_ids=ends)
        self._reference: Any = None
        self._has_fresh_rows = True
        self.reset_optimizer(learning_rate)
        fitting = self._fitting_tokens() if None in (micro_batch_tokens, max_kept_tokens) else (0, 0)
        self._micro_batch_tokens = fitting[0] if micro_batch_tokens is None else micro_batch_tokens
        self._max_kept_tokens = fitting[1] if max_kept_tokens is None else max_kept_tokens

    def reset_optimizer(self, learning_rate: float) -> None:
        """Forget all momentum, as between the cold start and RL."""
        fused = self.model.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._masters.trained, lr=learning_rate, weight_decay=self._weight_decay, fused=fused or None
        )

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def set_reference(self, model: Any | None = None) -> None:
        """Freeze a copy of the policy (or `model`) as what the KL term compares with."""
        source = self.model if model is None else model
        slots: dict[int, Any] = {id(tensor): tensor for tensor in attached_memory(source)}  # are not copied
        frozen = copy.deepcopy(source, slots).eval().requires_grad_(False).to(self.model.device)
        detach_memory(frozen)
        Masters(frozen, self.model.get_input_embeddings().weight.dtype)
        prepare_layers(frozen, packed=self.packed, compiled=False, checkpointing=False)
        self._reference = frozen

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        """Sample from the policy's own random stream."""
        if self._sampler is not None:
            return self._sampler.generate(prompts)
        if self._slots is None:
            with memory_for("generating", self._less_to_generate):
                return self._decoder.completions(prompts, self.sampling, self._generator)
        return drained(self.stream(), prompts)

    def stream(self) -> Stream:
        """Completions as they come; on a device without slots, batch by batch."""
        if self._slots is None or self._sampler is not None:
            return Lockstep(self)
        self._num_streams += 1
        stream = self._slots.stream(self.sampling, seed=self._seed * 1_000_003 + self._num_streams)
        return GuardedStream(stream, self._less_to_generate)

    def evaluation_generator(self, sampling: Sampling, *, seed: int) -> Generator:
        """A generator with its own settings and random stream: evaluating leaves training as it was."""
        if self._sampler is not None:
            return self._sampler.evaluation_generator(sampling, seed=seed)
        self._decoder.forget()
        random = torch.Generator(self.model.device).manual_seed(seed)
        return EvaluationGenerator(
            self._decoder, self._slots, sampling, random, seed=seed, way_out=self._less_to_generate
        )

    def update(self, terms: Sequence[Term]) -> Metrics:
        """Accumulate the gradient of every term, then take one optimizer step."""
        if self._checkpointing:
            checkpoint_layers(self.model)
        self._optimizer.zero_grad(set_to_none=True)
        metrics: Metrics = {}
        with memory_for(f"learning from the {terms[0].name} rows", self._less_to_learn):
            beside: LossInputs | None = None
            for term in terms:
                found, beside = self._accumulate(term, beside)
                metrics |= found
            norm = float(nn.utils.clip_grad_norm_(self._masters.trained, self._max_grad_norm))
            if not torch.isfinite(torch.tensor(norm)):
                raise NonFiniteLossError(f"the gradient's norm is {norm}; the weights were not changed")
            self._optimizer.step()
            self._masters.write_back()
        return metrics | {f"{terms[0].name}/grad_norm": norm}

    def sync(self) -> None:
        """The sampler reads the trained weights themselves; only its cache is out of date."""
        self.model.eval()
        self._decoder.forget()
        if self._slots is not None:
            self._slots.forget()
        if self._sampler is not None:
            self._sampler.load(merged_weights(self.model, self._masters.exact_weights()))
        self._has_fresh_rows = True

    def save(self, folder: Path) -> None:
        """A plain transformers folder (or a peft adapter), with the weights as they are learned, in float32."""
        exact = self._masters.exact_weights()
        if self._adapter is not None:
            save_adapter(self._adapter, folder, exact)
        else:
            self.model.save_pretrained(folder, state_dict=self.model.state_dict() | exact)
        (self.tokenizer if self.processor is None else self.processor).save_pretrained(folder)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "num_streams": self._num_streams,
        }

    def check_weights(self, bound: float) -> None:
        """Raise if the trained weights or the optimizer's state are not finite, or a weight is larger than `bound`.

        A model that came with larger weights may have up to ten times those.
        """
        largest = largest_entry(self._masters.trained)
        moments = [x for state in self._optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        if not largest <= max(bound, 10 * self._largest_at_first):
            raise NonFiniteLossError(f"the policy has diverged (its largest weight is {largest:g}) and was not saved")
        if not math.isfinite(largest_entry(moments)):
            raise NonFiniteLossError("the optimizer's state is not finite any more and was not saved")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group["weight_decay"] = self._weight_decay  # the setting of now, not of when it was saved
        self._generator.set_state(state["generator"].cpu())
        self._num_streams = state.get("num_streams", 0)
        self.sync()

    def scored(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T] log-probabilities and entropies of a batch's trained tokens under the policy as it is now."""
        pieces = self._pieces(batch)
        with torch.no_grad(), memory_for("scoring rows", self._less_to_learn):
            parts = [self._scores(self.model, piece) for piece in pieces]
        logprobs, entropy = (joined(batch, pieces, [part[i] for part in parts]) for i in range(2))
        return logprobs, entropy

    def _packs(self, asked: bool | None) -> bool:
        """Whether rows are laid end to end: only where that gives a model's own results, and unasked only if fast."""
        model = self.model
        if self._pixels is not None:
            if asked:
                raise UserError("engine.attention=packed: rows with pictures are padded; leave it out")
            return False
        has_kernels = has_kernel(model.device, model.get_input_embeddings().weight.dtype)
        if not (has_kernels if asked is None else asked):
            return False
        with memory_for("trying out packed attention", lambda: "the model leaves no room for anything else"):
            reason = disagreement(model, self.tokenizer, plain_head=self._plain_head, streams=self._sampler is None)
        if reason and asked:
            raise UserError(f"engine.attention=packed: {reason}; set engine.attention=padded")
        if reason:
            logger.warning("rows are padded, which is slower: %s", reason)
        return not reason

    def _fitting_tokens(self) -> tuple[int, int]:
        """Tokens of a micro-batch, and those whose activations may be kept, by the memory there is."""
        device = self.model.device
        held = footprint(
            self.model.config,
            num_weights=0,
            num_trained=sum(p.numel() for p in self._masters.trained),
            dtype=self.model.get_input_embeddings().weight.dtype,
            kept_tokens=1024,
            num_slots=self._slots.slots.count if self._slots else 0,
            compiled=self._compiled,
            checkpointing=self._checkpointing,
            device_type=device.type,
        )
        free = free_bytes(device) - (held.total - held.activations)
        a_token = held.activations / 1024
        return automatic_tokens(free, a_token, device.type)

    def _less_to_learn(self) -> str:
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

    def _less_to_generate(self) -> str:
        num_slots = f" (it is {self._slots.slots.count} episodes at once)" if self._slots else ""
        return f"lower rollout.num_tasks or rollout.group_size{num_slots}, or rollout.max_context"

    def _accumulate(self, term: Term, beside: LossInputs | None) -> tuple[Metrics, LossInputs]:
        """Add the gradient of one term; `beside` is what the loss of the term before it was given."""
        batch = term.batch
        pieces = self._pieces(batch)
        scored = []
        for piece in pieces:
            with torch.set_grad_enabled(piece.is_kept):
                scored.append(self._scores(self.model, piece))
        logprobs, entropy = (joined(batch, pieces, [s[i] for s in scored]).requires_grad_() for i in range(2))
        ref_logprobs = None
        if self._reference is not None:
            with torch.no_grad():
                frozen = [self._scores(self._reference, piece)[0] for piece in pieces]
            ref_logprobs = joined(batch, pieces, frozen)

        mask, old, advantages = (x.to(logprobs.device) for x in (batch.mask, batch.old_logprobs, batch.advantages))
        inputs = LossInputs(logprobs, old, advantages, mask, entropy, ref_logprobs, term.generator, beside)
        out = term.loss(inputs)
        if not torch.isfinite(out.loss):
            raise NonFiniteLossError(
                f"the {term.name} loss is {float(out.loss.detach())}; the weights were not changed"
            )
        gradients = torch.autograd.grad(term.weight * out.loss, (logprobs, entropy), allow_unused=True)
        for number, piece in enumerate(pieces):
            tensors = scored[number] if piece.is_kept else self._scores(self.model, piece)
            scored[number] = (logprobs, entropy)  # lets go of the piece's activations
            pairs = [
                (t, g[piece.rows, : piece.width]) for t, g in zip(tensors, gradients, strict=True) if g is not None
            ]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        values = {"loss": out.loss.detach()} | out.metrics
        if self._has_fresh_rows:  # sampled by these very weights: whatever differs is the sampler's arithmetic
            values["sampler_gap"] = (logprobs.detach() - old)[mask].abs().mean()
            self._has_fresh_rows = False
        return {f"{term.name}/{name}": float(value) for name, value in values.items()}, inputs

    def _pieces(self, batch: Batch) -> list[Piece]:
        return pieces_of(
            batch,
            self.model.device,
            max_tokens=self._micro_batch_tokens,
            max_kept_tokens=self._max_kept_tokens,
            packed=self.packed,
        )

    def _scores(self, model: Any, piece: Piece) -> tuple[Tensor, Tensor]:
        # At the temperature of sampling, so that ratios start at 1.
        temperature = self.sampling.temperature or 1.0
        inputs = piece.inputs
        if piece.images is not None:
            if self._pixels is None:
                raise ValueError("a Batch has images, and this engine has no processor to read them with")
            inputs = self._pixels.fed(inputs, piece.images)
        return token_scores(model, inputs, temperature=temperature, plain_head=self._plain_head)


class EvaluationGenerator:
    """The policy under other sampling settings."""

    def __init__(
        self,
        decoder: Decoder | VisionDecoder,
        slots: SlotDecoder | None,
        sampling: Sampling,
        generator: torch.Generator,
        *,
        seed: int,
        way_out: Callable[[], str],
    ) -> None:
        self._decoder, self._slots, self._sampling = decoder, slots, sampling
        self._generator, self._seed, self._way_out = generator, seed, way_out

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        if self._slots is None:
            with memory_for("generating", self._way_out):
                return self._decoder.completions(prompts, self._sampling, self._generator)
        return drained(self.stream(), prompts)

    def stream(self) -> Stream:
        if self._slots is None:
            return Lockstep(self)
        self._seed += 1
        return GuardedStream(self._slots.stream(self._sampling, seed=self._seed), self._way_out)


def _end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a completion: the tokenizer's and the model's own (some models have several)."""
    own = getattr(model.generation_config, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    return [token for token in [tokenizer.eos_token_id, *ends] if token is not None]
