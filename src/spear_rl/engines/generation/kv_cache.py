"""A key-value cache that writes new tokens into spare room instead of copying everything for every token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

SPARE = 64
"""Columns allocated beyond those in use."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """`keys` and `values` are views of the used columns of larger buffers."""

    keys: Tensor
    values: Tensor
    _room: list[Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used, new = self.get_seq_length(), key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < used + new:
            self._room = [_widened(self.keys, key_states, used), _widened(self.values, value_states, used)]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., used : used + new, :] = states
        self.keys, self.values = (room[..., : used + new, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None


def roomy_cache(config: Any) -> DynamicCache:
    """transformers' dynamic cache for a model, with roomy layers where it would have plain ones."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _widened(old: Tensor, states: Tensor, used: int) -> Tensor:
    batch, heads, new, width = states.shape
    buffer = torch.empty(batch, heads, used + new + SPARE, width, dtype=states.dtype, device=states.device)
    if used:
        buffer[..., :used, :] = old
    return buffer
