"""SPEAR: any base algorithm plus a fading tool bonus and growing self-imitation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import torch

from spear_rl.algorithms.base import AdvantageFn, Algorithm, Bonus, GroupRelative, SelfImitation, ToolBonus
from spear_rl.algorithms.wrapping import AlgorithmError, SettingError, field_names, label, with_settings
from spear_rl.functional.losses import CovarianceClip, LossFn, Schedule, as_schedule, cosine
from spear_rl.replay.buffer import ByEntropy, BySuccess, Remembered, ReplayBuffer, RewardHistory, Running
from spear_rl.replay.priorities import PRIORITIES
from spear_rl.settings.ranges import NonNegative, check_option, shown
from spear_rl.types import Trajectory

tool_bonus, distinct_tool_bonus, answered_tool_bonus = ToolBonus(), ToolBonus(distinct=True), ToolBonus(answered=True)


def with_covariance_clip(base: Algorithm, clip: CovarianceClip, *, seed: int = 0) -> Algorithm:
    """`base` with covariance clipping of its on-policy loss: not part of SPEAR, so that SPEAR's own effect shows."""
    return with_settings(base, covariance=clip, generator=torch.Generator().manual_seed(seed))


PAPER_BONUS = cosine(1.0, 0.0, 200)
PAPER_IMITATION = cosine(0.0, 1.0, 100)
DEFAULT_CLIP = CovarianceClip()
OURS: Mapping[str, Any] = MappingProxyType(
    {
        "bonus": BySuccess(1.0, 0.0),
        "bonus_of": answered_tool_bonus,
        "imitation": ByEntropy(2.0, 0.8),
        "fraction": 1.0,
        "max_age": 10,
        "baseline": "siblings",
        "keep_step_part": "auto",
    }
)
"""Keywords of `spear` that make it ours, by what won in declared comparisons (docs/results.md)."""


def spear(
    base: Algorithm,
    *,
    bonus: float | Schedule | None = PAPER_BONUS,
    bonus_of: Callable[[Trajectory], float] = tool_bonus,
    imitation: float | Schedule | None = PAPER_IMITATION,
    capacity: int = 2048,
    max_age: int = 5,
    history_size: int = 1024,
    covariance: CovarianceClip | None = DEFAULT_CLIP,
    replay_loss: LossFn | None = None,
    max_second_moment: float = 0.0,
    draw_when: Literal["every_step", "when_full"] = "every_step",
    priority: Sequence[str] = (),
    baseline: Literal["percentile", "siblings"] = "percentile",
    reweight: float | None = None,
    unit: Literal["episodes", "turns"] = "episodes",
    keep_step_part: bool | Literal["auto"] = False,
    baseline_per_family: bool = False,
    admit_by_score: bool = False,
    divide_by_std: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> Algorithm:
    """Wrap `base`; its advantages, any function, and its on-policy loss stay as they are.

    The keywords' defaults are the paper's method, but for what admit_by_score, skip_invalid and scale_by_rows say;
    `spear(base, **OURS)` is what `spear-` means in a name.

    Args:
        bonus, imitation: mu(t) and gamma(t), each a number, a schedule, or None for off. Both off is `base` itself.
            `BySuccess` and `ByEntropy` follow the run.
        capacity: what the buffer holds; with `when_full`, what is drawn at once (it may then hold twice as much).
        unit: what `capacity` counts: episodes, or turns that are replayed.
        covariance: of replayed tokens, for a loss with a field `covariance`; None for off.
        replay_loss: of replayed episodes, taken as it is; by default the on-policy loss with `covariance` and without
            its entropy bonus.
        max_second_moment: a replayed row with a larger mean squared ratio does not train; 0 is no bound.
        admit_by_score: store what beats its siblings by the base's own advantages, with bonus, format terms and
            the step part of GiGPO and the like in them, instead of by the task's reward alone.
        divide_by_std: divide A' by a typical std of recent groups; None does as the base's advantages do.
        priority: words of `replay.buffer.PRIORITIES`, whose product weighs the episodes of a draw; none is uniform.
        baseline, reweight: what A' is, see `SelfImitation`.
        keep_step_part: replay the step advantage of GiGPO and the like too, not the episode part only; auto does where
            the base has one.
        options: any other field of `SelfImitation`: fraction, gate, percentile, require_tool, ...
    """
    if bonus is not None:
        if base.bonus:
            raise SettingError("bonus", "the base has a bonus of its own: switch one of the two off")
        base = replace(base, bonus=Bonus(of=bonus_of, weight=_schedule("bonus", bonus, base.running)))
    if imitation is None:
        return base
    if base.imitation:
        raise AlgorithmError("spear: the base imitates itself already: wrap it once")
    words = (priority,) if isinstance(priority, str) else tuple(priority)
    if words and draw_when == "when_full":
        raise SettingError("priority", "when_full draws at random")
    if unknown := [word for word in words if word not in PRIORITIES]:
        raise SettingError("priority", f"there is no {unknown[0]!r}: it is some of {', '.join(PRIORITIES)}")
    if replay_loss and max_second_moment:
        raise SettingError("max_second_moment", "a replay_loss is taken as it is: give it the bound")
    if base.critic and options.get("join_lost"):
        raise SettingError("join_lost", "a critic judges each episode by itself, so a group has no baseline to change")
    memory: ReplayBuffer[Remembered] = ReplayBuffer(
        capacity=2 * capacity if draw_when == "when_full" else capacity, max_age=max_age
    )
    own_std = bool(getattr(base.advantages, "divide_by_std", False))
    return replace(
        base,
        imitation=SelfImitation(
            buffer=memory,
            history=RewardHistory(size=history_size),
            loss=replay_loss or _replay_loss(base.loss, covariance, max_second_moment),
            weight=_schedule("imitation", imitation, base.running),
            draw_when=draw_when,
            full_size=capacity,
            priority=words,
            baseline=baseline,
            reweight=reweight,
            unit=unit,
            divide_by_std=own_std if divide_by_std is None else divide_by_std,
            admission=None if admit_by_score else _episode_part(base),
            step_parts=_step_parts(base, keep_step_part),
            families={} if baseline_per_family else None,
            generator=torch.Generator().manual_seed(seed),
            **options,
        ),
    )


def _schedule(name: str, coefficient: float | Schedule, running: Running) -> Schedule:
    """A coefficient as a schedule; one that follows the run follows this one."""
    if not callable(coefficient):
        check_option(name, coefficient, Annotated[float, NonNegative])
    schedule = as_schedule(coefficient)
    return replace(schedule, running=running) if isinstance(schedule, BySuccess | ByEntropy) else schedule


def _replay_loss(loss: Any, covariance: CovarianceClip | None, max_second_moment: float) -> Any:
    """The on-policy loss without what belongs to on-policy rows only: its entropy bonus and covariance clipping."""
    known = field_names(loss)
    if covariance is not None and not isinstance(covariance, CovarianceClip):
        raise SettingError("covariance", f"pass CovarianceClip(...) or None, not {shown(covariance)}")
    clip = covariance if covariance and covariance.kind != "none" else None
    if clip and "covariance" not in known:
        raise SettingError(
            "covariance",
            f"clipping replayed tokens by it needs a loss with such a field, e.g. ClippedSurrogate(), and "
            f"{label(loss)} has none: switch it off, or pass spear a replay_loss",
        )
    if max_second_moment and "max_second_moment" not in known:
        raise SettingError("max_second_moment", f"{label(loss)} has no such field: pass spear a replay_loss with one")
    ours = {"entropy_bonus": 0.0, "covariance": clip, "max_second_moment": max_second_moment}
    own = {name: value for name, value in ours.items() if name in known}
    return replace(loss, **own) if own else loss


def _episode_part(base: Algorithm) -> AdvantageFn:
    """The base's advantages without a step part: a discounted return would tell apart wins that the task pays alike.

    Under a critic it is the siblings that decide, as for every other base: their rewards are what is compared.
    """
    if base.critic:
        return GroupRelative(divide_by_std=False)
    advantages: Any = base.advantages
    known, own = field_names(advantages), {"step_weight": 0.0}
    if "step_weight" not in known:
        return base.advantages
    if "episode_weight" in known:  # a base may learn from its step part alone
        own["episode_weight"] = advantages.episode_weight or 1.0
    return cast(AdvantageFn, replace(advantages, **own))


def _step_parts(base: Algorithm, keep: bool | Literal["auto"]) -> AdvantageFn | None:
    advantages: Any = base.advantages
    if keep and "episode_weight" in field_names(advantages):
        return cast(AdvantageFn, replace(advantages, episode_weight=0.0))
    if not keep or keep == "auto":
        return None
    raise SettingError("keep_step_part", "it needs a base with step advantages, e.g. gigpo, or dr_bot over gigpo")
