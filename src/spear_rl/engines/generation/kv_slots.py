"""The key-value memory of many conversations at once: fixed stretches, taken, kept between turns, and given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

GRAIN = 128
"""A stretch is a multiple of this many tokens."""


@dataclass
class Slot:
    """One stretch."""

    number: int
    tokens: list[int] = field(default_factory=list)
    """What its keys and values were made from."""
    key: int | None = None
    """The conversation that had it last."""
    is_busy: bool = False


class Slots:
    """`count` stretches of the same length in every layer's tensors, and one more that absorbs what nobody reads."""

    def __init__(self, model: Any, count: int, *, length: int = 512) -> None:
        self.count, self.length = count, _rounded(length)
        self._config, self._device = model.config.get_text_config(), model.device
        self._dtype = model.get_input_embeddings().weight.dtype
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._all = [Slot(number) for number in range(count)]
        self._by_key: dict[int, Slot] = {}

    @property
    def spare(self) -> int:
        """The stretch for lanes that are not in use."""
        return self.count

    @property
    def num_bytes(self) -> int:
        """What the memory takes at its present length."""
        return slot_bytes(self._config, self._dtype) * (self.count + 1) * self.length

    def forget(self) -> None:
        """What is stored was made with other weights."""
        for slot in self._all:
            slot.tokens, slot.key, slot.is_busy = [], None, False
        self._by_key.clear()

    def make_room(self, length: int) -> bool:
        """Have stretches of at least `length` tokens; True if the tensors are new, and references to old ones void."""
        if self.layers and length <= self.length:
            return False
        if self.layers:
            length = max(length, self.length * 3 // 2)
        old, self.length = self.length, _rounded(max(length, self.length))
        heads, width = kv_shape(self._config)
        shape = ((self.count + 1) * self.length, heads, width)
        had, self.layers = self.layers, []
        for number in range(self._config.num_hidden_layers):
            keys, values = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
            if had:
                for new, before in zip((keys, values), had[number], strict=True):
                    new.view(self.count + 1, self.length, heads, width)[:, :old] = before.view(-1, old, heads, width)
                had[number] = (keys, values)  # lets go of the old tensors one layer at a time
            self.layers.append((keys, values))
        return True

    def take(self, key: int, prompt: Sequence[int]) -> tuple[Slot, int] | None:
        """A slot for a conversation's next prompt and how much of the prompt it holds already; None if all are busy."""
        slot = self._by_key.get(key)
        if slot is None or slot.is_busy:
            idle = [s for s in self._all if not s.is_busy]
            if not idle:
                return None
            slot = next((s for s in idle if s.key is None), idle[0])
            if slot.key is not None:
                del self._by_key[slot.key]
            slot.key, slot.tokens = key, []
            self._by_key[key] = slot
        slot.is_busy = True
        return slot, _common(slot.tokens, prompt[:-1])

    def give_up(self, slot: Slot, tokens: list[int]) -> None:
        """The slot is free again, and holds `tokens` until somebody else needs it."""
        slot.tokens, slot.is_busy = tokens, False

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Siblings start from one and the same prompt: read it once, copy the result."""
        index = torch.tensor(list(targets), device=self._device)
        for pair in self.layers:
            for tensor in pair:
                stretches = tensor.view(self.count + 1, self.length, *tensor.shape[1:])
                stretches[index, :length] = stretches[source, :length]


def kv_shape(config: Any) -> tuple[int, int]:
    """(key-value heads, their width) of a text config."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, width


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values a token takes in all layers together."""
    heads, width = kv_shape(config)
    return int(2 * config.num_hidden_layers * heads * width * dtype.itemsize)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
