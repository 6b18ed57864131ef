"""The core's terms as verl's rows, and their joint loss, computed by verl's own loss. Imports no verl."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spear_rl.algorithms import ClippedSurrogate
from spear_rl.engines.base import Term
from spear_rl.functional import LossInputs
from spear_rl.functional.losses import log_ratio, row_second_moments
from spear_rl.integrations.shared.episodes import fields_of
from spear_rl.train.step import mean_metrics
from spear_rl.types import Metrics


def rows_of(terms: Sequence[Term], *, size: int) -> list[dict[str, Tensor]]:
    """The rows of one optimizer step, filled up to `size` with copies of the shortest one that train nothing.

    A row's field `spear` is for `joint_loss`: 1 if it is replayed, then (weight, tokens, rows) of policy and of replay.
    """
    sizes = {term.name: (term.weight, float(term.batch.mask.sum()), float(len(term.batch))) for term in terms}
    both = [number for name in ("policy", "replay") for number in sizes.get(name, (0.0, 0.0, 0.0))]
    fields = {name: torch.tensor([float(name == "replay"), *both], dtype=torch.float64) for name in sizes}
    rows = [row | {"spear": fields[term.name]} for term in terms for row in fields_of(term.batch)]
    shortest = min(rows, key=lambda row: len(row["input_ids"]))
    untrained = {name: torch.zeros_like(shortest[name]) for name in ("response_mask", "loss_mask")}
    return rows + [shortest | untrained] * (size - len(rows))


def joint_loss(
    model_output: Any, data: Any, dp_group: Any = None, *, losses: Sequence[Callable[..., Any]]
) -> tuple[Tensor, dict[str, Any]]:
    """J_policy + gamma(t) J_replay of a micro-batch, each divided by the step's tokens or rows of its kind; metrics."""
    fields = data["spear"].to_padded_tensor(0) if data["spear"].is_nested else data["spear"]
    mask = data.select("response_mask").to_padded_tensor()["response_mask"]
    total, metrics = torch.zeros((), device=fields.device), dict[str, Any]()
    for number, (weight, num_tokens, num_rows) in enumerate(fields[0, 1:].view(-1, 3).tolist()):
        if num_tokens:
            part = data.copy()
            part["response_mask"] = mask * (fields[:, :1] == number)
            part.set_non_tensor("batch_num_tokens", int(num_tokens))
            part.set_non_tensor("global_batch_size", int(num_rows))
            loss, found = losses[number](model_output=model_output, data=part, dp_group=dp_group)
            total, share = total + weight * loss, float(part["response_mask"].sum()) * data["dp_size"] / num_tokens
            for name, x in found.items():
                if getattr(getattr(x, "aggregation", None), "value", None) == "mean":
                    x = type(x)("sum", x.aggregate() * share)
                metrics[name.replace("actor/", "spear/replay/") if number else name] = x
    return total, metrics


def is_clipped(term: Term) -> bool:
    """Whether the current log-probabilities decide which of the term's tokens train."""
    return isinstance(term.loss, ClippedSurrogate) and bool(term.loss.keep or term.loss.max_second_moment)


def covariance_clipped(term: Term, logprobs: Tensor, beside: LossInputs | None = None) -> tuple[Term, Metrics]:
    """The term with an advantage of 0 on the tokens that covariance clipping drops, and on rows that are too stale.

    An advantage of 0 is the same as a weight of 0, and the token still counts in the reduction. `logprobs` are the
    current policy's, [B, T] as the batch; `beside` are other rows of the same optimizer step.
    """
    batch, mask, loss = term.batch, term.batch.mask, term.loss
    assert isinstance(loss, ClippedSurrogate)
    own = LossInputs(logprobs, batch.old_logprobs, batch.advantages, mask, generator=term.generator, beside=beside)
    ratio = log_ratio(own).exp()[mask]
    metrics, advantages = {"ratio": float(ratio.mean())}, batch.advantages
    if loss.keep:
        kept = loss.keep(own)
        metrics["covariance_clip_fraction"], advantages = float((1 - kept)[mask].mean()), advantages * kept
    if loss.max_second_moment:
        stale = row_second_moments(own) > loss.max_second_moment
        metrics |= {"second_moment": float(ratio.square().mean()), "held_back": float(stale.float().mean())}
        advantages = torch.where(stale[:, None], 0.0, advantages)
    return replace(term, batch=replace(batch, advantages=advantages)), metrics


def with_clipped_replay(
    updates: Sequence[Sequence[Term]], scores: Callable[[Sequence[Term]], Sequence[Tensor]]
) -> tuple[list[list[Term]], Metrics]:
    """A step's updates with covariance clipping and the bound on stale rows applied to replay.

    `scores` returns each term's log-probabilities by the current policy; it is called once for all terms that need it.
    On-policy rows have theirs as old ones: the same policy wrote them.
    """
    replayed = [(term, own) for own in updates for term in own if term.name == "replay" and is_clipped(term)]
    scored = scores([term for term, _ in replayed]) if replayed else []
    clipped = {
        id(term): covariance_clipped(term, now, _on_policy(own))
        for (term, own), now in zip(replayed, scored, strict=True)
    }
    metrics = mean_metrics([found for _, found in clipped.values()])
    return [[clipped[id(term)][0] if id(term) in clipped else term for term in terms] for terms in updates], metrics


def _on_policy(terms: Sequence[Term]) -> LossInputs | None:
    """An update's on-policy rows, for means over the joint mini-batch."""
    batch = next((term.batch for term in terms if term.name == "policy"), None)
    if batch is None:
        return None
    return LossInputs(batch.old_logprobs, batch.old_logprobs, batch.advantages, batch.mask)
