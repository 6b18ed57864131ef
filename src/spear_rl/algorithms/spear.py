"""SPEAR: any base algorithm plus a fading tool bonus and growing self-imitation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from spear_rl.algorithms.base import Algorithm, Bonus
from spear_rl.algorithms.imitation import Remembered, SelfImitation
from spear_rl.functional.covariance import high_covariance_penalty, keep_low_covariance
from spear_rl.functional.inputs import LossFn
from spear_rl.functional.schedules import Schedule, as_schedule, cosine
from spear_rl.replay.buffer import ReplayBuffer, RewardHistory
from spear_rl.types import Group, Trajectory


def tool_bonus(trajectory: Trajectory) -> float:
    """A tenth a turn that used a tool, at most one; right and wrong answers alike."""
    return min(0.1 * trajectory.num_tool_turns, 1.0)


def distinct_tool_bonus(trajectory: Trajectory) -> float:
    """A tenth a *different* tool call, at most one: saying the same thing ten times pays once. Beyond the paper."""
    return min(0.1 * len({turn.text for turn in trajectory.turns if turn.used_tool}), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CovarianceClip:
    """Which tokens a loss holds back for pushing hardest towards certainty."""

    kind: Literal["clip", "kl", "none"] = "clip"
    fraction: float = 0.02
    low: float = 1.0
    high: float = 40.0
    beta: float = 1.0
    """Weight of KL-Cov's penalty."""

    def around(self, loss: Any, generator: torch.Generator) -> LossFn:
        """`loss`, which must take `clipped_surrogate`'s keywords, with this clip inside."""
        if self.kind == "none":
            return partial(loss)
        if self.kind == "kl":
            return partial(loss, penalty=partial(high_covariance_penalty, fraction=self.fraction, beta=self.beta))
        bounds = {k: v for k, v in getattr(loss, "keywords", {}).items() if k in ("clip_low", "clip_high")}
        options: dict[str, Any] = {"fraction": self.fraction, "low": self.low, "high": self.high, **bounds}
        return partial(loss, keep=partial(keep_low_covariance, generator=generator, **options))


def with_covariance_clip(base: Algorithm, clip: CovarianceClip, *, seed: int = 0) -> Algorithm:
    """`base` with covariance clipping of its on-policy loss: not part of SPEAR, so that SPEAR's own effect shows."""
    generator = torch.Generator().manual_seed(seed)
    return replace(base, loss=clip.around(base.loss, generator), generators=(*base.generators, generator))


PAPER_BONUS = cosine(1.0, 0.0, 200)
PAPER_IMITATION = cosine(0.0, 1.0, 100)
PAPER_CLIP = CovarianceClip()


def spear(
    base: Algorithm,
    *,
    bonus: float | Schedule | None = PAPER_BONUS,
    bonus_of: Callable[[Trajectory], float] = tool_bonus,
    imitation: float | Schedule | None = PAPER_IMITATION,
    capacity: int = 2048,
    max_age: int = 5,
    history_size: int = 10240,
    covariance: CovarianceClip = PAPER_CLIP,
    draw_when: Literal["every_step", "when_full"] = "every_step",
    keep_step_part: bool = False,
    baseline_per_family: bool = False,
    seed: int = 0,
    **options: Any,
) -> Algorithm:
    """Wrap `base`; its advantages and on-policy loss stay as they are.

    Args:
        bonus, imitation: mu(t) and gamma(t), each a number, a schedule, or None for off. Both off is `base` itself.
        capacity: episodes the buffer holds; with `when_full`, those drawn at once (it may then hold twice as many).
        keep_step_part: replay GiGPO's step advantage too, not the episode part only.
        options: any other field of `SelfImitation`: fraction, gate, percentile, reweight, require_tool, ...
    """
    if bonus is not None:
        base = replace(base, bonus=Bonus(of=bonus_of, weight=as_schedule(bonus)))
    if imitation is None:
        return base
    generator = torch.Generator().manual_seed(seed)
    memory: ReplayBuffer[Remembered] = ReplayBuffer(
        capacity=2 * capacity if draw_when == "when_full" else capacity, max_age=max_age
    )
    return replace(
        base,
        generators=(*base.generators, generator),
        imitation=SelfImitation(
            buffer=memory,
            history=RewardHistory(size=history_size),
            loss=covariance.around(_for_replay(base.loss), generator),
            weight=as_schedule(imitation),
            draw_when=draw_when,
            full_size=capacity,
            step_parts=_step_parts(base.advantages) if keep_step_part else None,
            families={} if baseline_per_family else None,
            **options,
        ),
    )


def _for_replay(loss: LossFn) -> LossFn:
    """The on-policy loss without what belongs to on-policy rows only: the entropy bonus and covariance clipping."""
    off = {"entropy_bonus": 0.0, "keep": None, "penalty": None}
    given: dict[str, Any] = getattr(loss, "keywords", {})
    return partial(loss, **{name: value for name, value in off.items() if given.get(name)})


def _step_parts(advantages: Callable[[Sequence[Group]], list[list[float]]]) -> Callable[..., list[list[float]]]:
    if isinstance(advantages, partial) and "step_weight" in advantages.keywords:
        return partial(advantages, episode_weight=0.0)
    raise ValueError("keep_step_part needs a base with step advantages: gigpo, or dr_bot over gigpo")
