"""KV-cache slots: one region of equal length per conversation, kept between its turns and reused when free."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.memory import kv_shape, rounded_slot


@dataclass
class Slot:
    """The KV cache of one conversation."""

    number: int
    tokens: list[int] = field(default_factory=list)
    """Tokens whose keys and values it holds."""
    key: int | None = None
    """The conversation that used it last."""
    is_busy: bool = False


class Slots:
    """`count` slots of `length` tokens in every layer's tensors, and a spare one for idle rows of a batch."""

    def __init__(self, model: Any, count: int, *, length: int = 512) -> None:
        self.count, self.length = count, rounded_slot(length)
        self.spare = count
        self._config, self._device = model.config.get_text_config(), model.device
        self._dtype = model.get_input_embeddings().weight.dtype
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._all = [Slot(number) for number in range(count)]
        self._by_key: dict[int, Slot] = {}

    def forget(self) -> None:
        """Free every slot: what they hold was computed with other weights."""
        for slot in self._all:
            slot.tokens, slot.key, slot.is_busy = [], None, False
        self._by_key.clear()

    def make_room(self, length: int) -> bool:
        """Grow slots to at least `length` tokens; True if the tensors are new, so that old references are stale."""
        if self.layers and length <= self.length:
            return False
        if self.layers:
            length = max(length, self.length * 3 // 2)
        old, self.length = self.length, rounded_slot(max(length, self.length))
        heads, width = kv_shape(self._config)
        shape = ((self.count + 1) * self.length, heads, width)
        previous, self.layers = self.layers, []
        for number in range(self._config.num_hidden_layers):
            keys, values = (torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in range(2))
            if previous:
                for new, before in zip((keys, values), previous[number], strict=True):
                    new.view(self.count + 1, self.length, heads, width)[:, :old] = before.view(-1, old, heads, width)
                previous[number] = (keys, values)  # frees the old tensors layer by layer
            self.layers.append((keys, values))
        return True

    def take(self, key: int, prompt: Sequence[int]) -> tuple[Slot, int] | None:
        """A slot for a conversation's next prompt and how many of its tokens it holds already; None if all are busy."""
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
        return slot, _common_prefix(slot.tokens, prompt[:-1])

    def release(self, slot: Slot, tokens: list[int]) -> None:
        """Free a slot; it holds `tokens` until another conversation takes it."""
        slot.tokens, slot.is_busy = tokens, False

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of a slot: the episodes of a group share a prompt, prefilled once."""
        index = torch.tensor(list(targets), device=self._device)
        for tensor in (t for pair in self.layers for t in pair):
            slots = tensor.view(self.count + 1, self.length, *tensor.shape[1:])
            slots[index, :length] = slots[source, :length]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two token lists, by bisection: comparing slices is much faster than a loop."""
    same, end = 0, min(len(a), len(b))
    while same < end:
        middle = (same + end + 1) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same
