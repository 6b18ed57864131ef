"""Engines from outside: one that works, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.types import Metrics


class PlainEngine(HFEngine):
    """Trains with plain SGD instead of AdamW."""

    def reset_optimizer(self, learning_rate: float) -> None:
        import torch

        self._optimizer = torch.optim.SGD(self._masters.trained, lr=learning_rate)

    def update(self, terms: Sequence[Term]) -> Metrics:
        return super().update(terms) | {"policy/outside": 1.0}


def make(model: Any, tokenizer: Any, **settings: Any) -> PlainEngine:
    return PlainEngine(model, tokenizer, **settings)


def half(**settings: Any) -> object:
    """Only what a single training step needs."""

    class Half:
        pad_id = 0
        generate = update = sync = print

    return Half()


def leaves(**settings: Any) -> None:
    raise SystemExit(0)


def raises(**settings: Any) -> PlainEngine:
    raise RuntimeError("no such cluster")
