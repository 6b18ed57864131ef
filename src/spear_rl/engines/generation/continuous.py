"""Continuous batching: many conversations share one batch, and a finished one makes room for the next at once.

Every active request decodes one token per step from its own KV-cache slot. Prompts are prefilled in packed batches of
their own. On a GPU a step is one replay of a captured CUDA graph, and the host reads a step's tokens while the next
step runs. Knows neither environments nor training.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.kv_slots import Slot, Slots
from spear_rl.engines.generation.padded import StopStrings
from spear_rl.engines.generation.sampling import chosen, uniforms
from spear_rl.engines.memory import memory_guard
from spear_rl.engines.packed.attention import CachedRows, Rows, attach_cache
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion, limit_of, seed_of

DECODE_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of a captured decoding step; a smaller batch leaves some of them idle."""

LOOKAHEAD = 2
"""Steps that are launched before the host reads the tokens of an earlier one."""

PREFILL_SIZES = (
    256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168,
    8192, 10240, 12288, 14336, 16384, 20480, 24576, 28672, 32768,
)  # fmt: skip
"""Prompt tokens of a captured prefill; fewer are padded."""


class _Sampled(NamedTuple):
    """One sampled token of each of some requests."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]


@dataclass
class _Request:
    """A completion in progress."""

    key: int
    prompt: list[int]
    slot: Slot
    num_cached: int
    """Tokens of the prompt that the slot holds already."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    is_done: bool = False


class SlotDecoder:
    """A model with its KV-cache slots and captured steps."""

    def __init__(
        self, model: Any, tokenizer: Any, *, end_ids: Sequence[int], num_slots: int, slot_tokens: int, plain_head: bool
    ) -> None:
        self.model, self.tokenizer, self.end_ids = model, tokenizer, frozenset(end_ids)
        self.slots = Slots(model, num_slots, length=slot_tokens)
        self._plain_head, self._is_cuda = plain_head, model.device.type == "cuda"
        self._sizes = [s for s in DECODE_SIZES if s < num_slots] + [num_slots]
        self._graphs: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._pool: Any = None
        most, device = self._sizes[-1], model.device
        # Inputs and outputs of captured steps, whose addresses are fixed. The rows of `_state` are: token to feed, its
        # position, where its slot begins, number of tokens written before it.
        self._state = torch.zeros(4, most, dtype=torch.int64, device=device)
        self._noise = torch.zeros(num_slots + 1, 1, device=device)  # random numbers of each slot's request
        self._bases = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._prefill_tokens = torch.zeros(3, PREFILL_SIZES[-1], dtype=torch.int64, device=device)
        self._prefill_rows = torch.zeros(4, max(most, 2) + 1, dtype=torch.int64, device=device)
        head = model.get_output_embeddings().weight
        self._prefill_logits = torch.zeros(most, head.shape[0], dtype=head.dtype, device=device)
        self._result = torch.zeros(len(_Sampled._fields), most, dtype=torch.float64, device=device)

    def stream(self, sampling: Sampling, *, seed: int) -> SlotStream:
        """A new stream; requests of an earlier one are dropped."""
        self.slots.forget()
        return SlotStream(self, sampling, seed=seed)

    def make_room(self, length: int, max_new_tokens: int) -> None:
        """Hold sequences of `length` tokens. Captured steps use the old tensors, so new ones invalidate them."""
        is_new = self.slots.make_room(length)
        if is_new:
            attach_cache(self.model, self.slots.layers)
        if self._noise.shape[1] < max_new_tokens:
            self._noise = self._noise.new_zeros(len(self._noise), max_new_tokens)
            is_new = True
        if is_new:
            self._graphs.clear()

    def arrange(self, requests: Sequence[_Request], sampling: Sampling) -> Callable[[], None]:
        """Put these requests into the batch; returns what takes a decoding step."""
        size, count = next(s for s in self._sizes if s >= len(requests)), len(requests)
        self._set_idle(size)
        step = self._decoding(size, sampling)
        self._set_idle(size)
        rows = [
            (r.token_ids[-1], len(r.prompt) + len(r.token_ids) - 1, r.slot.number * self.slots.length, len(r.token_ids))
            for r in requests
        ]
        state = torch.tensor(rows, dtype=torch.int64).T
        self._state[:, :count] = state.to(self._state.device, non_blocking=True)
        self._bases[:count] = self._state[2, :count].int()
        return step

    def seed(self, requests: Sequence[_Request], seeds: Sequence[int], max_new_tokens: int) -> None:
        """Give each request the random numbers of its seed; they are kept by slot."""
        noise = uniforms(torch.tensor(seeds, dtype=torch.int64), max_new_tokens)
        self._noise[_slot_numbers(requests), :max_new_tokens] = noise.to(self._noise.device, non_blocking=True)

    def results(self, count: int) -> Callable[[], _Sampled]:
        """Reads what the last step sampled; waits for that step, not for later ones."""
        host = torch.empty(len(self._result), count, dtype=torch.float64, pin_memory=self._is_cuda)
        host.copy_(self._result[:, :count], non_blocking=True)
        done: Any = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        if done:
            done.record()

        def read() -> _Sampled:
            if done:
                done.synchronize()
            tokens, *scores = host.tolist()
            return _Sampled([int(token) for token in tokens], *scores)

        return read

    @torch.no_grad()
    def first_tokens(self, requests: Sequence[_Request], sampling: Sampling) -> _Sampled:
        """Prefill the prompts and sample the first token of each completion; equal prompts are prefilled once."""
        groups: dict[tuple[int, ...], list[_Request]] = {}
        for r in requests:
            groups.setdefault((*r.prompt, -r.slot.number - 1) if r.num_cached else tuple(r.prompt), []).append(r)
        logits = {}
        leaders = [group[0] for group in groups.values()]
        for r in leaders:
            while len(r.prompt) - r.num_cached > PREFILL_SIZES[-1]:  # too long for one prefill
                self._prefill([replace(r, prompt=r.prompt[: r.num_cached + PREFILL_SIZES[-1]])])
                r.num_cached += PREFILL_SIZES[-1]
        for batch in _prefill_batches(leaders):
            for r, row in zip(batch, self._prefill(batch), strict=True):
                logits[id(r)] = row
        for group in groups.values():
            if len(group) > 1:
                self.slots.copy(group[0].slot.number, [r.slot.number for r in group[1:]], len(group[0].prompt))
        rows = torch.stack([logits[id(group[0])] for group in groups.values() for _ in group])
        order = [r for group in groups.values() for r in group]
        uniform = self._noise[_slot_numbers(order), 0]
        found = chosen(rows, uniform, temperature=sampling.temperature, top_p=sampling.top_p)
        place = {id(r): n for n, r in enumerate(order)}
        index = torch.tensor([place[id(r)] for r in requests], device=rows.device)
        return _Sampled(*(x[index].tolist() for x in found))

    def _prefill(self, batch: Sequence[_Request]) -> Tensor:
        """Feed the uncached part of each prompt; [N, vocabulary] logits after it.

        Tokens and rows are padded to fixed numbers, so that there are few shapes. A padding token belongs to no row and
        writes to the spare slot; a padding row has no token.
        """
        length = self.slots.length
        cached = np.array([r.num_cached for r in batch])
        counts = np.array([len(r.prompt) for r in batch]) - cached
        bases = np.array([r.slot.number for r in batch]) * length
        starts = np.concatenate([[0], counts.cumsum()])
        num_fed = int(starts[-1])
        size = next(s for s in PREFILL_SIZES if s >= num_fed)
        positions = np.arange(num_fed) + np.repeat(cached - starts[:-1], counts)
        tokens = np.zeros((3, size), np.int64)  # ids, positions, places in the cache
        tokens[0, :num_fed] = list(chain.from_iterable(r.prompt[r.num_cached :] for r in batch))
        tokens[1, :num_fed] = positions
        tokens[2] = self.slots.spare * length
        tokens[2, :num_fed] = positions + np.repeat(bases, counts)
        rows = np.zeros((4, self._prefill_rows.shape[1]), np.int64)  # starts, bases, lengths, last tokens
        rows[0] = num_fed
        rows[0, : len(starts)] = starts
        rows[1, : len(batch)] = bases
        rows[2, : len(batch)] = cached + counts
        rows[3, : len(batch)] = starts[1:] - 1
        self._prefill_tokens[:, :size].copy_(torch.from_numpy(tokens))
        self._prefill_rows.copy_(torch.from_numpy(rows))
        self._prefilling(size)()
        return self._prefill_logits[: len(batch)].clone()

    def _prefilling(self, size: int) -> Callable[[], None]:
        """Feeds the `size` tokens in `_prefill_tokens`."""

        @torch.no_grad()
        def prefill() -> None:
            ids, positions, places = (x.clone() for x in self._prefill_tokens[:, :size])
            starts, bases, lengths = (x.clone() for x in self._prefill_rows[:3].int())
            cached = CachedRows(bases, lengths[:-1].clone(), places, self.slots.length)
            last = self._prefill_rows[3, : self._prefill_logits.shape[0]]
            self._prefill_logits.copy_(
                self._logits(ids, positions, Rows(starts, min(self.slots.length, size) + 1, cached), last)
            )

        return self._captured(("prefill", size), prefill)

    def _decoding(self, size: int, sampling: Sampling) -> Callable[[], None]:
        """Feeds every row its token and replaces it by the next one."""

        @torch.no_grad()
        def decode() -> None:
            tokens, positions, bases, num_written = self._state[:, :size]
            # Copies, because torch.compile looks through a view at its base.
            bases32, starts = self._bases[: size + 1].clone(), self._starts[: size + 1].clone()
            cached = CachedRows(bases32, (positions + 1).int(), bases + positions, self.slots.length)
            logits = self._logits(tokens.clone(), positions.clone(), Rows(starts, 2, cached))
            uniform = self._noise[bases // self.slots.length, num_written.clamp(max=self._noise.shape[1] - 1)]
            found = chosen(logits, uniform, temperature=sampling.temperature, top_p=sampling.top_p)
            self._result[:, :size] = torch.stack([x.double() for x in found])
            tokens.copy_(found[0])
            # A finished row decodes on until the batch is rearranged: it must stay inside its slot.
            positions.copy_((positions + 1).clamp(max=self.slots.length - 1))
            num_written.add_(1)

        return self._captured(("decode", size, sampling.temperature, sampling.top_p), decode)

    def _logits(self, ids: Tensor, positions: Tensor, rows: Rows, last: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `last`, or of all."""
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "rows": rows}
        if self._plain_head:
            hidden = self.model.base_model(**inputs).last_hidden_state[0]
            head: Callable[[Tensor], Tensor] = self.model.get_output_embeddings()
            return head(hidden if last is None else hidden[last])
        kept = {} if last is None else {"logits_to_keep": last}
        logits: Tensor = self.model(**inputs, **kept).logits[0]
        return logits

    def _set_idle(self, size: int) -> None:
        """Every row feeds token 0 into the spare slot."""
        self._state.zero_()
        self._state[2, :size] = self.slots.spare * self.slots.length
        self._bases[: size + 1] = self.slots.spare * self.slots.length

    def _captured(self, name: tuple[Any, ...], work: Callable[[], None]) -> Callable[[], None]:
        """On a GPU `work` as a CUDA graph, whose shapes `name` determines; elsewhere `work` itself."""
        if not self._is_cuda:
            return work
        if name not in self._graphs:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, and warms up the libraries
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._pool = graph.pool()
            self._graphs[name] = graph.replay
        return self._graphs[name]


class SlotStream:
    """Generation at fixed settings. The n-th prompt of a key has its own random numbers."""

    def __init__(self, decoder: SlotDecoder, sampling: Sampling, *, seed: int) -> None:
        self._decoder, self._sampling, self._seed = decoder, sampling, seed
        self._stops = StopStrings(decoder.tokenizer, sampling.stop)
        self._turns: dict[int, int] = {}
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._batch: list[_Request] = []
        self._step: Callable[[], None] | None = None
        self._unread: deque[Callable[[], _Sampled]] = deque()
        self._done: list[tuple[int, Completion]] = []

    def __len__(self) -> int:
        return len(self._waiting) + sum(not r.is_done for r in self._batch) + len(self._done)

    def add(self, key: int, prompt: list[int]) -> None:
        """A conversation's next prompt; the prefix it shares with the last one is not prefilled again."""
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        self._waiting.append((key, prompt))

    def finished(self) -> list[tuple[int, Completion]]:
        """Decode until at least one completion is done; all that are done, or nothing if there is no request."""
        count = self._decoder.slots.count
        advice = (
            f"lower rollout.num_tasks or rollout.group_size (it is {count} episodes at once), or rollout.max_context"
        )
        with memory_guard("generating", advice):
            while not self._done and len(self):
                self._advance()
        done, self._done = self._done, []
        return done

    def _advance(self) -> None:
        num_active = sum(not r.is_done for r in self._batch)
        # A prefill pauses decoding, so prompts wait until they are a quarter of all requests.
        ready = min(len(self._waiting), self._decoder.slots.count - num_active)
        if ready and 3 * ready >= num_active:
            self._admit()
        elif num_active * 2 <= len(self._batch) and len(self._batch) > DECODE_SIZES[0]:
            self._rearrange()
        if self._step is not None and not self._done:
            self._step()
            self._unread.append(self._decoder.results(len(self._batch)))
            self._read(num_left=LOOKAHEAD)

    def _admit(self) -> None:
        self._read()
        most = self._sampling.max_new_tokens
        self._decoder.make_room(max(len(prompt) for _, prompt in self._waiting) + most + 2, most)
        new: list[_Request] = []
        while self._waiting:
            key, prompt = self._waiting[0]
            taken = self._decoder.slots.take(key, prompt)
            if taken is None:
                break
            self._waiting.popleft()
            new.append(_Request(key, prompt, *taken))
        self._decoder.seed(new, [self._next_seed(r.key, seed_of(r.prompt)) for r in new], most)
        first = self._decoder.first_tokens(new, self._sampling)
        for request, token, logprob, entropy in zip(new, *first, strict=True):
            self._append(request, token, logprob, entropy)
        self._batch += new
        self._rearrange()

    def _rearrange(self) -> None:
        """Drop finished requests from the batch."""
        self._read()
        self._batch = [r for r in self._batch if not r.is_done]
        self._step = self._decoder.arrange(self._batch, self._sampling) if self._batch else None

    def _read(self, num_left: int = 0) -> None:
        """Append the tokens of launched steps, oldest first, until `num_left` of them are unread."""
        while len(self._unread) > num_left:
            for request, token, logprob, entropy in zip(self._batch, *self._unread.popleft()(), strict=True):
                if not request.is_done:
                    self._append(request, token, logprob, entropy)
            if all(r.is_done for r in self._batch):
                self._unread.clear()
                self._batch, self._step = [], None

    def _append(self, request: _Request, token: int, logprob: float, entropy: float) -> None:
        if not math.isfinite(logprob):
            raise NonFiniteLossError("the policy's logits are not finite: its weights have diverged")
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        request.entropies.append(entropy)
        has_ended = token in self._decoder.end_ids or self._stops.end(request.token_ids)
        if has_ended or len(request.token_ids) == limit_of(request.prompt, self._sampling.max_new_tokens):
            request.is_done = True
            # The last token was not fed: the slot does not hold its keys and values.
            self._decoder.slots.release(request.slot, [*request.prompt, *request.token_ids[:-1]])
            lists = request.token_ids, request.logprobs
            self._done.append((request.key, Completion(*lists, not has_ended, entropies=request.entropies)))

    def _next_seed(self, key: int, own: int | None) -> int:
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        source = f"{self._seed}/{key}/{turn}" if own is None else f"own/{own}"
        digest = hashlib.blake2b(source.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _slot_numbers(requests: Sequence[_Request]) -> list[int]:
    return [r.slot.number for r in requests]


def _prefill_batches(requests: Sequence[_Request]) -> list[list[_Request]]:
    """The requests in order, cut where the next would not fit into one prefill."""
    out: list[list[_Request]] = [[]]
    room = PREFILL_SIZES[-1]
    for r in requests:
        new = len(r.prompt) - r.num_cached
        if out[-1] and new > room:
            out.append([])
            room = PREFILL_SIZES[-1]
        out[-1].append(r)
        room -= new
    return out
