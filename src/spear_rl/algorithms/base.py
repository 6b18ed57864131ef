"""What an algorithm is: a record of what the training step calls, in this order. No trainer, no engine.

Parts with settings are records too, so that an algorithm can be printed and compared, and wrappers change it by
`dataclasses.replace`. A plain function is as good a part, as long as nothing needs to change a setting of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from spear_rl.algorithms.imitation import SelfImitation
from spear_rl.errors import ConfigError
from spear_rl.functional.inputs import LossFn
from spear_rl.functional.schedules import Schedule
from spear_rl.types import Group, Trajectory

AdvantageFn = Callable[[Sequence[Group]], list[list[float]]]
"""Groups in; for every episode, in order, one advantage a turn out."""

Filter = Callable[[Sequence[Group]], list[list[str]]]
"""Groups in; for every episode, in order, one word a turn out: why it does not train, or "" if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bonus:
    """An intrinsic reward and how much of it counts at a step."""

    of: Callable[[Trajectory], float]
    weight: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Fields in the order the step uses them."""

    bonus: Bonus | None = None
    invalid_penalty: float = 0.1
    """Taken from a turn the environment could not act on."""
    format_bonus: float = 0.0
    """Given to an episode without any such turn (the paper's R_format)."""
    filters: tuple[Filter, ...] = ()
    """The first one with a reason decides why a turn does not train."""
    advantages: AdvantageFn
    loss: LossFn
    imitation: SelfImitation | None = None
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    """The random stream its on-policy loss draws from: state that a checkpoint holds, seeded by the run."""

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """All its random streams: on-policy, then replay."""
        streams = (self.generator, self.imitation.generator if self.imitation else None)
        return tuple(stream for stream in streams if stream is not None)

    def shaped(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The same groups with every turn's format term and every episode's bonus filled in."""
        weight = self.bonus.weight(step) if self.bonus else 0.0
        return [replace(g, trajectories=[self._shaped(t, weight) for t in g.trajectories]) for g in groups]

    def _shaped(self, trajectory: Trajectory, weight: float) -> Trajectory:
        bonus = weight * self.bonus.of(trajectory) if self.bonus else 0.0
        if self.format_bonus and not any(turn.invalid for turn in trajectory.turns):
            bonus += self.format_bonus
        turns = [replace(t, shaping=-self.invalid_penalty if t.invalid else 0.0) for t in trajectory.turns]
        return replace(trajectory, turns=turns, bonus=bonus)

    def dropped(self, groups: Sequence[Group]) -> list[list[str]]:
        """For every episode, in order, one word a turn: the first filter's reason, or "" where all let it train."""
        reasons = [[""] * len(t.turns) for group in groups for t in group.trajectories]
        for reasons_of in self.filters:
            for kept, found in zip(reasons, reasons_of(groups), strict=True):
                kept[:] = [old or new for old, new in zip(kept, found, strict=True)]
        return reasons

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while training: what a checkpoint must hold of an algorithm."""
        return {
            "imitation": self.imitation.state_dict() if self.imitation else None,
            "generators": [generator.get_state() for generator in self.generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.imitation and state["imitation"]:
            self.imitation.load_state_dict(state["imitation"])
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)


class AlgorithmError(ConfigError, ValueError):
    """A wrapper that does not go with its base."""


class SettingError(AlgorithmError):
    """A setting that an algorithm has no place for."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name, self.sentence = name, sentence


def field_names(part: Any) -> set[str]:
    """The fields of a record; a plain function has none."""
    return {f.name for f in fields(part)} if is_dataclass(part) and not isinstance(part, type) else set()


def label(part: Any) -> str:
    """A record's kind, or where a function is: package.module:function."""
    if is_dataclass(part) or not hasattr(part, "__qualname__"):
        return type(part).__name__
    return f"{part.__module__}:{part.__qualname__}"


def changed(base: Algorithm, part: str, wrapper: str, instead: str, **values: Any) -> Any:
    """A part of `base` with other settings, or one sentence why `wrapper` cannot wrap it."""
    old = getattr(base, part)
    if missing := [name for name in values if name not in field_names(old)]:
        raise AlgorithmError(
            f"{wrapper} sets {', '.join(missing)} of the {part}, which {label(old)} does not have: "
            f"pass a record with such fields, e.g. {instead}"
        )
    return replace(old, **values)


def with_settings(base: Algorithm, **settings: Any) -> Algorithm:
    """`base` with each setting written into the record that has a field of that name: itself, advantages or loss."""
    for name, value in settings.items():
        owner = next(
            (p for p in ("", "advantages", "loss") if name in field_names(getattr(base, p) if p else base)), None
        )
        if owner is None:
            parts = f"neither its advantages ({label(base.advantages)}) nor its loss ({label(base.loss)})"
            raise SettingError(name, f"{parts} can be set so")
        try:
            base = replace(
                base, **({owner: replace(getattr(base, owner), **{name: value})} if owner else {name: value})
            )
        except ValueError as error:
            raise SettingError(name, str(error)) from error
    return base
