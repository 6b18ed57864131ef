"""What an engine is: it generates, scores and learns. Nothing here knows an algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from spear_rl.functional.losses import LossFn
from spear_rl.types import Completion, Metrics


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right, every tensor [B, T]; column t always describes token t."""

    input_ids: Tensor
    attention: Tensor
    """True on real tokens."""
    mask: Tensor
    """True on the tokens the policy wrote and that train."""
    old_logprobs: Tensor
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def rows(self, index: Tensor) -> Batch:
        """The rows at `index`, in that order."""
        return Batch(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class ImageBatch(Batch):
    """Rows with pictures in them, for a vision-language model."""

    images: tuple[tuple[bytes, ...], ...]
    """Those of each row as PNG files, in the order of their placeholder tokens."""

    def rows(self, index: Tensor) -> ImageBatch:
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(Batch)}
        return ImageBatch(**tensors, images=tuple(self.images[row] for row in index.tolist()))


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the objective."""

    name: str
    batch: Batch
    loss: LossFn
    weight: float = 1.0
    generator: torch.Generator | None = None
    """The random stream that the loss draws from (`LossInputs.generator`)."""
    rows_wanted: int = 0
    """Rows it was meant to have in all; with fewer, a mini-batch's term weighs less (`train.step.minibatches`)."""


class NonFiniteLossError(RuntimeError):
    """The loss, its gradient or the policy's own scores are not numbers any more."""


class Engine(Protocol):
    """The policy, wherever it lives."""

    pad_id: int

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]: ...
    def update(self, terms: Sequence[Term]) -> Metrics:
        """Accumulate the gradient of every term, then take one optimizer step."""
        ...

    def sync(self) -> None:
        """Make `generate` use the weights `update` left behind."""
        ...
