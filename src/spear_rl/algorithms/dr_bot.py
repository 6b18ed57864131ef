"""Dr.BoT: the known tricks of agentic RL as one wrapper over a base algorithm."""

from dataclasses import replace

from spear_rl.algorithms.base import Algorithm, Filter
from spear_rl.algorithms.filters import FlatGroups, Overlong, Repetitive, Unreadable, Void
from spear_rl.algorithms.wrapping import AlgorithmError, changed
from spear_rl.functional.losses import FixedLength


def dr_bot(
    base: Algorithm,
    *,
    max_length: int = 1024,
    keep_groups: float = 0.75,
    overlong: bool = True,
    void: bool = True,
    repetitive: bool = True,
    unreadable: bool = True,
    flat_groups: bool = True,
) -> Algorithm:
    """Wrap `base`: clip-higher with dual clip, no std, no length bias, and filters that drop what cannot teach.

    Its advantages must have the field `divide_by_std`, its loss those of `ClippedSurrogate` that are set here.

    Args:
        max_length: the constant that replaces a row's length in the reduction: the most tokens a row may train.
        keep_groups: the share of groups, those with the largest spread, that trains.
        overlong, void, repetitive, unreadable, flat_groups: whether each filter is on.
    """
    if base.imitation:
        raise AlgorithmError("dr_bot goes inside, or replay would keep the loss from before: spear(dr_bot(base))")
    clips = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    reduction = FixedLength(max_length)
    filters: dict[Filter, bool] = {
        Overlong(): overlong,
        Void(): void,
        Repetitive(): repetitive,
        Unreadable(): unreadable,
        FlatGroups(keep=keep_groups): flat_groups,
    }
    return replace(
        base,
        advantages=changed(base, "advantages", "dr_bot", "GroupRelative() or GiGPO()", divide_by_std=False),
        loss=changed(base, "loss", "dr_bot", "ClippedSurrogate()", **clips, kl=0.0, reduction=reduction),
        filters=(*base.filters, *(drops for drops, is_on in filters.items() if is_on)),
    )
