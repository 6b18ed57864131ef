"""Terms of the objective for frameworks whose loss knows rows and advantages only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from spear_rl.algorithms import ClippedSurrogate
from spear_rl.engines.base import Term
from spear_rl.functional import LossInputs
from spear_rl.train.step import mean_metrics
from spear_rl.types import Metrics


def keeps(term: Term) -> Any:
    """The weights that the term's loss gives to tokens by their covariance, or None where it has none."""
    return term.loss.keep if isinstance(term.loss, ClippedSurrogate) else None


def held_back(term: Term, logprobs: Tensor) -> tuple[Term, Metrics]:
    """The term with an advantage of 0 on the tokens that its loss holds back, so that a loss without weights will do.

    An advantage of 0 is the same as a weight of 0, and such a token still counts in the reduction. `logprobs` are the
    current policy's, [B, T] as the batch.
    """
    batch, mask = term.batch, term.batch.mask
    kept = keeps(term)(LossInputs(logprobs, batch.old_logprobs, batch.advantages, mask, generator=term.generator))
    ratio = (logprobs - batch.old_logprobs)[mask].exp()
    metrics = {"covariance_clip_fraction": float((1 - kept)[mask].mean()), "ratio": float(ratio.mean())}
    return replace(term, batch=replace(batch, advantages=batch.advantages * kept)), metrics


def clipped(
    updates: Sequence[Sequence[Term]], scores: Callable[[Sequence[Term]], Sequence[Tensor]]
) -> tuple[list[list[Term]], Metrics]:
    """A step's updates with the covariance clipping of replay done.

    `scores` gives each term's log-probabilities by the current policy; it is asked once for all terms that need them.
    """
    replayed = [term for own in updates for term in own if term.name == "replay" and keeps(term)]
    scored = scores(replayed) if replayed else []
    held = {id(term): held_back(term, now) for term, now in zip(replayed, scored, strict=True)}
    metrics = mean_metrics([found for _, found in held.values()])
    return [[held[id(term)][0] if id(term) in held else term for term in own] for own in updates], metrics
