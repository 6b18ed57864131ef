"""What is kept between steps: good episodes, results of recent groups, statistics of a run and what follows them.

Standard library only.
"""

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from spear_rl.settings.ranges import Range, check_fields
from spear_rl.types import Group, Metrics, Trajectory, Turn

METRICS = {
    "replay/buffer_size": "Episodes in the buffer before the draw, none older than algorithm.imitation.max_age steps.",
    "replay/eligible": "Stored episodes that pass algorithm.imitation.gate in this step, so that they can be drawn.",
    "replay/weight": "gamma(t), the weight of the replay term in this step.",
    "replay/baseline": "What stored episodes have to beat, in the mean: a percentile of group means, or siblings.",
    "replay/fired": "1 if stored episodes trained in this step, else 0.",
    "replay/trajectories": "Stored episodes that were drawn in this step.",
    "replay/eligible_turns": "Turns of the eligible episodes that can be replayed (algorithm.imitation.unit=turns).",
    "replay/turns": "Turns that were drawn in this step (algorithm.imitation.unit=turns).",
    "replay/age": "Mean number of steps since the drawn episodes were played.",
    "replay/advantage": "Mean A' of the drawn episodes: recalibrated against the current baseline, decayed by age.",
    "replay/reward": "Mean reward of the drawn episodes, by the task alone.",
    "replay/task_success": "Mean current success rate of the drawn episodes' tasks, else families (with a priority).",
    "replay/group_success": "Mean success rate of the drawn episodes' groups when they were played.",
    "replay/surprisal": "Mean negative log-probability of the drawn episodes' tokens when played, with a priority.",
    "replay/priority": "Kish's effective share of the eligible episodes under the draw's weights; 1 is uniform.",
    "replay/held_back": "Share of replayed rows that algorithm.imitation.max_second_moment keeps from training.",
    "replay/never_drawn": "Eligible episodes that algorithm.imitation.priority gives a weight of 0.",
}
"""What `SelfImitation.draw` reports."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """One remembered episode; `item` is whatever the trainer at hand trains on."""

    item: T
    reward: float
    """The task's own reward: no bonus, no format term."""
    step: int
    """The training step whose policy played it."""
    size: int = 1
    """What it takes of the buffer's capacity."""


@dataclass
class ReplayBuffer(Generic[T]):
    """At most `capacity` episodes, or so much by their sizes, none older than `max_age` steps; oldest out first."""

    capacity: Annotated[float, Range(1, math.inf)]
    max_age: Annotated[float, Range(0, math.inf)]
    items: deque[Stored[T]] = field(default_factory=deque, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        self.items = deque(self.items)
        self.add((), step=0)  # evicts what exceeds the capacity

    def __len__(self) -> int:
        return len(self.items)

    def add(
        self, scored: Iterable[tuple[T, float]], step: int, *, size_of: Callable[[T], int] = lambda item: 1
    ) -> None:
        """Remember (episode, reward) pairs that were played at `step`; each takes `size_of` it of the capacity."""
        self.items.extend(Stored(item, float(reward), step, size_of(item)) for item, reward in scored)
        excess = sum(stored.size for stored in self.items) - self.capacity
        while excess > 0:
            excess -= self.items.popleft().size

    def drop_stale(self, step: int) -> None:
        """Forget what is older than `max_age` at `step`."""
        self.items = deque(s for s in self.items if step - s.step <= self.max_age)

    def sample(
        self, count: int, rng: random.Random, *, where: Callable[[Stored[T]], bool] = lambda stored: True
    ) -> list[Stored[T]]:
        """Up to `count` different episodes for which `where` holds."""
        eligible = [stored for stored in self.items if where(stored)]
        return rng.sample(eligible, min(count, len(eligible)))

    def clear(self) -> None:
        self.items.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"items": [(s.item, s.reward, s.step, s.size) for s in self.items]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = deque(Stored(*entry) for entry in state["items"])
        self.add((), step=0)  # evicts what exceeds the capacity


@dataclass
class RewardHistory:
    """Mean rewards of the last `size` groups; a percentile of them is the baseline of replayed episodes."""

    size: Annotated[int, Range(1, math.inf, unit="group means")]
    means: deque[float] = field(default_factory=deque, repr=False)
    stds: deque[float] = field(default_factory=deque, repr=False)
    """Of the rewards in each of the last `size` groups that had any spread."""

    def __post_init__(self) -> None:
        check_fields(self)
        self.means, self.stds = deque(self.means, self.size), deque(self.stds, self.size)

    def __len__(self) -> int:
        return len(self.means)

    def add(self, group_means: Iterable[float], stds: Iterable[float] = ()) -> None:
        """Take in groups, and the standard deviations within them; one of 0 is left out, as it compares nothing."""
        self.means.extend(map(float, group_means))
        self.stds.extend(float(std) for std in stds if std > 0)

    @property
    def typical_std(self) -> float | None:
        """The median of the groups' standard deviations, never 0; None before any group had a spread."""
        return statistics.median(self.stds) if self.stds else None

    def median(self) -> float:
        """The paper's baseline."""
        return self.percentile(50.0)

    def percentile(self, percent: float) -> float:
        """Linear interpolation between the two nearest ranks; 0 is the smallest mean, 100 the largest."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be from 0 to 100 (it is {percent})")
        if not self.means:
            raise ValueError("a percentile of an empty reward history: add group means first")
        ordered = sorted(self.means)
        position = (len(ordered) - 1) * percent / 100
        below = math.floor(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(self.means), "stds": list(self.stds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self.stds = deque(state["means"], self.size), deque(state.get("stds", ()), self.size)


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
    group_mean: float | None = None
    """Mean reward of its group when it was played; None is unknown, as the next two."""
    group_std: float | None = None
    """Sample std of its group's rewards."""
    group_success: float | None = None
    """Share of its group that solved the task."""
    surprisal: float = 0.0
    """Mean negative log-probability of its trained tokens under the policy that sampled them; 0 without a priority."""

    @property
    def advantage(self) -> float:
        return statistics.fmean(self.turn_advantages) if self.turn_advantages else 0.0


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


def compared(group: Group) -> tuple[float, float, float]:
    """Mean and sample std of a group's rewards, and the share of its episodes that solved the task."""
    rewards = finite_rewards(group) or [0.0]
    return statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0, group.success


def finite_rewards(group: Group) -> list[float]:
    """The task's reward of each episode, or one sentence about one that cannot be compared."""
    if not all(map(math.isfinite, rewards := [t.reward for t in group.trajectories])):
        raise ValueError(f"task {group.task_id!r}: its episodes have the rewards {rewards}, not all of them finite")
    return rewards


def task_reward_only(trajectory: Trajectory) -> Trajectory:
    """The episode without bonus and format terms."""
    return replace(trajectory, bonus=0.0, turns=[replace(turn, shaping=0.0) for turn in trajectory.turns])


def unfit_reason(turn: Turn) -> str:
    """Why a turn is not worth imitating even where its episode is."""
    return "invalid" if turn.invalid else "overlong" if turn.completion.truncated else ""


def surprisal(trajectory: Trajectory, dropped: Sequence[str]) -> float:
    """Mean negative log-probability of the tokens whose turn is not dropped; 0 without any."""
    turns = [turn for turn, why in zip(trajectory.turns, dropped, strict=True) if not why]
    logprobs = [logprob for turn in turns for logprob in turn.completion.logprobs]
    return -statistics.fmean(logprobs) if logprobs else 0.0


class Outcome(NamedTuple):
    """The result of one group, or of several together."""

    step: int
    task: str
    family: str
    episodes: int
    successes: int
    reward: float
    """Sum over its episodes, of the task's own reward."""

    def plus(self, other: "Outcome") -> "Outcome":
        """Both together, as of the later one."""
        counts = self.episodes + other.episodes, self.successes + other.successes
        return Outcome(other.step, other.task, other.family, *counts, self.reward + other.reward)


@dataclass
class Outcomes:
    """Results of the groups of the last steps: current rates, by task and by family."""

    groups: deque[Outcome] = field(default_factory=deque, repr=False)

    def add(self, outcomes: Iterable[Outcome], *, oldest: float) -> None:
        """Take in a step's groups, and forget those of steps before `oldest`."""
        self.groups = deque(group for group in (*self.groups, *outcomes) if group.step >= oldest)

    def by_family(self) -> dict[str | None, Outcome]:
        """Each family's groups together; under None, all groups."""
        found: dict[str | None, Outcome] = {}
        for group in self.groups:
            for key in (None, group.family):
                found[key] = found[key].plus(group) if key in found else group
        return found

    def success_rates(self, stored: Iterable[Remembered]) -> list[float]:
        """Current success rate of each episode's task: of the last step that played it, else of its family.

        (successes + 1/2) / (episodes + 1): 1/2 if nothing is known, and few episodes say little.
        """
        tasks, families = dict[str, Outcome](), self.by_family()
        for group in self.groups:
            last = tasks.get(group.task)
            tasks[group.task] = last.plus(group) if last and last.step == group.step else group
        known = [tasks.get(item.task) or families.get(item.family) for item in stored]
        return [(group.successes + 0.5) / (group.episodes + 1) if group else 0.5 for group in known]

    def state_dict(self) -> dict[str, Any]:
        return {"groups": [tuple(group) for group in self.groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = deque(Outcome(*group) for group in state["groups"])


def drawn_metrics(drawn: Sequence[Stored[Remembered]], advantages: Sequence[float], step: int) -> Metrics:
    """What one draw is like; `advantages` is each episode's A'."""
    mean, then = statistics.fmean, [s.item.group_success for s in drawn if s.item.group_success is not None]
    return {
        "replay/age": mean(step - s.step for s in drawn),
        "replay/advantage": mean(advantages),
        "replay/reward": mean(s.reward for s in drawn),
    } | ({"replay/group_success": mean(then)} if then else {})


RATE = 0.2
"""Share of a new step in `Running.success`."""
FIRST_STEPS = 5
"""Number of first steps whose mean entropy counts as the initial entropy of the run."""
GROWTH = 1.5
"""Largest factor per step by which the weight of a floor's entropy bonus grows."""
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 0.1
"""Where that weight begins, and its bound, as shares of the step's mean absolute advantage."""
BAND = 0.5
"""The bound holds where the entropy lacks this share of the floor or more; from there it falls to 0 at the floor."""
AUTO_FLOOR = 0.5
"""The floor `auto`: this share of the entropy that the run starts with, once that is known."""


@dataclass
class Running:
    """Running statistics of a run, for schedules that follow it and for a floor of the entropy."""

    success: float = 0.0
    """Running mean of the success of training episodes: the first step's, then a fifth of each new one; 0 before."""
    entropy_name: str = ""
    """The metric that is this run's entropy: policy/entropy where the first step that trains reports it, else
    rollout/entropy; empty before."""
    entropy: float | None = None
    """Of the policy in the latest step that measured it."""
    first_entropies: list[float] = field(default_factory=list)
    """Of the first steps that measured it."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus that holds up a floor."""
    steps: int = 0

    def observe(self, metrics: Metrics, *, floor: float | Literal["auto"]) -> None:
        """Take in the metrics of a step; `floor` is the entropy to hold up, 0 for none."""
        if not self.entropy_name and ("policy/entropy" in metrics or metrics.get("policy/turns_trained", 1.0)):
            self.entropy_name = "policy/entropy" if "policy/entropy" in metrics else "rollout/entropy"
        success, entropy = metrics["rollout/success"], metrics.get(self.entropy_name)
        self.success += (success - self.success) * (RATE if self.steps else 1.0)
        self.steps += 1
        if entropy is not None:
            self.entropy = entropy
            if len(self.first_entropies) < FIRST_STEPS:
                self.first_entropies.append(entropy)
            if floor:
                self._hold(entropy, floor, scale=metrics.get("policy/advantage", 1.0))

    def _hold(self, entropy: float, floor: float | Literal["auto"], *, scale: float) -> None:
        """Set the weight of the entropy bonus, 0 from the floor on; `scale` is the step's mean absolute advantage."""
        if floor == "auto":
            is_known = len(self.first_entropies) == FIRST_STEPS
            floor = AUTO_FLOOR * statistics.fmean(self.first_entropies) if is_known else 0.0
        lack = min((floor - entropy) / (BAND * floor), 1.0) if floor else 0.0
        grown = max(self.entropy_weight * GROWTH, LEAST_WEIGHT * scale)
        self.entropy_weight = max(min(grown, MOST_WEIGHT * scale * lack), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


@dataclass(frozen=True, slots=True)
class BySuccess:
    """A schedule: linear from `start` at a success rate of 0 to `end` at `target`, then constant."""

    start: float
    end: float
    target: Annotated[float, Range(0, 1, "(]")] = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(1.0, self.running.success / self.target)


@dataclass(frozen=True, slots=True)
class ByEntropy:
    """A schedule: `weight` while the entropy is at least `share` of its first value, less in proportion below."""

    weight: float
    share: Annotated[float, Range(0, 1, "(]")] = 0.5
    running: Running = field(default_factory=Running, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, step: int) -> float:
        first, entropy = self.running.first_entropies, self.running.entropy
        full = self.share * statistics.fmean(first) if first else 0.0
        return self.weight * min(1.0, max(entropy, 0.0) / full) if full > 0 and entropy is not None else self.weight
