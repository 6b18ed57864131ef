"""The named algorithms. A new one is a new file and a new line here."""

from __future__ import annotations

from collections.abc import Callable

from spear_rl.algorithms.base import Algorithm, Bonus
from spear_rl.algorithms.dr_bot import dr_bot
from spear_rl.algorithms.gigpo import gigpo
from spear_rl.algorithms.grpo import dr_grpo, grpo, rloo
from spear_rl.algorithms.imitation import SelfImitation
from spear_rl.algorithms.spear import CovarianceClip, distinct_tool_bonus, spear, tool_bonus, with_covariance_clip

BASES: dict[str, Callable[[], Algorithm]] = {
    "grpo": grpo,
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "gigpo": gigpo,
    "dr-bot-grpo": lambda: dr_bot(grpo()),
    "dr-bot-gigpo": lambda: dr_bot(gigpo()),
}

ALGORITHMS: dict[str, Callable[[], Algorithm]] = BASES | {
    "spear-grpo": lambda: spear(grpo()),
    "spear-dr-grpo": lambda: spear(dr_grpo()),
    "spear-rloo": lambda: spear(rloo()),
    "spear-gigpo": lambda: spear(gigpo()),
    "spear-dr-bot-grpo": lambda: spear(dr_bot(grpo())),
    "spear-dr-bot-gigpo": lambda: spear(dr_bot(gigpo())),
}

__all__ = [
    "ALGORITHMS",
    "BASES",
    "Algorithm",
    "Bonus",
    "CovarianceClip",
    "SelfImitation",
    "distinct_tool_bonus",
    "dr_bot",
    "dr_grpo",
    "gigpo",
    "grpo",
    "rloo",
    "spear",
    "tool_bonus",
    "with_covariance_clip",
]
