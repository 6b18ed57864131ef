"""How a model's layers run: their attention, compiled or not, and with activations kept or computed again."""

from __future__ import annotations

from typing import Any

from spear_rl.engines.packed.attention import use_packed_attention
from spear_rl.errors import UserError


def prepare_layers(model: Any, *, packed: bool, compiled: bool, checkpointing: bool) -> None:
    """Attention, compilation and checkpointing of a model's layers."""
    if packed:
        use_packed_attention(model)
    if checkpointing:
        if not model.supports_gradient_checkpointing:
            raise UserError(f"engine.checkpointing: {type(model).__name__} cannot do it; leave it out")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        kinds = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in kinds:
                # The layers are alike, so the first one's code serves all; sizes are symbols, so no size compiles anew.
                module.compile(dynamic=True)


def checkpoint_layers(model: Any) -> None:
    """transformers checkpoints in training mode only. Nothing else may be in it: no dropout, no noise in a router."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(module, name, 0.0)
