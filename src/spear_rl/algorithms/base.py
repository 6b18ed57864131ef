"""What an algorithm is: a record of what the training step calls, in this order; and self-imitation, its last field.

Parts with settings are records too, so that an algorithm can be printed and compared, and wrappers change it by
`dataclasses.replace`. A plain function is as good a part, as long as nothing needs to change a setting of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any, Literal

import torch

from spear_rl.algorithms.critic import Critic
from spear_rl.functional.advantages import group_relative, leave_one_out, recalibrate
from spear_rl.functional.losses import LossFn, Schedule
from spear_rl.replay.buffer import ReplayBuffer, RewardHistory, Stored
from spear_rl.types import Completion, Group, Metrics, Stop, Trajectory, Turn

METRICS = {
    "replay/buffer_size": "Episodes in the buffer before the draw, none older than algorithm.imitation.max_age steps.",
    "replay/eligible": "Stored episodes that pass algorithm.imitation.gate today, so that they can be drawn.",
    "replay/weight": "gamma(t), the weight of the replay term in this step.",
    "replay/baseline": "The percentile of recent groups' mean rewards that a stored episode has to beat.",
    "replay/fired": "1 if stored episodes trained in this step, else 0.",
    "replay/trajectories": "Stored episodes that were drawn in this step.",
    "replay/eligible_turns": "Turns of the eligible episodes that can be replayed (algorithm.imitation.unit=turns).",
    "replay/turns": "Turns that were drawn in this step (algorithm.imitation.unit=turns).",
    "replay/age": "Mean number of steps since the drawn episodes were played.",
    "replay/advantage": "Mean A' of the drawn episodes: recalibrated against today's baseline, decayed by age.",
    "replay/group_success": "Mean success of the drawn episodes' own groups when they were played.",
    "replay/reward": "Mean reward of the drawn episodes, by the task alone.",
}
"""What `SelfImitation.draw` reports."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """An episode as the buffer stores it; the lists have one entry per turn."""

    trajectory: Trajectory
    """Without bonus or format terms: replay sees the task's reward only."""
    turn_advantages: list[float]
    """The advantages that decided its admission."""
    dropped: list[str]
    """Why a turn is not replayed, "" if it is. A turn that did not train on-policy is not replayed either."""
    step_parts: list[float]
    """Step advantages, where they are kept; zeros otherwise."""
    family: str = ""
    task: str = ""
    number: int = -1
    """Its place among the episodes of its step, which is its line in a dump of that step; -1 is unknown."""
    group_success: float = -1.0
    """Success of its group when it was played; -1 is unknown."""

    @property
    def advantage(self) -> float:
        return fmean(self.turn_advantages) if self.turn_advantages else 0.0


@dataclass(frozen=True, slots=True)
class Replay:
    """What one draw gives the training step."""

    trajectories: list[Trajectory] = field(default_factory=list)
    turn_advantages: list[list[float]] = field(default_factory=list)
    dropped: list[list[str]] = field(default_factory=list)
    share: float = 1.0
    """Episodes drawn over episodes wanted."""
    drawn: list[tuple[Stored[Remembered], float]] = field(default_factory=list)
    """The same episodes as they are stored, each with its A'."""
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfImitation:
    """A buffer, a baseline, and the loss its episodes are trained with."""

    buffer: ReplayBuffer[Remembered]
    history: RewardHistory
    loss: LossFn
    weight: Schedule
    fraction: float = 0.25
    """Episodes per draw, as a fraction of the episodes played this step (`every_step`)."""
    draw_when: Literal["every_step", "when_full"] = "every_step"
    full_size: int = 0
    """`when_full`: draw this many at random once more than 1.5 times as many qualify, then empty the buffer."""
    unit: Literal["episodes", "turns"] = "episodes"
    """What `full_size` and the buffer's capacity count."""
    gate: Literal["both", "old", "new"] = "both"
    """Which advantage must be positive: at admission (old), against today's baseline (new), or both."""
    percentile: float = 50.0
    divide_by_std: bool = False
    """Divide A' by a typical std of recent groups, so that it is in the units of a base that divides by its group's."""
    reweight: float | None = None
    """Instead of recalibrating: A' = reweight * A."""
    admission: Callable[[Sequence[Group]], list[list[float]]] | None = None
    """Advantages by the task's reward alone: an episode is admitted where theirs is positive. None: by those given."""
    skip_invalid: bool = True
    """Turns that the environment could not act on, or that hit their token limit, are not replayed."""
    require_tool: bool = False
    """Only episodes that used a tool are admitted."""
    age_decay: float = 1.0
    """A' is multiplied by this once per step of age."""
    update: Literal["joint", "separate"] = "joint"
    """In the on-policy optimizer step, or in optimizer steps of its own after it."""
    scale_by_rows: bool = True
    """Weigh the replay term by episodes drawn over episodes wanted; if off, one episode weighs as much as all."""
    step_parts: Callable[[Sequence[Group]], list[list[float]]] | None = None
    """Also keep these per-turn parts of the advantage, and add them to A'."""
    families: dict[str, RewardHistory] | None = None
    """One baseline per task family instead of a global one; a family is added when it is first played."""
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    """The random stream of the loss: part of the state, like buffer and history."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Add the groups' mean rewards to the history: all groups, before any filter, the task's reward only."""
        for group in groups:
            if rewards := [t.reward for t in group.trajectories]:
                spread = [stdev(rewards)] if len(rewards) > 1 else []
                self._history(group.info.get("family", "")).add([fmean(rewards)], spread)

    def draw(self, step: int, rng: random.Random, *, num_played: int) -> Replay:
        """Stored episodes that pass the gate today, with one recalibrated advantage per turn."""
        self.buffer.drop_stale(step)
        stored = list(self.buffer.items)
        baseline = self.history.percentile(self.percentile) if len(self.history) else None
        advantages = None if self.gate == "old" else self._advantages(stored, baseline)
        eligible = [n for n in range(len(stored)) if advantages is None or advantages[n] > 0]
        metrics: Metrics = {
            "replay/buffer_size": float(len(stored)),
            "replay/eligible": float(len(eligible)),
            "replay/weight": self.weight(step),
        }
        if baseline is not None:
            metrics["replay/baseline"] = baseline
        chosen, share = self._chosen(stored, eligible, rng, num_played) if self.weight(step) > 0 else ({}, 1.0)
        drawn = [stored[n] for n in chosen]
        metrics |= {"replay/fired": float(bool(drawn)), "replay/trajectories": float(len(drawn))}
        if self.unit == "turns":
            metrics["replay/eligible_turns"] = float(sum(stored[n].item.dropped.count("") for n in eligible))
            metrics["replay/turns"] = float(sum(why.count("") for why in chosen.values()))
        if not drawn:
            return Replay(metrics=metrics)
        if self.draw_when == "when_full":
            self.buffer.clear()
        today = self._advantages(drawn, baseline) if advantages is None else [advantages[n] for n in chosen]
        today = [a * self.age_decay ** (step - s.step) for a, s in zip(today, drawn, strict=True)]
        metrics |= {
            "replay/age": fmean(step - s.step for s in drawn),
            "replay/advantage": fmean(today),
            "replay/reward": fmean(s.reward for s in drawn),
        }
        if known := [s.item.group_success for s in drawn if s.item.group_success >= 0]:
            metrics["replay/group_success"] = fmean(known)
        return Replay(
            trajectories=[s.item.trajectory for s in drawn],
            turn_advantages=[[a + part for part in s.item.step_parts] for a, s in zip(today, drawn, strict=True)],
            dropped=list(chosen.values()),
            share=share if self.scale_by_rows else 1.0,
            drawn=list(zip(drawn, today, strict=True)),
            metrics=metrics,
        )

    def _chosen(
        self, stored: Sequence[Stored[Remembered]], eligible: Sequence[int], rng: random.Random, num_played: int
    ) -> tuple[dict[int, list[str]], float]:
        """Places of the episodes drawn, each with why a turn of it is not replayed; and drawn over wanted."""
        if self.draw_when == "every_step":
            wanted = round(self.fraction * num_played)
            places = rng.sample(eligible, min(wanted, len(eligible)))
            return {n: stored[n].item.dropped for n in places}, len(places) / max(wanted, 1)
        units = [(n, m) for n in eligible for m, why in enumerate(stored[n].item.dropped) if not why]
        if self.unit == "episodes":
            units = [(n, 0) for n in eligible]
        drawn = dict.fromkeys(rng.sample(units, self.full_size) if len(units) > 1.5 * self.full_size else ())
        chosen = {n: stored[n].item.dropped for n, _ in drawn}
        if self.unit == "turns":
            for n, reasons in chosen.items():
                chosen[n] = [why or ("" if (n, m) in drawn else "not_drawn") for m, why in enumerate(reasons)]
        return chosen, 1.0

    def keep(
        self,
        groups: Sequence[Group],
        turn_advantages: Sequence[Sequence[float]],
        step: int,
        *,
        dropped: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Store the episodes worth imitating: better than their siblings by the task's reward, and trainable at all."""
        groups = [replace(g, trajectories=list(map(_task_reward_only, g.trajectories))) for g in groups]
        played = [(t, group) for group in groups for t in group.trajectories]
        reasons = dropped or [[""] * len(t.turns) for t, _ in played]
        if self.skip_invalid:
            unfit = [[_unfit(turn) for turn in t.turns] for t, _ in played]
            reasons = [[a or b for a, b in zip(*both, strict=True)] for both in zip(reasons, unfit, strict=True)]
        deciding = self.admission(groups) if self.admission else turn_advantages
        parts = self.step_parts(groups) if self.step_parts else [[0.0] * len(t.turns) for t, _ in played]
        remembered = [
            Remembered(
                t, list(a), list(why), list(part), group.info.get("family", ""), group.task_id, number, group.success
            )
            for number, ((t, group), a, why, part) in enumerate(zip(played, deciding, reasons, parts, strict=True))
            if not all(why) and (t.num_tool_turns or not self.require_tool)
        ]
        admitted = [r for r in remembered if self.gate == "new" or r.advantage > 0]
        size_of = (lambda r: r.dropped.count("")) if self.unit == "turns" else (lambda r: 1)
        self.buffer.add(((r, r.trajectory.reward) for r in admitted), step, size_of=size_of)

    def _advantages(self, stored: Sequence[Stored[Remembered]], baseline: float | None) -> list[float]:
        """A' of each episode; `baseline` is the global one. Each window is sorted once per draw."""
        if self.reweight is not None:
            return [self.reweight * s.item.advantage for s in stored]
        whose = ["" if self.families is None else s.item.family for s in stored]
        windows = {family: self._history(family) for family in whose}
        if self.families is None and baseline is not None:
            baselines = {"": baseline}
        else:
            baselines = {family: window.percentile(self.percentile) for family, window in windows.items()}
        double = partial(torch.tensor, dtype=torch.float64)
        rewards, beaten, std = double([s.reward for s in stored]), double([baselines[f] for f in whose]), None
        if self.divide_by_std:  # without any spread yet no group has an advantage, and there is no unit to be in
            stds = {family: window.typical_std or 1.0 for family, window in windows.items()}
            std = double([stds[f] for f in whose])
        return recalibrate(rewards, beaten, std).tolist()

    def _history(self, family: str) -> RewardHistory:
        if self.families is None:
            return self.history
        return self.families.setdefault(family, RewardHistory(self.history.size))

    def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": {"items": [(_as_dict(s.item), s.reward, s.step, s.size) for s in self.buffer.items]},
            "history": self.history.state_dict(),
            "families": {name: h.state_dict() for name, h in (self.families or {}).items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict({"items": [(_from_dict(d), *rest) for d, *rest in state["buffer"]["items"]]})
        self.history.load_state_dict(state["history"])
        if self.families is not None:
            self.families.clear()
            for name, saved in state["families"].items():
                self._history(name).load_state_dict(saved)


def _task_reward_only(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, bonus=0.0, turns=[replace(turn, shaping=0.0) for turn in trajectory.turns])


def _unfit(turn: Turn) -> str:
    """Why a turn is not worth imitating even where its episode is."""
    return "invalid" if turn.invalid else "overlong" if turn.completion.truncated else ""


def _as_dict(item: Remembered) -> dict[str, Any]:
    """Plain lists, numbers and strings: a checkpoint loads without running code."""
    trajectory = item.trajectory
    turns = [
        {name: getattr(turn, name) for name in Turn.__slots__ if name != "completion"}
        | {"completion": {name: getattr(turn.completion, name) for name in Completion.__slots__}}
        for turn in trajectory.turns
    ]
    return {name: getattr(item, name) for name in Remembered.__slots__ if name != "trajectory"} | {
        "trajectory": {name: getattr(trajectory, name) for name in ("success", "last_observation")}
        | {"turns": turns, "stop": str(trajectory.stop)}
    }


def _from_dict(saved: dict[str, Any]) -> Remembered:
    trajectory = saved["trajectory"]
    turns = [Turn(**(turn | {"completion": Completion(**turn["completion"])})) for turn in trajectory["turns"]]
    restored = Trajectory(**(trajectory | {"turns": turns, "stop": Stop(trajectory["stop"])}))
    return Remembered(**(saved | {"trajectory": restored}))


AdvantageFn = Callable[[Sequence[Group]], list[list[float]]]
"""Groups in; for every episode, in order, one advantage per turn out."""

Filter = Callable[[Sequence[Group]], list[list[str]]]
"""Groups in; for every episode, in order, one reason per turn out: why it does not train, or "" if it does."""


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
    critic: Critic | None = None
    """None: the advantages are a function of the groups alone, and the engine needs no critic."""
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
        """For every episode, in order, one reason per turn: that of the first filter that drops it, or ""."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """An episode's score relative to its group; all its turns get the same advantage."""

    divide_by_std: bool = True
    """GRPO; without it, Dr. GRPO."""
    leave_one_out: bool = False
    """RLOO: the baseline of an episode is the mean of its siblings, itself left out."""

    def __post_init__(self) -> None:
        if self.divide_by_std and self.leave_one_out:
            raise ValueError("leave_one_out has no division by the standard deviation: set divide_by_std to false")

    def __call__(self, groups: Sequence[Group]) -> list[list[float]]:
        episodes = [(i, t) for i, group in enumerate(groups) for t in group.trajectories]
        scores = torch.tensor([t.score for _, t in episodes], dtype=torch.float64)
        labels = torch.tensor([i for i, _ in episodes])
        if self.leave_one_out:
            advantages = leave_one_out(scores, labels).tolist()
        else:
            advantages = group_relative(scores, labels, divide_by_std=self.divide_by_std).tolist()
        return [[a] * len(t.turns) for a, (_, t) in zip(advantages, episodes, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolBonus:
    """0.1 per turn that used a tool, at most 1, whatever the answer is."""

    per_turn: float = 0.1
    most: float = 1.0
    distinct: bool = False
    """Pay once per distinct tool call. Not in the paper."""

    def __call__(self, trajectory: Trajectory) -> float:
        calls = [turn.text for turn in trajectory.turns if turn.used_tool]
        return self.paid(len(set(calls) if self.distinct else calls))

    def paid(self, count: int) -> float:
        """The bonus for `count` tool turns."""
        return min(self.per_turn * count, self.most)
