"""What is measured of one run: success by several definitions, and what it took."""

from collections.abc import Callable, Mapping
from itertools import accumulate
from statistics import fmean

from spear_rl.app.compare.runs import WINDOW, RunRecord

Measure = Callable[[RunRecord], float | None]


def evaluations(run: RunRecord) -> dict[int, float]:
    """Step -> success of its evaluation, without the one before RL."""
    return {step: float(row["success"]) for step, row in run.evals.items() if step > 0}


def further_evaluations(run: RunRecord) -> dict[int, float]:
    """The same on the first split of eval.also."""
    rows = {step: row.get("also", {}) for step, row in run.evals.items()}
    split = next((name for row in rows.values() for name in row), "")
    return {step: float(row[split]["success"]) for step, row in rows.items() if step > 0 and split in row}


def _mean_of(series: Callable[[RunRecord], Mapping[int, float]]) -> Measure:
    """The mean; None if the evaluation after the last step is missing, which the means of other runs include."""
    return lambda run: fmean(found.values()) if run.taken in (found := series(run)) else None


def _final_of(series: Callable[[RunRecord], Mapping[int, float]]) -> Measure:
    return lambda run: series(run).get(run.taken)


def eval_best(run: RunRecord) -> float | None:
    return max(evaluations(run).values(), default=None)


def rollout_last(run: RunRecord) -> float | None:
    return _last(run, "rollout/success")


MEASURES: dict[str, Measure] = {
    "eval_mean": _mean_of(evaluations),
    "eval_final": _final_of(evaluations),
    "eval_best": eval_best,
    "also_mean": _mean_of(further_evaluations),
    "also_final": _final_of(further_evaluations),
    "rollout_last": rollout_last,
}
MEANINGS = {
    "eval_mean": "mean success of the evaluations over training, the one before RL left out",
    "eval_final": "success of the evaluation after the last step",
    "eval_best": "highest success of the evaluations over training",
    "also_mean": "as eval_mean, on the first split of eval.also",
    "also_final": "as eval_final, on the first split of eval.also",
    "rollout_last": f"success of training episodes, mean of the last {WINDOW} steps",
}
"""What a plan may declare as its primary or a secondary measure, each a share of episodes."""


def eval_before(run: RunRecord) -> float | None:
    return float(run.evals[0]["success"]) if 0 in run.evals else None


def optimizer_steps(run: RunRecord) -> dict[int, float] | None:
    """Step -> optimizer steps of the policy in it; None where neither metrics nor settings tell."""
    counted = run.series("policy/optimizer_steps")
    if counted:
        return {step: counted.get(step, 0.0) for step in run.rows}  # a step in which nothing trained has none
    # Earlier versions did not count them.
    count, epochs = run.settings.get("optim.num_minibatches", 1), run.settings.get("optim.epochs", 1)
    rows = run.settings.get("optim.minibatch_rows", 0)
    if rows != 0 or type(count) is not int or type(epochs) is not int:
        return None
    is_separate = run.settings.get("algorithm.imitation.update") == "separate"
    replayed = run.series("replay/trajectories") if is_separate else {}
    return {step: float(epochs * (count + min(count, replayed.get(step, 0.0)))) for step in run.rows}


def whole(run: RunRecord, key: str) -> dict[int, float] | None:
    """Step -> metric; None if a row lacks it, as sums over steps are then too small."""
    found = run.series(key)
    return found if len(found) == len(run.rows) else None


def _total(series: Callable[[RunRecord], Mapping[int, float] | None]) -> Measure:
    """The sum over steps; None if the row of a step is missing."""
    return lambda run: sum(found.values()) if run.is_whole and (found := series(run)) else None


def _last(run: RunRecord, key: str) -> float | None:
    found = list(run.smoothed(key).values())
    return found[-1] if found else None


def _mean(key: str) -> Measure:
    def mean(run: RunRecord) -> float | None:
        found = run.series(key)
        return fmean(found.values()) if found else None

    return mean


COSTS: dict[str, tuple[Measure, str]] = {
    "success before": (eval_before, ".1%"),
    "optimizer steps": (_total(optimizer_steps), ",.0f"),
    "episodes": (_total(lambda run: whole(run, "rollout/episodes")), ",.0f"),
    "seconds": (_total(lambda run: whole(run, "time/step")), ",.0f"),
    "entropy": (lambda run: _last(run, "policy/entropy"), ".3f"),
    "tool turns": (lambda run: _last(run, "rollout/tool_turns"), ".2f"),
    "replay fired": (_mean("replay/fired"), ".0%"),
}
"""Column -> its value of a run and its format; `COSTS_NOTE` says what they are."""
TOTALS = ("optimizer steps", "episodes", "seconds")
COSTS_NOTE = (
    "Optimizer steps of the policy, episodes played and seconds of RL are sums over a run (evaluations, the cold start "
    f"and checkpoints take no part); entropy and tool turns are means of the last {WINDOW} steps; replay fired is the "
    "share of steps that trained on stored episodes. All are means over seeds."
)


def cumulative(by_step: Mapping[int, float]) -> dict[int, float]:
    """Steps learned -> the sum of a metric over them; 0 before the first."""
    return dict(zip([0, *(step + 1 for step in by_step)], accumulate(by_step.values(), initial=0.0), strict=True))


def gate_pass_rate(run: RunRecord) -> dict[int, float]:
    """Step -> share of stored episodes that pass the gate, where anything is stored."""
    stored, eligible = run.series("replay/buffer_size"), run.series("replay/eligible")
    return {step: eligible[step] / size for step, size in stored.items() if size and step in eligible}
