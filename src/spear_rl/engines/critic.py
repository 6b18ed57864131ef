"""A critic: a copy of the policy's trunk with a linear head that says what an episode will still earn."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spear_rl.engines.base import Batch, NonFiniteLossError
from spear_rl.engines.memory import memory_guard
from spear_rl.engines.models import prepare
from spear_rl.engines.models.master_weights import MasterWeights, largest_entry
from spear_rl.engines.packed.attention import detach_cache
from spear_rl.errors import UserError
from spear_rl.functional.values import value_loss
from spear_rl.types import Metrics

if TYPE_CHECKING:
    from spear_rl.engines.hf import MicroBatch


class Critic:
    """Values of a policy's states, with an optimizer of its own; the policy's weights are copied once, at the start.

    The head starts at zero, so that all first values are 0. What of the policy is frozen, as under an adapter, is
    frozen here too.

    Args:
        policy: a transformers model whose `base_model` returns the last hidden state.
        cut: a batch in, its micro-batches out.
        advice: what to do where memory is short.
    """

    def __init__(
        self, policy: Any, cut: Callable[[Batch], Iterable[MicroBatch]], *, learning_rate: float, weight_decay: float,
        max_grad_norm: float, packed: bool, checkpointing: bool, advice: str,
    ) -> None:  # fmt: skip
        self._cut, self._checkpointing, self._max_grad_norm, self._advice = cut, checkpointing, max_grad_norm, advice
        with memory_guard("making a critic, a second model,", "take a smaller model, or an algorithm without a critic"):
            model = copy.deepcopy(policy)
            detach_cache(model)
            self._masters = MasterWeights(model.base_model, policy.get_input_embeddings().weight.dtype)
            prepare.prepare_layers(model, packed=packed, compiled=False, checkpointing=checkpointing)
            self._trunk = model.base_model
            width = policy.config.get_text_config().hidden_size
            self._head = torch.zeros(width + 1, device=policy.device, requires_grad=True)  # the last entry is the bias
        self._own = {"lr": learning_rate, "weight_decay": weight_decay}
        fused = policy.device.type == "cuda" or None
        self._optimizer = torch.optim.AdamW(self._trained, lr=learning_rate, weight_decay=weight_decay, fused=fused)

    @property
    def _trained(self) -> list[Tensor]:
        return [*self._masters.trained, self._head]

    def values(self, batch: Batch) -> Tensor:
        out = torch.zeros(batch.mask.shape, device=self._head.device)
        with torch.no_grad(), memory_guard("valuing rows", self._advice):
            for part in self._cut(batch):
                out[part.rows, : part.width] = self._values(part)
        return out

    def _values(self, part: MicroBatch) -> Tensor:
        states = getattr(self._trunk(**part.model_inputs, use_cache=False), "last_hidden_state", None)
        if states is None:
            raise UserError(
                f"engine.model: {type(self._trunk).__name__} gives no last hidden state for a critic to read"
            )
        hidden = states[part.predictors]
        zeros = torch.zeros((len(part.rows), part.width), device=hidden.device)
        return zeros.index_put(part.target_index, hidden.float() @ self._head[:-1] + self._head[-1])

    def update(self, batch: Batch, old_values: Tensor, returns: Tensor, *, clip: float | None) -> Metrics:
        if self._checkpointing:
            prepare.checkpoint_layers(self._trunk)
        self._optimizer.zero_grad(set_to_none=True)
        columns = [x.to(self._head.device) for x in (old_values, returns, batch.mask)]
        loss, silenced = 0.0, 0.0
        with memory_guard("learning values", self._advice):
            for part in self._cut(batch):
                old, wanted, mask = (x[part.rows, : part.width] for x in columns)
                found = value_loss(self._values(part), old, wanted, mask, clip=clip)
                share = float(mask.sum() / columns[2].sum())  # a token weighs the same, however the batch is cut
                torch.autograd.backward(share * found[0])
                loss, silenced = loss + share * float(found[0].detach()), silenced + share * float(found[1])
            norm = float(nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm))
            if not math.isfinite(norm):
                raise NonFiniteLossError(f"the norm of the critic's gradient is {norm}; its weights were not changed")
            self._optimizer.step()
            if self._masters.pairs:
                self._masters.write_back()
        return {"critic/value_loss": loss, "critic/value_clip_fraction": silenced, "critic/grad_norm": norm}

    def check(self, bound: float) -> None:
        """Raise NonFiniteLossError if a weight, or the optimizer's state, is not finite or too large."""
        try:
            self._masters.check(bound, self._optimizer)
        except NonFiniteLossError as error:
            raise NonFiniteLossError("the critic has diverged and was not saved") from error
        if not largest_entry([self._head]) <= bound:
            raise NonFiniteLossError("the critic has diverged and was not saved")

    def state_dict(self) -> dict[str, Any]:
        return {"weights": [x.detach() for x in self._trained], "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for mine, saved in zip(self._trained, state["weights"], strict=True):
                mine.copy_(saved)
        if self._masters.pairs:
            self._masters.write_back()
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.update(self._own)  # the present settings, not the saved ones
