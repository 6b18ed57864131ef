"""Core batches as verl's rows, and their loss: verl's own, part by part. Imports no verl."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spear_rl.engines.base import Batch, Term


def fields_of(batch: Batch) -> list[dict[str, Tensor]]:
    """Rows as verl's workers read them; the prompt is what comes before the first token that trains."""
    out = []
    for number, mask in enumerate(batch.mask):
        size, start = int(batch.attention[number].sum()), int(mask.int().argmax())
        ids, trains = batch.input_ids[number, :size], mask[start:size].long()
        row = {"input_ids": ids, "position_ids": torch.arange(size), "prompts": ids[:start], "responses": ids[start:]}
        row |= {"response_mask": trains, "loss_mask": trains, "old_log_probs": batch.old_logprobs[number, start:size]}
        out.append(row | {"advantages": batch.advantages[number, start:size]})
    return out


def rows_of(terms: Sequence[Term], *, size: int) -> list[dict[str, Tensor]]:
    """One optimizer step in `size` rows; the shortest one fills up, training nothing.

    A row's `spear` is for `joint_loss`: is it replayed; then weight, tokens and rows of the policy, and of replay.
    """
    about = {term.name: (term.weight, float(term.batch.mask.sum()), float(len(term.batch))) for term in terms}
    note = [number for name in ("policy", "replay") for number in about.get(name, (0.0, 0.0, 0.0))]
    notes = {name: torch.tensor([float(name == "replay"), *note], dtype=torch.float64) for name in about}
    rows = [row | {"spear": notes[term.name]} for term in terms for row in fields_of(term.batch)]
    shortest = min(rows, key=lambda row: len(row["input_ids"]))
    idle = {name: torch.zeros_like(shortest[name]) for name in ("response_mask", "loss_mask")}
    return rows + [shortest | idle] * (size - len(rows))


def joint_loss(
    model_output: Any, data: Any, dp_group: Any = None, *, losses: Sequence[Callable[..., Any]]
) -> tuple[Tensor, dict[str, Any]]:
    """J_policy + gamma(t) J_replay of a micro-batch, and metrics: its share of what a step's rows of a kind have."""
    notes = data["spear"].to_padded_tensor(0) if data["spear"].is_nested else data["spear"]
    mask = data.select("response_mask").to_padded_tensor()["response_mask"]
    total, metrics = torch.zeros((), device=notes.device), dict[str, Any]()
    for number, (weight, num_tokens, num_rows) in enumerate(notes[0, 1:].view(-1, 3).tolist()):
        if num_tokens:
            part = data.copy()
            part["response_mask"] = mask * (notes[:, :1] == number)
            part.set_non_tensor("batch_num_tokens", int(num_tokens))
            part.set_non_tensor("global_batch_size", int(num_rows))
            loss, found = losses[number](model_output=model_output, data=part, dp_group=dp_group)
            total, share = total + weight * loss, float(part["response_mask"].sum()) * data["dp_size"] / num_tokens
            for name, x in found.items():
                if getattr(getattr(x, "aggregation", None), "value", None) == "mean":
                    x = type(x)("sum", x.aggregate() * share)
                metrics[name.replace("actor/", "spear/replay/") if number else name] = x
    return total, metrics
