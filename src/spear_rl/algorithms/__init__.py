"""The algorithms by name (`settings.names` has the table), and the records and wrappers that they are made of."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from spear_rl.algorithms.base import Algorithm, Bonus, GroupRelative, SelfImitation, ToolBonus
from spear_rl.algorithms.critic import Critic, Estimate, Estimator
from spear_rl.algorithms.dr_bot import dr_bot
from spear_rl.algorithms.filters import FlatGroups, Overlong, Repetitive, Unreadable, Void
from spear_rl.algorithms.gigpo import Anchor, GiGPO, anchor_of, gigpo
from spear_rl.algorithms.grpo import dr_grpo, grpo, rloo
from spear_rl.algorithms.ppo import GAE, ppo
from spear_rl.algorithms.spear import (
    OURS,
    answered_tool_bonus,
    distinct_tool_bonus,
    spear,
    tool_bonus,
    with_covariance_clip,
)
from spear_rl.algorithms.step_credit import G2PO, HGPO, GraphGPO, g2po, graphgpo, hgpo
from spear_rl.algorithms.wrapping import SettingError, field_names, with_settings
from spear_rl.errors import ConfigError, UserError
from spear_rl.functional.losses import ClippedSurrogate, CovarianceClip, FixedLength, SequenceMean, TokenMean
from spear_rl.replay.buffer import ByEntropy, BySuccess
from spear_rl.settings.names import ALGORITHM_NAMES, loaded, split_name
from spear_rl.settings.names import BASES as _SOURCES

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def named(
    name: str,
    *,
    settings: Mapping[str, Any] = _NOTHING,
    anchor: Anchor | None = None,
    dr_bot_options: Mapping[str, Any] = _NOTHING,
    spear_options: Mapping[str, Any] = _NOTHING,
) -> Algorithm:
    """The algorithm of that name, ours or `package.module:function`, with dr-bot- and spear- before it as wrappers.

    Args:
        settings: fields of the base and of its advantages and loss, set after Dr.BoT has set its own.
        anchor: the field of that name of the advantages, where they compare states; others do not look at it.
        dr_bot_options, spear_options: keywords of the wrappers; not looked at where the name has no such wrapper. What
            is not among `spear_options` is as in `OURS`.
    """
    wrappers, base = split_name(name)
    algorithm = _base(base)
    if "dr-bot" in wrappers:
        algorithm = dr_bot(algorithm, **dr_bot_options)
    if anchor and "anchor" in field_names(algorithm.advantages):
        settings = {**settings, "anchor": anchor}
    algorithm = with_settings(algorithm, **settings)
    return spear(algorithm, **dict(OURS) | dict(spear_options)) if "spear" in wrappers else algorithm


def _base(name: str) -> Algorithm:
    make = loaded(_SOURCES.get(name, name), kind="algorithm", example="my_package.my_algorithm:make")
    try:
        made = make()
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: calling it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Algorithm):
        raise ConfigError(f"{name}: it returned {type(made).__name__}, not a spear_rl.algorithms.Algorithm")
    for part in ("advantages", "loss"):
        if not callable(getattr(made, part)):
            raise ConfigError(f"{name}: the {part} of its Algorithm cannot be called: pass a function or a record")
    if made.critic and not isinstance(made.advantages, Estimator):
        raise ConfigError(f"{name}: its Algorithm has a critic and advantages without a method estimate, as GAE has")
    return made


ALGORITHMS: dict[str, Callable[..., Algorithm]] = {name: partial(named, name) for name in ALGORITHM_NAMES}

BASES = {name: make for name, make in ALGORITHMS.items() if not name.startswith("spear-")}

__all__ = [
    "ALGORITHMS", "BASES", "G2PO", "GAE", "HGPO", "OURS", "Algorithm", "Bonus", "ByEntropy", "BySuccess",
    "ClippedSurrogate", "CovarianceClip", "Critic", "Estimate", "FixedLength", "FlatGroups", "GiGPO", "GraphGPO",
    "GroupRelative", "Overlong", "Repetitive", "SelfImitation", "SequenceMean", "SettingError", "TokenMean",
    "ToolBonus", "Unreadable", "Void", "anchor_of", "answered_tool_bonus", "distinct_tool_bonus", "dr_bot",
    "dr_grpo", "g2po", "gigpo", "graphgpo", "grpo", "hgpo", "named", "ppo", "rloo", "spear", "tool_bonus",
    "with_covariance_clip", "with_settings",
]  # fmt: skip
