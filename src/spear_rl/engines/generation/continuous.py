"""Completions as they come: many conversations share one batch, and a place that falls free is taken at once.

A batch is a number of lanes, each of which feeds one token a step from one slot of the key-value memory. Prompts are
read in packed batches of their own. On a GPU a step is one replay of a captured graph, and the host looks at a step's
tokens while the next step already runs. It knows neither environments nor training.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear_rl.engines.base import NonFiniteLossError
from spear_rl.engines.generation.kv_slots import Slot, Slots
from spear_rl.engines.generation.sampling import chosen, uniforms
from spear_rl.engines.generation.stop_strings import StopStrings
from spear_rl.engines.packed.attention import Memory, Rows, attach_memory
from spear_rl.rollout.generator import Sampling
from spear_rl.types import Completion

SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Lanes of a captured step; a smaller batch leaves some of them idle."""

AHEAD = 2
"""Steps that run while the host still looks at an earlier one, or the caller at what is done."""

FED_SIZES = (
    256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168,
    8192, 10240, 12288, 14336, 16384, 20480, 24576, 28672, 32768,
)  # fmt: skip
"""Prompt tokens read at once; what is fewer is filled up."""


@dataclass
class _Writing:
    """A completion under way."""

    key: int
    prompt: list[int]
    slot: Slot
    num_held: int
    """Tokens of the prompt whose keys and values the slot has already."""
    chance: Tensor = field(default_factory=lambda: torch.empty(0))
    """[max_new_tokens] its own random numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_over: bool = False


class SlotDecoder:
    """A model with its key-value slots and captured steps."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        end_ids: Sequence[int],
        num_slots: int,
        slot_tokens: int,
        plain_head: bool,
    ) -> None:
        self.model, self.tokenizer, self.end_ids = model, tokenizer, frozenset(end_ids)
        self.slots = Slots(model, num_slots, length=slot_tokens)
        self._plain_head, self._is_cuda = plain_head, model.device.type == "cuda"
        self._sizes = [s for s in SIZES if s < num_slots] + [num_slots]
        self._graphs: dict[tuple[Any, ...], Callable[[], None]] = {}
        self._pool: Any = None
        most, device = self._sizes[-1], model.device
        self._plan = torch.zeros(4, most, dtype=torch.int64, device=device)
        """Token to feed, its position, where its slot begins, how many tokens came before it in the completion."""
        self._chance = torch.zeros(most, 1, device=device)
        self._bases = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._fed = torch.zeros(3, FED_SIZES[-1], dtype=torch.int64, device=device)
        self._marks = torch.zeros(4, max(most, 2) + 1, dtype=torch.int64, device=device)
        head = model.get_output_embeddings().weight
        self._read_logits = torch.zeros(most, head.shape[0], dtype=head.dtype, device=device)
        self._result = torch.zeros(2, most, dtype=torch.float64, device=device)
        """Tokens and their log-probabilities: one copy to the host a step."""

    def stream(self, sampling: Sampling, *, seed: int) -> SlotStream:
        """A fresh stream; what an earlier one still had under way is dropped."""
        self.forget()
        return SlotStream(self, sampling, seed=seed)

    def forget(self) -> None:
        """The weights have changed: nothing remembered is right any more."""
        self.slots.forget()

    def make_room(self, length: int, num_chances: int) -> None:
        """Hold rows of `length` tokens; captured steps refer to the old tensors, so new ones end their use."""
        renewed = self.slots.make_room(length)
        if renewed:
            attach_memory(self.model, self.slots.layers)
        if self._chance.shape[1] < num_chances:
            self._chance = torch.zeros(self._chance.shape[0], num_chances, device=self._chance.device)
            renewed = True
        if renewed:
            self._graphs.clear()

    def arrange(self, lanes: Sequence[_Writing], sampling: Sampling) -> Callable[[], None]:
        """Put these completions on lanes; what takes a step with them."""
        size = next(s for s in self._sizes if s >= len(lanes))
        self._place_idle(size)
        step = self._step(size, sampling)
        self._place_idle(size)
        rows = [
            (w.token_ids[-1], len(w.prompt) + len(w.token_ids) - 1, w.slot.number * self.slots.length, len(w.token_ids))
            for w in lanes
        ]
        plan = torch.tensor(rows, dtype=torch.int64).T
        self._plan[:, : len(lanes)] = plan.to(self._plan.device, non_blocking=True)
        self._bases[: len(lanes)] = self._plan[2, : len(lanes)].int()
        chance = torch.stack([w.chance for w in lanes])
        self._chance[: len(lanes), : chance.shape[1]] = chance.to(self._chance.device, non_blocking=True)
        return step

    def results(self, count: int) -> Callable[[], tuple[list[int], list[float]]]:
        """The last step's tokens and log-probabilities; reading them waits for that step, not for later ones."""
        if not self._is_cuda:
            copy = self._result[:, :count].clone()
            return lambda: _lists(copy)
        host = torch.empty(2, count, dtype=torch.float64, pin_memory=True)
        host.copy_(self._result[:, :count], non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()

        def read() -> tuple[list[int], list[float]]:
            done.synchronize()
            return _lists(host)

        return read

    @torch.no_grad()
    def first_tokens(self, writings: Sequence[_Writing], sampling: Sampling) -> tuple[list[int], list[float]]:
        """Read the prompts and sample the first token of each completion."""
        leaders: dict[tuple[int, ...], list[_Writing]] = {}
        for w in writings:
            leaders.setdefault((*w.prompt, -w.slot.number - 1) if w.num_held else tuple(w.prompt), []).append(w)
        logits = {}
        first = [group[0] for group in leaders.values()]
        for w in first:
            while len(w.prompt) - w.num_held > FED_SIZES[-1]:  # too long to be read at once
                self._read([replace(w, prompt=w.prompt[: w.num_held + FED_SIZES[-1]])])
                w.num_held += FED_SIZES[-1]
        for batch in _batches(first):
            for w, row in zip(batch, self._read(batch), strict=True):
                logits[id(w)] = row
        for group in leaders.values():
            if len(group) > 1:
                numbers = [w.slot.number for w in group[1:]]
                self.slots.copy(group[0].slot.number, numbers, len(group[0].prompt))
        rows = torch.stack([logits[id(group[0])] for group in leaders.values() for _ in group])
        order = [w for group in leaders.values() for w in group]
        chance = torch.stack([w.chance[0] for w in order]).to(rows.device)
        tokens, scores = chosen(rows, chance, temperature=sampling.temperature, top_p=sampling.top_p)
        by_id = dict(zip(map(id, order), zip(tokens.tolist(), scores.tolist(), strict=True), strict=True))
        return [by_id[id(w)][0] for w in writings], [by_id[id(w)][1] for w in writings]

    def _read(self, batch: Sequence[_Writing]) -> Tensor:
        """Feed the rest of each prompt; [N, vocabulary] logits after it.

        Tokens and rows are filled up to fixed numbers, so that few shapes are ever seen. A token too many belongs to no
        row and leaves its key in the spare slot; a row too many has no token.
        """
        length = self.slots.length
        held = np.array([w.num_held for w in batch])
        counts = np.array([len(w.prompt) for w in batch]) - held
        bases = np.array([w.slot.number for w in batch]) * length
        starts = np.concatenate([[0], counts.cumsum()])
        num_fed = int(starts[-1])
        size = next(s for s in FED_SIZES if s >= num_fed)
        positions = np.arange(num_fed) + np.repeat(held - starts[:-1], counts)
        fed = np.zeros((3, size), np.int64)  # ids, positions, places
        fed[0, :num_fed] = list(chain.from_iterable(w.prompt[w.num_held :] for w in batch))
        fed[1, :num_fed] = positions
        fed[2] = self.slots.spare * length
        fed[2, :num_fed] = positions + np.repeat(bases, counts)
        marks = np.zeros((4, self._marks.shape[1]), np.int64)  # starts, bases, lengths, last tokens
        marks[0] = num_fed
        marks[0, : len(starts)] = starts
        marks[1, : len(batch)] = bases
        marks[2, : len(batch)] = held + counts
        marks[3, : len(batch)] = starts[1:] - 1
        self._fed[:, :size].copy_(torch.from_numpy(fed))
        self._marks.copy_(torch.from_numpy(marks))
        self._reading(size)()
        return self._read_logits[: len(batch)].clone()

    def _reading(self, size: int) -> Callable[[], None]:
        """What feeds the `size` tokens that have been put in place."""

        @torch.no_grad()
        def read() -> None:
            ids, positions, places = (x.clone() for x in self._fed[:, :size])
            starts, bases, lengths = (x.clone() for x in self._marks[:3].int())
            memory = Memory(bases, lengths[:-1].clone(), places, self.slots.length)
            rows = Rows(starts, self.slots.length + 1, memory)
            self._read_logits.copy_(self._logits(ids, positions, rows, self._marks[3, : self._read_logits.shape[0]]))

        return self._ready(("read", size), read)

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

    def _place_idle(self, size: int) -> None:
        """Every lane feeds token 0 into the spare slot."""
        self._plan.zero_()
        self._plan[2, :size] = self.slots.spare * self.slots.length
        self._bases[: size + 1] = self.slots.spare * self.slots.length

    def _step(self, size: int, sampling: Sampling) -> Callable[[], None]:
        """What feeds every lane its token and leaves the next one in its place."""

        @torch.no_grad()
        def step() -> None:
            tokens, positions, bases, written = self._plan[:, :size]
            # Copies, because a compiler looks through a view at what it is a view of.
            bases32, starts = self._bases[: size + 1].clone(), self._starts[: size + 1].clone()
            memory = Memory(bases32, (positions + 1).int(), bases + positions, self.slots.length)
            logits = self._logits(tokens.clone(), positions.clone(), Rows(starts, 2, memory))
            place = written.clamp(max=self._chance.shape[1] - 1)
            chance = self._chance[:size].gather(1, place[:, None]).squeeze(1)
            new, scores = chosen(logits, chance, temperature=sampling.temperature, top_p=sampling.top_p)
            self._result[:, :size] = torch.stack([new.double(), scores.double()])
            tokens.copy_(new)
            # A lane goes on after its completion has ended, until lanes are arranged anew: it must stay in its slot.
            positions.copy_((positions + 1).clamp(max=self.slots.length - 1))
            written.add_(1)

        return self._ready(("write", size, sampling.temperature, sampling.top_p), step)

    def _ready(self, name: tuple[Any, ...], work: Callable[[], None]) -> Callable[[], None]:
        """On a GPU the captured form of `work`, whose shapes `name` determines; elsewhere itself."""
        if not self._is_cuda:
            return work
        if name not in self._graphs:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles what is to be compiled, and warms the libraries up
                    work()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                work()
            self._pool = graph.pool()
            self._graphs[name] = graph.replay
        return self._graphs[name]


class SlotStream:
    """One stretch of generation at fixed settings; the n-th prompt of a key has random numbers of its own."""

    def __init__(self, decoder: SlotDecoder, sampling: Sampling, *, seed: int) -> None:
        self._decoder, self._sampling, self._seed = decoder, sampling, seed
        self._stops = StopStrings(decoder.tokenizer, sampling.stop)
        self._turns: dict[int, int] = {}
        self._waiting: deque[tuple[int, list[int]]] = deque()
        self._lanes: list[_Writing] = []
        self._take_step: Callable[[], None] | None = None
        self._unread: deque[Callable[[], tuple[list[int], list[float]]]] = deque()
        self._done: list[tuple[int, Completion]] = []

    def __len__(self) -> int:
        return len(self._waiting) + sum(not w.is_over for w in self._lanes) + len(self._done)

    def add(self, key: int, prompt: list[int]) -> None:
        """A conversation's next prompt. Its first tokens cost nothing where they are those of its last one."""
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        self._waiting.append((key, prompt))

    def finished(self) -> list[tuple[int, Completion]]:
        """Go on until a completion is done; all that are done, or nothing if none is under way."""
        while not self._done and len(self):
            living = sum(not w.is_over for w in self._lanes)
            # Reading a prompt holds up those who write, so prompts wait for company: a quarter of all under way.
            ready = min(len(self._waiting), self._decoder.slots.count - living)
            if ready and 3 * ready >= living:
                self._admit()
            elif living * 2 <= len(self._lanes) and len(self._lanes) > SIZES[0]:
                self._rearrange()
            if self._take_step is not None and not self._done:
                self._take_step()
                self._unread.append(self._decoder.results(len(self._lanes)))
                if len(self._unread) > AHEAD:
                    self._absorb()
        done, self._done = self._done, []
        return done

    def _admit(self) -> None:
        self._absorb_all()
        most = self._sampling.max_new_tokens
        self._decoder.make_room(max(len(prompt) for _, prompt in self._waiting) + most + 2, most)
        new: list[_Writing] = []
        while self._waiting:
            key, prompt = self._waiting[0]
            taken = self._decoder.slots.take(key, prompt)
            if taken is None:
                break
            self._waiting.popleft()
            new.append(_Writing(key, prompt, *taken))
        seeds = torch.tensor([self._next_seed(w.key) for w in new], dtype=torch.int64)
        for writing, chance in zip(new, uniforms(seeds, most), strict=True):
            writing.chance = chance
        for writing, token, score in zip(new, *self._decoder.first_tokens(new, self._sampling), strict=True):
            self._write(writing, token, score)
        self._lanes += new
        self._rearrange()

    def _rearrange(self) -> None:
        """Lanes for those who still write, and no others."""
        self._absorb_all()
        self._lanes = [w for w in self._lanes if not w.is_over]
        self._take_step = self._decoder.arrange(self._lanes, self._sampling) if self._lanes else None

    def _absorb_all(self) -> None:
        while self._unread:
            self._absorb()

    def _absorb(self) -> None:
        tokens, scores = self._unread.popleft()()
        for writing, token, score in zip(self._lanes, tokens, scores, strict=True):
            if not writing.is_over:
                self._write(writing, token, score)
        if all(w.is_over for w in self._lanes):
            self._unread.clear()
            self._lanes, self._take_step = [], None

    def _write(self, writing: _Writing, token: int, score: float) -> None:
        if not math.isfinite(score):
            raise NonFiniteLossError("the policy's scores are not finite: its weights have run away")
        writing.token_ids.append(token)
        writing.logprobs.append(score)
        has_ended = token in self._decoder.end_ids or self._stops.end(writing.token_ids)
        if has_ended or len(writing.token_ids) == self._sampling.max_new_tokens:
            writing.is_over = True
            # The last token was never fed: its keys and values are not there.
            self._decoder.slots.give_up(writing.slot, [*writing.prompt, *writing.token_ids[:-1]])
            self._done.append((writing.key, Completion(writing.token_ids, writing.logprobs, not has_ended)))

    def _next_seed(self, key: int) -> int:
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        digest = hashlib.blake2b(f"{self._seed}/{key}/{turn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


def _batches(writings: Sequence[_Writing]) -> list[list[_Writing]]:
    """Prompts in the order given, cut where the next would be too much to read at once."""
    out: list[list[_Writing]] = [[]]
    room = FED_SIZES[-1]
    for w in writings:
        new = len(w.prompt) - w.num_held
        if out[-1] and new > room:
            out.append([])
            room = FED_SIZES[-1]
        out[-1].append(w)
        room -= new
    return out


def _lists(result: Tensor) -> tuple[list[int], list[float]]:
    tokens, scores = result.tolist()
    return [int(token) for token in tokens], scores
