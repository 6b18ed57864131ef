"""J = J_policy + gamma(t) J_replay in one optimizer step, each part reduced over its own rows by verl's own loss."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class JointLoss:
    """Called by verl's workers on every micro-batch; the notes in `spear` make it independent of how those were cut."""

    def __init__(self, policy: Callable[..., Any], replay: Callable[..., Any]) -> None:
        self._policy, self._replay = policy, replay

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        notes = data["spear"].to_padded_tensor(0) if data["spear"].is_nested else data["spear"]
        is_replay = notes[:, 0].bool()
        _, weight, policy_tokens, policy_rows, replay_tokens, replay_rows = notes[0].tolist()
        loss, metrics = torch.zeros((), device=notes.device), {}
        if policy_tokens or not replay_tokens:
            part = _part(data, ~is_replay, policy_tokens, policy_rows)
            loss, metrics = self._policy(model_output=model_output, data=part, dp_group=dp_group)
        if replay_tokens:
            part = _part(data, is_replay, replay_tokens, replay_rows)
            term, about = self._replay(model_output=model_output, data=part, dp_group=dp_group)
            loss = loss + weight * term
            metrics = metrics | {f"spear/replay/{name.removeprefix('actor/')}": value for name, value in about.items()}
        return loss, metrics


def _part(data: Any, rows: Tensor, num_tokens: float, num_rows: float) -> Any:
    """The micro-batch with only `rows` training, reduced over all rows of their kind in the mini-batch."""
    part, mask = data.copy(), data["spear_mask"]
    own = [row * trains for row, trains in zip(mask.unbind(), rows, strict=True)]
    part["response_mask"] = (
        torch.nested.as_nested_tensor(own, layout=torch.jagged) if mask.is_nested else torch.stack(own)
    )
    counts = {"batch_num_tokens": max(int(num_tokens), 1), "global_batch_size": max(int(num_rows), 1)}
    import_module("verl.utils.tensordict_utils").assign_non_tensor(part, **counts)
    return part
