"""Engines: what generates, scores and trains. Importing this imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_rl.engines.base import TrainableEngine


def _hf(**settings: Any) -> TrainableEngine:
    from spear_rl.engines.hf import HFEngine

    return HFEngine(**settings)


ENGINES: dict[str, Callable[..., TrainableEngine]] = {"hf": _hf}
"""`engine.name` -> what makes the engine, with the keyword arguments of `HFEngine`, also for a user's own."""
