"""Warnings while a run trains: what goes wrong by its metrics, the figures, and the setting to change.

Every rule compares means over windows of steps; docs/read_a_run.md has the thresholds.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan, sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from spear_rl.app.build.cautions import cold_start, longer_cold_start
from spear_rl.app.config import Config
from spear_rl.io.escaping import clipped
from spear_rl.io.jsonl import append_row, read_rows
from spear_rl.settings.names import split_name
from spear_rl.train.callbacks import WARNINGS, Callback, Event

START, WINDOW = 5, 10
"""Steps at the beginning of a run, and the latest steps, that means are taken over."""
SOLVED = 0.9
"""From this success on, easy wins and a silent replay are what the end of learning looks like."""
NEARLY_SOLVED = 0.8
"""From this success on, most groups may win all, the baseline may be the highest reward, and entropy may be low."""
LEAST_TOOL_TURNS, TOOL_SHARE, RISE = 0.2, 1 / 3, 0.05
ENTROPY_SHARE, LEAST_ENTROPY = 0.25, 0.005
EASY, EASY_GAP = 0.75, 0.1
FLAT, MOSTLY_WON, LOST, INVALID, TRUNCATED = 0.5, 0.65, 0.1, 0.5, 0.5
GROWN_TRUNCATED, GROWTH = 0.1, 3.0
DIVIDING, UNLEARNED = {"grpo", "gigpo", "hgpo", "graphgpo", "g2po"}, 0.6
"""Bases that divide by a group's std; of the success at the start, what is left when a run has unlearned."""
HELD_BACK = 0.95
FORGOTTEN, OTHERS_KEPT, LEAST_GROUPS = 0.5, 0.9, 20
"""A family is forgotten at half of its best success, while the others keep 0.9 of theirs; windows have 20 groups."""
ERRORS = 4
"""Standard errors that a fall must exceed: two or three occur by chance, as the best of many windows is compared."""

Families = dict[str, list[float]]
"""Family -> the success of each of its groups."""


class RunWatch:
    """A callback that warns once per kind, and again if the condition comes back after it was gone for WINDOW steps.

    Each repetition doubles how long it must have been gone, so that a mean about a threshold is told of a few times.

    Its state is a function of metrics.jsonl, from which a resumed run rebuilds it.
    """

    def __init__(self, config: Config, run_dir: Path, callbacks: Sequence[Callback]) -> None:
        self._rules, self._run_dir, self._callbacks = Rules(config), run_dir, callbacks
        self._seen: dict[str, tuple[int, int]] | None = None
        """Kind -> the last step that had it, and how often it was told."""

    def __call__(self, event: Event) -> None:
        if event.kind != "step" or not event.metrics:
            return
        if self._seen is None:
            self._seen = {}
            for step, row in read_rows(self._run_dir / "metrics.jsonl").by_step.items():
                if step < event.step:
                    self._new(step, row, self._seen)
        if found := self._new(event.step, event.metrics, self._seen):
            rows = [{"kind": kind, "text": text} for kind, text in found.items()]
            append_row(self._run_dir / WARNINGS, {"step": event.step, "warnings": rows})
            for text in found.values():
                for callback in self._callbacks:
                    callback(Event("note", event.step, text=f"warning at step {event.step}: {text}"))

    def _new(self, step: int, metrics: Mapping[str, Any], seen: dict[str, tuple[int, int]]) -> dict[str, str]:
        """Kind -> text of the warnings that a step brings."""
        new = {}
        for kind, text in self._rules.broken(metrics).items():
            last, times = seen.get(kind, (-1, 0))
            if not times or step - last > WINDOW * 2 ** (times - 1):
                new[kind], times = text, times + 1
            seen[kind] = step, times
        return new


class Rules:
    """The state of a run by its first and its latest steps, and the rules that it breaks."""

    def __init__(self, config: Config) -> None:
        self._config, (self._wrappers, self._base) = config, split_name(config.algorithm.name)
        self._first: list[Mapping[str, Any]] = []
        self._latest: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._before: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        """The WINDOW steps before `_latest`."""
        self._num_steps, self._had_stored = 0, False
        self._families: deque[Families] = deque(maxlen=2 * WINDOW)
        self._best: dict[str, tuple[list[float], float]] = {}
        """Family -> the success of its groups over the steps at which it was best, and that of all others then."""
        self._checks: dict[str, Callable[[], str]] = {
            "tools": self._tools, "entropy": self._entropy, "replay": self._replay, "easy_wins": self._easy_wins,
            "flat_groups": self._flat_groups, "overlong": self._overlong, "invalid": self._invalid,
            "penalties": self._penalties, "forgotten": self._forgotten,
        }  # fmt: skip

    def broken(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """Take in the next step; kind -> text of every rule that is broken now."""
        self._num_steps += 1
        if self._num_steps <= START:
            self._first.append(metrics)
        if len(self._latest) == WINDOW:
            self._before.append(self._latest[0])
        self._latest.append(metrics)
        self._families.append(_families(metrics))
        is_emptied = self._config.algorithm.imitation.draw == "when_full" and _number(metrics, "replay/fired") > 0
        self._had_stored = not is_emptied and (self._had_stored or _number(metrics, "replay/buffer_size") > 0)
        if self._num_steps < WINDOW:
            return {}
        texts = {kind: check() for kind, check in self._checks.items()}
        return {kind: text for kind, text in texts.items() if text}

    def _now(self, name: str) -> float:
        return _mean(self._latest, name)

    def _then(self, name: str) -> float:
        """At the start of the run; unknown before the latest steps are others."""
        return _mean(self._first, name) if self._num_steps >= START + WINDOW else nan

    @property
    def _is_solved(self) -> bool:
        return self._now("rollout/success") >= SOLVED

    @property
    def _imitates(self) -> bool:
        return "spear" in self._wrappers and self._config.algorithm.imitation.enabled

    def _tools(self) -> str:
        then, now = self._then("rollout/tool_turns"), self._now("rollout/tool_turns")
        before, success = self._then("rollout/success"), self._now("rollout/success")
        if not (then >= LEAST_TOOL_TURNS and now < TOOL_SHARE * then and success < before + RISE):
            return ""
        fell = f"tool turns per episode fell from {then:.2f} to {now:.2f} while success went from {before:.2f} to"
        bonus, advice = self._config.algorithm.bonus, list[str]()
        if "spear" in self._wrappers:
            longer = {
                "cosine": f"lengthen algorithm.bonus.steps (it is {bonus.steps})",
                "none": "set algorithm.bonus.mode=success",
                "success": f"raise algorithm.bonus.target (it is {bonus.target:g})" if bonus.target < 1 else "",
            }
            advice += [longer[bonus.mode]] if longer.get(bonus.mode) else []
        if self._imitates and not self._config.algorithm.imitation.require_tool:
            advice.append("set algorithm.imitation.require_tool=true")
        return f"{fell} {success:.2f}: {_either([*advice, longer_cold_start(self._config)])}"

    def _entropy(self) -> str:
        then, now = self._then("policy/entropy"), self._now("policy/entropy")
        success, before = self._now("rollout/success"), _mean(self._before, "rollout/success")
        is_falling = now < ENTROPY_SHARE * then and not success >= before + RISE
        if not (success < NEARLY_SOLVED and (now < LEAST_ENTROPY or is_falling)):
            return ""
        fell = f"entropy fell from {then:.3g} to {now:.3g}" if isfinite(then) else f"entropy is {now:.3g}"
        algorithm = self._config.algorithm
        bonus = f"raise algorithm.entropy_bonus (it is {algorithm.entropy_bonus:g})"
        advice = [bonus if algorithm.entropy_bonus else "set algorithm.entropy_bonus=0.001"]
        if algorithm.covariance.on_policy == "none":
            advice.append("set algorithm.covariance.on_policy=clip")
        rate = f"lower optim.learning_rate (it is {self._config.optim.learning_rate:g})"
        advice.append(f"{rate} or algorithm.imitation.weight" if self._imitates else rate)
        return f"{fell} nats per token while success is {success:.2f}, so little is tried any more: {_either(advice)}"

    def _replay(self) -> str:
        if (held := self._now("replay/held_back")) >= HELD_BACK and not self._is_solved:
            bound = (
                f"algorithm.imitation.max_second_moment (it is {self._config.algorithm.imitation.max_second_moment:g})"
            )
            age = f"lower algorithm.imitation.max_age (it is {self._config.algorithm.imitation.max_age})"
            return f"replay fires and {held:.0%} of its rows do not train: raise {bound}, or {age}"
        is_silent = all(_number(row, "replay/weight") > 0 and _number(row, "replay/fired") == 0 for row in self._latest)
        if not is_silent or self._is_solved:
            return ""
        why = self._why_silent()
        return f"replay has not fired for {WINDOW} steps: {why}" if why else ""

    def _why_silent(self) -> str:
        imitation, rollout = self._config.algorithm.imitation, self._config.rollout
        if self._now("replay/buffer_size") == 0:
            return self._why_empty()
        if self._now("replay/eligible") == 0:
            size, baseline = self._latest[-1]["replay/buffer_size"], _number(self._latest[-1], "replay/baseline")
            gate = f"none of the {size:.0f} stored episodes earns more than the baseline {baseline:.3g}"
            advice = [f"lower algorithm.imitation.percentile (it is {imitation.percentile:g})"]
            if imitation.baseline == "siblings":  # which does not look at the percentile
                advice = ["set algorithm.imitation.baseline=percentile"]
            if not imitation.per_family:
                advice.append("set algorithm.imitation.per_family=true if kinds of task differ")
            return f"{gate}: {_either(advice)}" if self._now("rollout/success") < NEARLY_SOLVED else ""
        if imitation.draw == "when_full":
            return self._why_not_full()
        if imitation.priority and self._now("replay/never_drawn") >= self._now("replay/eligible"):
            words = json.dumps([word for word in imitation.priority if word not in ("medium", "hard")])
            none = f"algorithm.imitation.priority draws none of the {self._now('replay/eligible'):.0f} that qualify"
            return f"{none}, as their tasks are nearly always won: set algorithm.imitation.priority={words}"
        played = self._now("rollout/episodes")
        if round(imitation.fraction * played) > 0:
            return ""
        wanted = f"algorithm.imitation.fraction={imitation.fraction:g} of {played:.0f} episodes is less than one"
        return f"{wanted}: raise it, or rollout.num_tasks (it is {rollout.num_tasks})"

    def _why_empty(self) -> str:
        imitation = self._config.algorithm.imitation
        flat, lost, won = (self._now(f"rollout/flat_{name}") for name in ("groups", "lost", "won"))
        empty = "the buffer is empty, as no episode was worth storing"
        if self._had_stored:
            empty = (
                f"all stored episodes were older than algorithm.imitation.max_age={imitation.max_age} steps, and no "
            )
            empty += "other was stored"
        if flat >= 0.9:
            kinds = f"{lost:.0%} of the groups lost all their episodes and {won:.0%} won them all"
            return f"{empty} ({kinds}): {self._flat_advice(lost, won)}"
        if imitation.require_tool:
            return f"{empty}: no better episode used a tool; set algorithm.imitation.require_tool=false"
        return f"{empty}: no turn of a better episode may train (see policy/dropped_* and rollout/invalid_turns)"

    def _why_not_full(self) -> str:
        """Only where the draw is out of reach: with the latest growth it does not come before the end of the run."""
        imitation = self._config.algorithm.imitation
        name = "eligible_turns" if imitation.unit == "turns" else "eligible"
        counts, needed = [_number(row, f"replay/{name}") for row in self._latest], 1.5 * imitation.capacity
        half = WINDOW // 2
        growth = (fmean(counts[half:]) - fmean(counts[:half])) / half
        left = self._config.run.steps - self._num_steps
        if growth * left > needed - counts[-1]:
            return ""
        qualify = f"{counts[-1]:.0f} {imitation.unit} qualify and more than {needed:.0f} are needed"
        advice = [
            f"lower algorithm.imitation.capacity (it is {imitation.capacity})",
            f"raise algorithm.imitation.max_age (it is {imitation.max_age})",
            "set algorithm.imitation.draw=every_step",
        ]
        return f"{qualify}: {_either(advice)}"

    def _easy_wins(self) -> str:
        rows = [row for row in self._latest if _number(row, "replay/fired") > 0]
        drawn, success = _mean(rows, "replay/group_success"), self._now("rollout/success")
        if len(rows) < WINDOW / 2 or self._is_solved or not (drawn >= EASY and success <= drawn - EASY_GAP):
            return ""
        easy = f"replay repeats easy wins: the groups of the replayed episodes solved {drawn:.0%} of theirs, all groups"
        size = f"raise rollout.group_size (it is {self._config.rollout.group_size}) so that hard tasks are won at times"
        age = f"raise algorithm.imitation.max_age (it is {self._config.algorithm.imitation.max_age})"
        return f"{easy} {success:.0%}: {size}, or {age} to keep their wins longer"

    def _flat_groups(self) -> str:
        flat, lost, won = (self._now(f"rollout/flat_{name}") for name in ("groups", "lost", "won"))
        is_learning = lost < LOST and (flat < MOSTLY_WON or self._now("rollout/success") >= NEARLY_SOLVED)
        if not flat >= FLAT or is_learning:
            return ""
        kinds = f"{lost:.0%} of all lost every episode and {won:.0%} won every one"
        one = f"{flat:.0%} of the groups have one reward for all their episodes and teach nothing ({kinds})"
        return f"{one}: {self._flat_advice(lost, won)}"

    def _flat_advice(self, lost: float, won: float) -> str:
        rollout = self._config.rollout
        advice = [f"a larger rollout.group_size (it is {rollout.group_size})"]
        middle = "tasks between those that are always won and always lost"
        advice.insert(0, "easier tasks" if lost >= 2 * won else "harder tasks" if won >= 2 * lost else middle)
        if lost >= won and not self._config.sft.episodes:
            advice.insert(0, cold_start(self._config))
        if lost >= won and rollout.temperature > 1:
            advice.append(f"a lower rollout.temperature (it is {rollout.temperature:g})")
        elif rollout.temperature < 1:
            advice.append(f"a higher rollout.temperature (it is {rollout.temperature:g})")
        return f"try {', '.join(advice[:-1])} or {advice[-1]}" if len(advice) > 1 else f"try {advice[0]}"

    def _overlong(self) -> str:
        then, now = self._then("rollout/truncated_turns"), self._now("rollout/truncated_turns")
        has_grown = now >= GROWN_TRUNCATED and now >= GROWTH * then
        if not (now >= TRUNCATED or has_grown):
            return ""
        rollout = self._config.rollout
        advice = f"raise rollout.max_new_tokens (it is {rollout.max_new_tokens})"
        if rollout.max_response_tokens:
            advice += f" or rollout.max_response_tokens (it is {rollout.max_response_tokens})"
        if self._now("rollout/invalid_turns") <= now / 2 and not rollout.stop:
            ends = "most of them have a valid action, so if the task's answers end with a text of their own"
            advice = f"{ends}, set rollout.stop to it, or {advice}"
        grown = f", {then:.0%} at the start" if has_grown else ""
        if "dr-bot" in self._wrappers and self._config.algorithm.filters.overlong:
            advice += (
                ", or set algorithm.filters.overlong=false: these turns do not train, so nothing makes them shorter"
            )
        return f"{now:.0%} of the turns hit their token limit{grown}: {advice}"

    def _invalid(self) -> str:
        now, penalty = self._now("rollout/invalid_turns"), self._config.algorithm.invalid_penalty
        if not now > INVALID:
            return ""
        reasons = "`spear show RUN --failed` says why the environment refused them"
        advice = f"raise algorithm.invalid_penalty (it is {penalty:g}), or {longer_cold_start(self._config)}"
        return f"{now:.0%} of the turns are invalid over {WINDOW} steps: {advice}; {reasons}"

    def _penalties(self) -> str:
        settings, then, now = self._config.algorithm, self._then("rollout/success"), self._now("rollout/success")
        divides = self._base in DIVIDING and "dr-bot" not in self._wrappers
        divides = divides if settings.divide_by_std is None else settings.divide_by_std
        lost, penalty = self._now("rollout/flat_lost"), settings.invalid_penalty
        if not (divides and penalty > 0 and lost >= FLAT and now <= UNLEARNED * then):
            return ""
        why = "their penalties for invalid turns are divided by their spread, and weigh as much as wins elsewhere"
        advice = f"set algorithm.invalid_penalty=0 (it is {penalty:g}), or set algorithm.divide_by_std=false"
        return f"success fell from {then:.2f} to {now:.2f}, {lost:.0%} of the groups lost all: {why}: {advice}"

    def _forgotten(self) -> str:
        """Compares success rates of groups: episodes of one group share a task, so they are not independent."""
        if len(self._families) < 2 * WINDOW:
            return ""
        rows = list(self._families)
        before, now = _together(rows[:WINDOW]), _together(rows[WINDOW:])
        for family, groups in before.items():
            best, _ = self._best.get(family, ([0.0], nan))
            if len(before) > 1 and len(groups) >= LEAST_GROUPS and fmean(groups) > fmean(best):
                self._best[family] = groups, _others(before, family)
        fallen = [family for family in self._best if self._has_fallen(family, now)]
        if not fallen:
            return ""
        family = min(fallen, key=lambda name: fmean(now[name]) - fmean(self._best[name][0]))
        best, others = self._best[family]
        fell = f"{clipped(family, 60)!r} fell from {fmean(best):.2f} to {fmean(now[family]):.2f}"
        kept = f"that of the others went from {others:.2f} to {_others(now, family):.2f}"
        return f"success in the task family {fell} while {kept}, so it is being forgotten: {self._family_advice()}"

    def _has_fallen(self, family: str, now: Families) -> bool:
        (best, others), latest = self._best[family], now.get(family, [])
        if len(latest) < LEAST_GROUPS or not _others(now, family) >= OTHERS_KEPT * others:
            return False
        then, today = fmean(best), fmean(latest)
        noise = sqrt(1 / len(best) + 1 / len(latest))
        return today <= FORGOTTEN * then and then - today > ERRORS * noise * pstdev(best + latest)

    def _family_advice(self) -> str:
        imitation = self._config.algorithm.imitation
        if not self._imitates:
            return "look at its episodes with `spear view`"
        if "family" in imitation.priority:
            return f"lower algorithm.imitation.weight (it is {imitation.weight:g})"
        draw = "" if imitation.draw == "every_step" else " and algorithm.imitation.draw=every_step"
        words = json.dumps([*imitation.priority, "family"])
        return f"set algorithm.imitation.priority={words}{draw}, so that replay samples every family equally"


def _either(advice: Sequence[str]) -> str:
    """One thing to do or another, in words."""
    return ", or ".join(filter(None, [", ".join(advice[:-1]), advice[-1]]))


def _families(row: Mapping[str, Any]) -> Families:
    given = row.get("rollout/by_family")
    lists = {name: v for name, v in given.items() if isinstance(v, list)} if isinstance(given, dict) else {}
    return {name: [v for v in values if isinstance(v, int | float) and isfinite(v)] for name, values in lists.items()}


def _together(rows: Iterable[Families]) -> Families:
    found: Families = {}
    for row in rows:
        for family, values in row.items():
            found.setdefault(family, []).extend(values)
    return found


def _others(families: Families, family: str) -> float:
    """Mean success of the groups of all other families; nan without any, which no rule matches."""
    values = [value for name, values in families.items() if name != family for value in values]
    return fmean(values) if values else nan


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and isfinite(value) else nan


def _mean(rows: Iterable[Mapping[str, Any]], name: str) -> float:
    """Over the rows that have a finite value, if these are half of them or more; else nan, which no rule matches."""
    values = [_number(row, name) for row in rows]
    known = [value for value in values if isfinite(value)]
    return fmean(known) if known and 2 * len(known) >= len(values) else nan
