"""Losses that a framework computes itself: which ones it can express, and covariance clipping without its help."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from spear_rl.algorithms import ClippedSurrogate
from spear_rl.algorithms.base import label
from spear_rl.engines.base import Term
from spear_rl.errors import ConfigError
from spear_rl.functional import LossInputs
from spear_rl.train.step import mean_metrics
from spear_rl.types import Metrics


def require_surrogate(loss: Any, reductions: Mapping[Any, str], *, setting: str, framework: str) -> ClippedSurrogate:
    """The loss, if it is a ClippedSurrogate with one of the framework's reductions."""
    if isinstance(loss, ClippedSurrogate) and type(loss.reduction) in reductions:
        return loss
    known = ", ".join(kind.__name__ for kind in reductions)
    raise ConfigError(f"{setting}: {framework} needs a ClippedSurrogate reduced by {known}, not {label(loss)}")


def keep_function(term: Term) -> Callable[[LossInputs], Tensor] | None:
    """The term's covariance clipping: [B, T] weights, 0 on clipped tokens; None without it."""
    return term.loss.keep if isinstance(term.loss, ClippedSurrogate) else None


def covariance_clipped(term: Term, logprobs: Tensor) -> tuple[Term, Metrics]:
    """The term with an advantage of 0 on the tokens that covariance clipping drops.

    An advantage of 0 is the same as a weight of 0, and the token still counts in the reduction. `logprobs` are the
    current policy's, [B, T] as the batch.
    """
    batch, mask, keep = term.batch, term.batch.mask, keep_function(term)
    assert keep is not None
    kept = keep(LossInputs(logprobs, batch.old_logprobs, batch.advantages, mask, generator=term.generator))
    ratio = (logprobs - batch.old_logprobs)[mask].exp()
    metrics = {"covariance_clip_fraction": float((1 - kept)[mask].mean()), "ratio": float(ratio.mean())}
    return replace(term, batch=replace(batch, advantages=batch.advantages * kept)), metrics


def with_clipped_replay(
    updates: Sequence[Sequence[Term]], scores: Callable[[Sequence[Term]], Sequence[Tensor]]
) -> tuple[list[list[Term]], Metrics]:
    """A step's updates with covariance clipping applied to replay.

    `scores` returns each term's log-probabilities by the current policy; it is called once for all terms that need it.
    """
    replayed = [term for terms in updates for term in terms if term.name == "replay" and keep_function(term)]
    scored = scores(replayed) if replayed else []
    clipped = {id(term): covariance_clipped(term, now) for term, now in zip(replayed, scored, strict=True)}
    metrics = mean_metrics([found for _, found in clipped.values()])
    return [[clipped[id(term)][0] if id(term) in clipped else term for term in terms] for terms in updates], metrics
