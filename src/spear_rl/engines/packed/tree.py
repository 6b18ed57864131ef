"""Which blocks of packed tokens attend to which, where rows share prefixes: what the tree kernels read.

Shared rows lie as a tree in preorder, so a token is on the path of those after it up to an end of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

TREE_WIDTHS = (16, 32, 64, 128)
"""Widths of a head that the kernels take."""

BLOCK, SPAN = 64, 16
"""Tokens per block of the tree kernels, and the most blocks of queries that one program reads for a block of keys."""


@dataclass(frozen=True)
class Blocks:
    """Which blocks of keys are seen by which blocks of queries; token i sees token j where j <= i < ends[j]."""

    ends: Tensor
    """[T] int32."""
    starts: Tensor
    """[blocks + 1] int32: the queries of block n see those of keys[starts[n]] to keys[starts[n + 1]]."""
    keys: Tensor
    """int32, blocks of keys."""
    spans: Tensor
    """[W, 3] int32: a block of keys, and from where to where blocks of queries see it."""

    @classmethod
    def of(cls, ends: np.ndarray[Any, Any], device: torch.device) -> Blocks:
        """Of tokens that are on the paths of those before `ends`."""
        count = -(-len(ends) // BLOCK)
        last = np.pad(ends, (0, count * BLOCK - len(ends))).reshape(count, BLOCK).max(1)
        block = np.arange(count)
        is_seen = (block[None, :] <= block[:, None]) & (last[None, :] > block[:, None] * BLOCK)
        starts = np.concatenate([[0], is_seen.sum(1).cumsum()])
        until = -(-last // BLOCK)
        pieces = -(-(until - block) // SPAN)
        owner = np.repeat(block, pieces)
        begin = owner + SPAN * (np.arange(len(owner)) - np.repeat(pieces.cumsum() - pieces, pieces))
        spans = np.stack([owner, begin, np.minimum(begin + SPAN, until[owner])], 1)
        # An entry more, which nothing reads, and an empty span: torch.compile specialises on a length of 1.
        keys, spans = np.append(np.nonzero(is_seen)[1], 0), np.append(spans, [[0, 0, 0]], 0)
        tensors = (ends, starts, keys, spans)
        return cls(*(torch.from_numpy(x.astype(np.int32)).to(device, non_blocking=True) for x in tensors))
