"""What an algorithm is: a record of what the training step calls, in this order; and self-imitation, its last field.

Parts with settings are records too, so that an algorithm can be printed and compared, and wrappers change it by
`dataclasses.replace`. A plain function is as good a part, as long as nothing needs to change a setting of it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, Literal, cast

import torch

from spear_rl.algorithms.critic import Critic
from spear_rl.functional.advantages import group_relative, leave_one_out, recalibrate
from spear_rl.functional.losses import LossFn, Schedule
from spear_rl.replay import buffer
from spear_rl.replay.buffer import Outcome, Outcomes, Remembered, Replay, ReplayBuffer, RewardHistory, Running, Stored
from spear_rl.replay.plain import as_dict, from_dict
from spear_rl.replay.priorities import priorities, weight_metrics, weighted_sample
from spear_rl.settings.ranges import NonNegative, Range, Share, check_fields
from spear_rl.types import Group, Metrics, Trajectory

METRICS = {
    "rollout/bonus_weight": "mu(t), the weight of the tool bonus in this step.",
    "rollout/running_success": "Running mean of rollout/success, a fifth of it from the latest step.",
    "policy/entropy_weight": "Weight of the entropy bonus that holds up algorithm.entropy_floor, in this step.",
}
"""What `Algorithm.observed` reports."""


AdvantageFn = Callable[[Sequence[Group]], list[list[float]]]
"""Groups in; for every episode, in order, one advantage per turn out."""

Filter = Callable[[Sequence[Group]], list[list[str]]]
"""Groups in; for every episode, in order, one reason per turn out: why it does not train, or "" if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfImitation:
    """A buffer, a baseline, and the loss its episodes are trained with."""

    buffer: ReplayBuffer[Remembered]
    history: RewardHistory
    loss: LossFn
    weight: Schedule
    fraction: Annotated[float, NonNegative] = 0.25
    """Episodes per draw, as a fraction of the episodes played this step (`every_step`)."""
    draw_when: Literal["every_step", "when_full"] = "every_step"
    full_size: int = 0
    """`when_full`: draw this many at random once more than 1.5 times as many qualify, then empty the buffer."""
    unit: Literal["episodes", "turns"] = "episodes"
    """What `full_size` and the buffer's capacity count."""
    gate: Literal["both", "old", "new"] = "both"
    """Which advantage must be positive: at admission (old), against the current baseline (new), or both."""
    baseline: Literal["percentile", "siblings"] = "percentile"
    """What A' = R - b compares with: a percentile of recent group means; or the mean of its own group when it was
    played, or of its family (of all, without `families`) in the last `max_age` steps if that is higher."""
    percentile: Annotated[float, Range(0, 100)] = 50.0
    priority: tuple[str, ...] = ()
    """Words of `replay.priorities` whose product is an episode's weight in a draw; none is uniform."""
    divide_by_std: bool = False
    """Divide A' by a typical std of recent groups, so that it is in the units of a base that divides by its group's;
    with siblings by its own group's."""
    reweight: Annotated[float, NonNegative] | None = None
    """Instead of recalibrating: A' = reweight * A."""
    admission: AdvantageFn | None = None
    """Advantages by the task's reward alone: an episode is admitted where theirs is positive. None: by those given."""
    skip_invalid: bool = True
    """Turns that the environment could not act on, or that hit their token limit, are not replayed."""
    require_tool: bool = False
    """Only episodes that used a tool are admitted."""
    age_decay: Annotated[float, Share] = 1.0
    """A' is multiplied by this once per step of age."""
    update: Literal["joint", "separate"] = "joint"
    """In the on-policy optimizer step, or in optimizer steps of its own after it."""
    scale_by_rows: bool = True
    """Weigh the replay term by episodes drawn over episodes wanted; if off, one episode weighs as much as all."""
    step_parts: AdvantageFn | None = None
    """Also keep these per-turn parts of the advantage, and add them to A'."""
    join_lost: bool = False
    """The training step adds a stored win of the same task to a group that lost, before advantages are computed."""
    families: dict[str, RewardHistory] | None = None
    """One baseline per task family instead of a global one; a family is added when it is first played."""
    outcomes: Outcomes = field(default_factory=Outcomes, repr=False)
    """Results of the groups of the last `max_age` steps."""
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    """The random stream of the loss: part of the state, like buffer and history."""

    def __post_init__(self) -> None:
        check_fields(self)

    def observe(self, groups: Sequence[Group], step: int = 0) -> None:
        """Take in what was played at `step`: all groups from the start, before any filter, the task's reward only."""
        outcomes = []
        for group in groups:
            if (played := group.trajectories) and not group.has_given_turns:
                mean, std, _ = buffer.compared(group)
                family, totals = group.info.get("family", ""), (len(played), sum(t.success for t in played))
                self._history(family).add([mean], [std])
                outcomes.append(Outcome(step, group.task_id, family, *totals, sum(t.reward for t in played)))
        self.outcomes.add(outcomes, oldest=step - self.buffer.max_age)

    def draw(self, step: int, rng: random.Random, *, num_played: int) -> Replay:
        """Stored episodes that pass the gate at this step, with one recalibrated advantage per turn."""
        self.buffer.drop_stale(step)
        stored = list(self.buffer.items)
        beaten = self._beaten(stored) if self.reweight is None else []
        advantages = self._advantages(stored, beaten)
        eligible = [n for n, a in enumerate(advantages) if a > 0 or self.gate == "old"]
        metrics: Metrics = {
            "replay/buffer_size": float(len(stored)),
            "replay/eligible": float(len(eligible)),
            "replay/weight": self.weight(step),
        }
        metrics |= {"replay/baseline": fmean(beaten)} if beaten else {}
        weights = list[float]()
        if self.priority:
            weights = priorities(self.priority, [stored[n] for n in eligible], self.outcomes, step)
            metrics |= weight_metrics(weights)
        chosen, share = self._chosen(stored, eligible, weights, rng, num_played) if self.weight(step) > 0 else ({}, 1.0)
        drawn = [stored[n] for n in chosen]
        metrics |= {"replay/fired": float(bool(drawn)), "replay/trajectories": float(len(drawn))}
        if self.unit == "turns":
            metrics["replay/eligible_turns"] = float(sum(stored[n].item.dropped.count("") for n in eligible))
            metrics["replay/turns"] = float(sum(why.count("") for why in chosen.values()))
        if not drawn:
            return Replay(metrics=metrics)
        if self.draw_when == "when_full":
            self.buffer.clear()
        current = [advantages[n] * self.age_decay ** (step - stored[n].step) for n in chosen]
        metrics |= buffer.drawn_metrics(drawn, current, step)
        if self.priority:
            metrics["replay/task_success"] = fmean(self.outcomes.success_rates(s.item for s in drawn))
            metrics["replay/surprisal"] = fmean(s.item.surprisal for s in drawn)
        return Replay(
            trajectories=[s.item.trajectory for s in drawn],
            turn_advantages=[[a + part for part in s.item.step_parts] for a, s in zip(current, drawn, strict=True)],
            dropped=list(chosen.values()),
            share=share if self.scale_by_rows else 1.0,
            drawn=list(zip(drawn, current, strict=True)),
            metrics=metrics,
        )

    def _chosen(
        self,
        stored: Sequence[Stored[Remembered]],
        eligible: Sequence[int],
        weights: Sequence[float],
        rng: random.Random,
        num_played: int,
    ) -> tuple[dict[int, list[str]], float]:
        """Places of the episodes drawn, each with why a turn of it is not replayed; and drawn over wanted.

        Args:
            weights: of the eligible ones, where there is a priority.
        """
        if self.draw_when == "every_step":
            wanted = round(self.fraction * num_played)
            if self.priority:
                places = [eligible[n] for n in weighted_sample(weights, wanted, rng)]
            else:
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
        groups = [replace(g, trajectories=list(map(buffer.task_reward_only, g.trajectories))) for g in groups]
        played = [(t, g, stats) for g in groups for stats in [buffer.compared(g)] for t in g.trajectories]
        reasons = dropped or [[""] * len(t.turns) for t, _, _ in played]
        if self.skip_invalid:
            unfit = [[buffer.unfit_reason(turn) for turn in t.turns] for t, _, _ in played]
            reasons = [[a or b for a, b in zip(*both, strict=True)] for both in zip(reasons, unfit, strict=True)]
        deciding = [[*map(float, a)] for a in (self.admission(groups) if self.admission else turn_advantages)]
        parts = self.step_parts(groups) if self.step_parts else [[0.0] * len(t.turns) for t, _, _ in played]
        remembered = [
            Remembered(
                *(t, a, list(why), list(part), group.info.get("family", ""), group.task_id, number, *stats),
                surprisal=buffer.surprisal(t, why) if self.priority else 0.0,
            )
            for number, ((t, group, stats), a, why, part) in enumerate(
                zip(played, deciding, reasons, parts, strict=True)
            )
            if not all(why) and (t.num_tool_turns or not self.require_tool) and not group.has_given_turns
        ]
        admitted = [r for r in remembered if self.gate == "new" or r.advantage > 0]
        size_of = (lambda r: r.dropped.count("")) if self.unit == "turns" else (lambda r: 1)
        self.buffer.add(((r, r.trajectory.reward) for r in admitted), step, size_of=size_of)

    def _advantages(self, stored: Sequence[Stored[Remembered]], beaten: Sequence[float]) -> list[float]:
        """A' of each episode; `beaten` is its baseline."""
        if self.reweight is not None:
            return [self.reweight * s.item.advantage for s in stored]
        double, std = partial(torch.tensor, dtype=torch.float64), None
        if self.divide_by_std:  # without any spread yet no group has an advantage, and there is no unit to be in
            typical = {family: self._history(family).typical_std or 1.0 for family in {*self._families(stored)}}
            own = [s.item.group_std if self.baseline == "siblings" else None for s in stored]
            std = double([one or typical[family] for one, family in zip(own, self._families(stored), strict=True)])
        return recalibrate(double([s.reward for s in stored]), double(beaten), std).tolist()

    def _beaten(self, stored: Sequence[Stored[Remembered]]) -> list[float]:
        """The baseline b of each stored episode in A' = R - b; R where nothing is known. Each window is sorted once."""
        if self.baseline == "siblings":
            now = {family: found.reward / found.episodes for family, found in self.outcomes.by_family().items()}
            pairs = [(s.item.group_mean, now.get(None if self.families is None else s.item.family)) for s in stored]
            known = [[mean for mean in pair if mean is not None] for pair in pairs]
            return [max(means, default=s.reward) for means, s in zip(known, stored, strict=True)]
        families = self._families(stored)
        histories = {family: self._history(family) for family in {*families}}
        found = {family: history.percentile(self.percentile) for family, history in histories.items() if len(history)}
        return [found.get(family, s.reward) for family, s in zip(families, stored, strict=True)]

    def _families(self, stored: Sequence[Stored[Remembered]]) -> list[str]:
        """Whose baseline each episode is compared with; "" where there is one for all."""
        return ["" if self.families is None else s.item.family for s in stored]

    def _history(self, family: str) -> RewardHistory:
        if self.families is None:
            return self.history
        return self.families.setdefault(family, RewardHistory(self.history.size))

    def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": {"items": [(as_dict(s.item), s.reward, s.step, s.size) for s in self.buffer.items]},
            "history": self.history.state_dict(),
            "families": {name: h.state_dict() for name, h in (self.families or {}).items()},
            "outcomes": self.outcomes.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        read = partial(from_dict, needs_surprisal=bool(self.priority))
        self.buffer.load_state_dict({"items": [(read(d), *rest) for d, *rest in state["buffer"]["items"]]})
        self.history.load_state_dict(state["history"])
        self.outcomes.load_state_dict(state.get("outcomes", {"groups": []}))
        if self.families is not None:
            self.families.clear()
            for name, saved in state["families"].items():
                self._history(name).load_state_dict(saved)


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
    entropy_floor: float | Literal["auto"] = 0.0
    """In nats per token: below it an entropy bonus is added to the on-policy loss, whose weight grows step by step.
    auto: half of what the run starts with."""
    generator: torch.Generator | None = field(default=None, repr=False, compare=False)
    """The random stream its on-policy loss draws from: state that a checkpoint holds, seeded by the run."""
    running: Running = field(default_factory=Running, repr=False, compare=False)
    """What the run has measured: state that a checkpoint holds, for schedules and for `entropy_floor`."""

    def __post_init__(self) -> None:
        if self.entropy_floor and not hasattr(self.loss, "entropy_bonus"):
            raise ValueError("it needs a loss with a field entropy_bonus, e.g. ClippedSurrogate()")

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """All its random streams: on-policy, then replay."""
        streams = (self.generator, self.imitation.generator if self.imitation else None)
        return tuple(stream for stream in streams if stream is not None)

    def shaped(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The same groups with every turn's format term and every episode's bonus filled in."""
        return [replace(g, trajectories=[self._shaped(t, step) for t in g.trajectories]) for g in groups]

    def _shaped(self, trajectory: Trajectory, step: int) -> Trajectory:
        bonus = self.bonus.weight(step) * self.bonus.of(trajectory) if self.bonus else 0.0
        if self.format_bonus and not any(turn.invalid for turn in trajectory.turns):
            bonus += self.format_bonus
        turns = [replace(t, shaping=-self.invalid_penalty if t.invalid else 0.0) for t in trajectory.turns]
        return replace(trajectory, turns=turns, bonus=bonus)

    def dropped(self, groups: Sequence[Group]) -> list[list[str]]:
        """For every episode, in order, one reason per turn: that of the first filter that drops it, or ""."""
        reasons = [list(why) for group in groups for why in group.untrained]
        for reasons_of in self.filters:
            for kept, found in zip(reasons, reasons_of(groups), strict=True):
                kept[:] = [old or new for old, new in zip(kept, found, strict=True)]
        return reasons

    @property
    def policy_loss(self) -> LossFn:
        """The on-policy loss of this step: with the entropy bonus that holds up the floor."""
        if not self.running.entropy_weight or not self.entropy_floor:
            return self.loss
        loss: Any = self.loss  # it has such a field, see `__post_init__`
        return cast(LossFn, replace(loss, entropy_bonus=loss.entropy_bonus + self.running.entropy_weight))

    def observed(self, metrics: Metrics, step: int) -> Metrics:
        """Take in a step's metrics; returns them with those of what follows the run."""
        own = {"rollout/bonus_weight": self.bonus.weight(step)} if self.bonus else {}
        if self.entropy_floor:
            own["policy/entropy_weight"] = self.running.entropy_weight
        self.running.observe(metrics, floor=self.entropy_floor)
        return metrics | own | {"rollout/running_success": self.running.success}

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes while training: what a checkpoint must hold of an algorithm."""
        return {
            "running": self.running.state_dict(),
            "imitation": self.imitation.state_dict() if self.imitation else None,
            "generators": [generator.get_state() for generator in self.generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.running.load_state_dict(state.get("running", {}))
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
    answered: bool = False
    """Pay only episodes that end with an answer; in a game a bonus would reward long episodes. Not in the paper."""

    def __call__(self, trajectory: Trajectory) -> float:
        calls = [turn.text for turn in trajectory.turns if turn.used_tool]
        count = len(set(calls) if self.distinct else calls)
        return self.paid(count) if trajectory.ends_with_answer or not self.answered else 0.0

    def paid(self, count: int) -> float:
        """The bonus for `count` tool turns."""
        return min(self.per_turn * count, self.most)
