"""Self-imitation: learn again from one's own episodes that still beat today's baseline."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any, Literal

import torch

from spear_rl.functional.advantages import recalibrate
from spear_rl.functional.inputs import LossFn
from spear_rl.functional.schedules import Schedule
from spear_rl.replay.buffer import ReplayBuffer, RewardHistory, Stored
from spear_rl.types import Completion, Group, Metrics, Stop, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class Remembered:
    """An episode as the buffer keeps it, one number or word a turn beside it."""

    trajectory: Trajectory
    """Without bonus or format terms: replay sees the task's reward only."""
    turn_advantages: list[float]
    """Those that decided on its admission."""
    dropped: list[str]
    """Why a turn is not replayed; what did not train when it was played is not."""
    step_parts: list[float]
    """GiGPO's step advantages, where they are kept; zeros otherwise."""
    family: str = ""

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
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfImitation:
    """A buffer, a baseline, and the loss its episodes are trained with."""

    buffer: ReplayBuffer[Remembered]
    history: RewardHistory
    loss: LossFn
    weight: Schedule
    fraction: float = 0.25
    """Episodes a draw, as a share of the episodes played this step (`every_step`)."""
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
    """Multiplies A' once for every step of age."""
    update: Literal["joint", "separate"] = "joint"
    """In the on-policy optimizer step, or in optimizer steps of its own after it."""
    scale_by_rows: bool = True
    """With fewer episodes than wanted the replay term weighs less in proportion; else one weighs as much as all."""
    step_parts: Callable[[Sequence[Group]], list[list[float]]] | None = None
    """Also keep these per-turn parts of the advantage (GiGPO's), and add them to A'."""
    families: dict[str, RewardHistory] | None = None
    """One baseline a kind of task instead of a global one; filled as kinds are met."""
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    """The random stream that the loss draws from: state, as buffer and history are."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Take the groups' mean rewards into the baseline: all groups, before any filter, the task's reward only."""
        for group in groups:
            if rewards := [t.reward for t in group.trajectories]:
                spread = [stdev(rewards)] if len(rewards) > 1 else []
                self._history(group.info.get("family", "")).add([fmean(rewards)], spread)

    def draw(self, step: int, rng: random.Random, *, num_played: int) -> Replay:
        """Stored episodes that pass the gate today, with one recalibrated advantage a turn."""
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
        return Replay(
            trajectories=[s.item.trajectory for s in drawn],
            turn_advantages=[[a + part for part in s.item.step_parts] for a, s in zip(today, drawn, strict=True)],
            dropped=list(chosen.values()),
            share=share if self.scale_by_rows else 1.0,
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
        played = [(t, group.info.get("family", "")) for group in groups for t in group.trajectories]
        reasons = dropped or [[""] * len(t.turns) for t, _ in played]
        if self.skip_invalid:
            unfit = [[_unfit(turn) for turn in t.turns] for t, _ in played]
            reasons = [[a or b for a, b in zip(*both, strict=True)] for both in zip(reasons, unfit, strict=True)]
        deciding = self.admission(groups) if self.admission else turn_advantages
        parts = self.step_parts(groups) if self.step_parts else [[0.0] * len(t.turns) for t, _ in played]
        remembered = [
            Remembered(t, list(a), list(why), list(part), family)
            for (t, family), a, why, part in zip(played, deciding, reasons, parts, strict=True)
            if not all(why) and (t.num_tool_turns or not self.require_tool)
        ]
        admitted = [r for r in remembered if self.gate == "new" or r.advantage > 0]
        size_of = (lambda r: r.dropped.count("")) if self.unit == "turns" else (lambda r: 1)
        self.buffer.add(((r, r.trajectory.reward) for r in admitted), step, size_of=size_of)

    def _advantages(self, stored: Sequence[Stored[Remembered]], baseline: float | None) -> list[float]:
        """A' of each episode; `baseline` is the one for all families. A family's window is sorted once, too."""
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
    """Plain lists, numbers and strings, so that a checkpoint loads without running code."""
    trajectory = item.trajectory
    turns = [
        {name: getattr(turn, name) for name in Turn.__slots__ if name != "completion"}
        | {"completion": {name: getattr(turn.completion, name) for name in Completion.__slots__}}
        for turn in trajectory.turns
    ]
    return {name: getattr(item, name) for name in Remembered.__slots__ if name != "trajectory"} | {
        "trajectory": {"turns": turns, "stop": str(trajectory.stop), "success": trajectory.success}
    }


def _from_dict(saved: dict[str, Any]) -> Remembered:
    trajectory = saved["trajectory"]
    turns = [Turn(**(turn | {"completion": Completion(**turn["completion"])})) for turn in trajectory["turns"]]
    restored = Trajectory(turns, Stop(trajectory["stop"]), success=trajectory["success"])
    return Remembered(**(saved | {"trajectory": restored}))
