"""The layout of packed rows in a forward pass: end to end, and a prefix that several rows share only once.

The turns of an episode are rows whose prompts extend each other, and a group's episodes begin alike. Sorted, every row
owns what it does not share with the row before it; its queries attend to its whole path, most of which earlier rows
own. So the model runs over distinct tokens.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spear_rl.engines.packed.attention import Rows
from spear_rl.engines.packed.tree import TREE_WIDTHS, Blocks

LEAST_SAVED = 0.1
"""Of all tokens; where sharing saves less, rows are laid out separately, for flash attention."""


def can_share(model: Any) -> bool:
    """Whether packed rows of the model may share prefixes: on a GPU that needs our kernels."""
    if model.device.type != "cuda":
        return True
    config = model.config.get_text_config()
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width in TREE_WIDTHS and find_spec("triton") is not None


def row_order(input_ids: Tensor, lengths: Tensor, *, share: bool) -> tuple[Tensor, Tensor]:
    """([B] rows in the order to lay them out, [B] leading tokens each shares with the one before it)."""
    if share and len(lengths) > 1:
        ids = input_ids.numpy().astype(">u4")  # as bytes these sort as the numbers do
        keys = [ids[row, :length].tobytes() for row, length in enumerate(lengths.tolist())]
        order = torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))
        ids, sizes = ids[order.numpy()], lengths[order]
        differs = ids[1:] != ids[:-1]
        common = torch.from_numpy(np.where(differs.any(1), differs.argmax(1), differs.shape[1]))
        common = torch.minimum(common, torch.minimum(sizes[1:], sizes[:-1]))
        if int(common.sum()) >= LEAST_SAVED * int(lengths.sum()):
            return order, torch.cat([common.new_zeros(1), common])
    return lengths.argsort(stable=True), torch.zeros_like(lengths)


def packed_cuts(lengths: Tensor, shared: Tensor, max_tokens: int) -> list[int]:
    """Where micro-batches of at most `max_tokens` distinct tokens begin, of rows that share as `row_order` says."""
    cuts, fed = [0], 0
    for place, (length, common) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        fed += length - common
        if place > cuts[-1] and fed > max_tokens:
            cuts.append(place)
            fed = length
    return cuts


def packed_inputs(
    input_ids: Tensor, lengths: Tensor, shared: Tensor, device: torch.device
) -> tuple[dict[str, Any], Tensor]:
    """(The model's inputs, [N, T] where each token lies) of padded rows; prefixes of `shared` tokens are left out.

    [[5 6 .] [5 6 7] [5 8 .]] of which 0, 2 and 1 are shared becomes 5 6 7 8 at positions 0 1 2 1; the rows lie at
    [0 1 .], [0 1 2] and [0 3 .]. What the first row is said to share is ignored.
    """
    shared = shared.clone()
    shared[0] = 0
    counts, columns = lengths - shared, torch.arange(input_ids.shape[1], dtype=torch.int32)
    places = (counts.cumsum(0) - counts - shared).int()[:, None] + columns
    # Slices rather than masks, for speed: a batch may have a million tokens and a hundred thousand distinct ones.
    spans = list(enumerate(zip(shared.tolist(), lengths.tolist(), strict=True)))
    ids, line, grid = input_ids.numpy(), columns.numpy(), places.numpy()
    for row, (begin, _) in spans:
        grid[row, :begin] = grid[row - 1, :begin]
    fed = np.concatenate([ids[row, begin:end] for row, (begin, end) in spans])
    depth = np.concatenate([line[begin:end] for _, (begin, end) in spans])
    fed_ids, positions = torch.from_numpy(np.stack([fed, depth.astype(fed.dtype)])).to(device, non_blocking=True)
    blocks = Blocks.of(_path_ends(grid, counts, spans), device) if shared.any() else None
    own = counts[counts > 0].tolist()  # a row that occurs twice has no tokens of its own
    rows = replace(Rows.of(own, device), blocks=blocks)
    return {"input_ids": fed_ids[None], "position_ids": positions[None], "rows": rows}, places


def _path_ends(
    places: np.ndarray[Any, Any], counts: Tensor, spans: list[tuple[int, tuple[int, int]]]
) -> np.ndarray[Any, Any]:
    """[T] where the rows with each token on their path end: where the first row begins that does not share it."""
    begins = (counts.cumsum(0) - counts).tolist()
    ends = np.full(int(counts.sum()), int(counts.sum()))
    for (_, (_, length)), (row, (shared, _)) in pairwise(spans):
        ends[places[row - 1, shared:length]] = begins[row]
    return ends
