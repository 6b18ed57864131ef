"""Runs side by side: arms over seeds, paired differences, curves. Reads run folders; knows neither torch nor Config."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from spear_rl.errors import UserError
from spear_rl.plots import WINDOW, Curve, curve, draw

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_CURVES = {
    "success": "rollout/success",
    "reward": "rollout/reward",
    "entropy": "policy/entropy",
    "tool turns": "rollout/tool_turns",
    "replayed": "replay/trajectories",
}
_RATE = ("success", "low", "high")
_NO_EFFECT = ("engine.micro_batch_tokens", "eval.every")
_SPEAR_ONLY = ("algorithm.bonus.", "algorithm.imitation.", "algorithm.covariance.replay")
_COLUMNS = (
    "algorithm", "seeds", "success before", "success after (95 %)", "best reward", "last reward",
    "entropy", "tool turns", "s/step", "replay fired",
)  # fmt: skip
_COLUMNS_NOTE = (
    f"Rewards, entropy and tool turns are of training episodes, as means of {WINDOW} steps: the last, or the best. "
    "Replay fired: share of steps that trained on stored episodes."
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval and where that comes from."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says about its run."""

    path: Path
    settings: dict[str, Any]
    """Dotted key -> value, of config.toml."""
    rows: dict[int, dict[str, Any]]
    """Step -> its line of metrics.jsonl."""
    evals: dict[int, dict[str, Any]]
    """Number of steps learned before it -> its line of eval.jsonl."""
    before: Estimate | None
    after: Estimate | None
    note: str = ""
    """Why its numbers are not those of a whole run, if they are not."""

    @property
    def algorithm(self) -> str:
        return str(self.settings["algorithm.name"])

    @property
    def seed(self) -> int:
        return int(self.settings["run.seed"])

    @property
    def solved(self) -> dict[str, float]:
        """Task id -> share solved, of the last evaluation."""
        return self.evals[max(self.evals)].get("solved", {}) if self.evals and max(self.evals) > 0 else {}

    def series(self, key: str) -> dict[int, float]:
        """Step -> metric, where there is a finite one."""
        return {step: float(row[key]) for step, row in self.rows.items() if _is_number(row.get(key))}

    def smoothed(self, key: str) -> dict[int, float]:
        """Step -> mean of the metric's last `WINDOW` values up to there."""
        raw = self.series(key)
        values = list(raw.values())
        return {step: fmean(values[max(i + 1 - WINDOW, 0) : i + 1]) for i, step in enumerate(raw)}


def load_run(path: Path) -> RunRecord:
    """The record of a run folder; a run that is still going or was stopped is noted as unfinished."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: name folders that `spear train` wrote (run.dir)")
    if not (path / "config.toml").is_file():
        raise UserError(f"{path} is no run folder: it has no config.toml")
    try:
        settings = dict(_flat(tomllib.loads((path / "config.toml").read_text("utf-8"))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: config.toml is not valid TOML: {error}") from error
    for key, kind in (("algorithm.name", str), ("task.env", str), ("run.seed", int), ("run.steps", int)):
        if not isinstance(settings.get(key), kind):
            raise UserError(f"{path}: config.toml does not say {key}")
    summary = _summary(path)
    rows = _rows(path / "metrics.jsonl", required=(), cut_off=summary is None)
    if not rows:
        raise UserError(f"{path} has no metrics: metrics.jsonl is missing or empty, so it has not taken a step yet")
    evals = _rows(path / "eval.jsonl", required=_RATE, cut_off=summary is None)
    taken = max(rows) + 1
    if summary is not None and summary.get("steps") == max(taken, settings["run.steps"]):
        before, after = _estimate(summary.get("success_before")), _estimate(summary.get("success_after"))
        return RunRecord(path, settings, rows, evals, before, after)
    # A summary of fewer steps is that of an earlier leg: the run was resumed and has not come to its new end.
    note = f"unfinished: {taken} of {settings['run.steps']} steps"
    before, after = _estimate(evals.get(0)), None
    if evals and max(evals) > 0:
        after = _estimate(evals[max(evals)])
        note += f", success after is that at step {max(evals)}"
    return RunRecord(path, settings, rows, evals, before, after, note)


def _summary(path: Path) -> dict[str, Any] | None:
    if not (path / "summary.json").is_file():
        return None
    try:
        summary = json.loads((path / "summary.json").read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: summary.json is not valid JSON: {error}") from error
    if not isinstance(summary, dict):
        raise UserError(f"{path}: summary.json is not a JSON object")
    for key in ("success_before", "success_after"):
        rate = summary.get(key)
        if rate is not None and not (isinstance(rate, dict) and all(_is_number(rate.get(k)) for k in _RATE)):
            raise UserError(f"{path}: summary.json, {key} does not say {', '.join(_RATE)}")
    return summary


def _rows(path: Path, *, required: Sequence[str], cut_off: bool) -> dict[int, dict[str, Any]]:
    """Step -> line, in order of steps; with `cut_off` the last line may be half written."""
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    rows: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if cut_off and number == len(lines):
                break
            raise UserError(f"{path.parent}: {path.name}, line {number} is not valid JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path.parent}: {path.name}, line {number} is no JSON object with a step")
        for key in required:
            if not _is_number(row.get(key)):
                raise UserError(f"{path.parent}: {path.name}, line {number} does not say {key}")
        rows[row["step"]] = row
    return dict(sorted(rows.items()))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _estimate(rate: Any) -> Estimate | None:
    return Estimate(rate["success"], rate["low"], rate["high"], "Wilson, 1 seed") if rate else None


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: list[RunRecord]

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})

    def of_seed(self, seed: int) -> list[RunRecord]:
        return [run for run in self.runs if run.seed == seed]

    @cached_property
    def after_by_seed(self) -> dict[int, float]:
        """Seed -> success after; runs that repeat a seed are one seed, so they count as their mean."""
        found = {s: [run.after.value for run in self.of_seed(s) if run.after] for s in self.seeds}
        return {seed: fmean(values) for seed, values in found.items() if values}

    @property
    def success_before(self) -> float | None:
        return _mean([run.before.value for run in self.runs if run.before])

    @property
    def success_after(self) -> Estimate | None:
        if len(self.after_by_seed) > 1:
            mean = over_seeds(list(self.after_by_seed.values()))
            return Estimate(mean.value, max(mean.low, 0.0), min(mean.high, 1.0), mean.method)
        return next((run.after for run in self.runs if run.after), None)

    def last(self, key: str) -> float | None:
        """The moving average at the end, averaged over runs."""
        return _mean([list(s.values())[-1] for run in self.runs if (s := run.smoothed(key))])

    def best(self, key: str) -> float | None:
        return _mean([max(s.values()) for run in self.runs if (s := run.smoothed(key))])

    def mean(self, key: str) -> float | None:
        return _mean([fmean(s.values()) for run in self.runs if (s := run.series(key))])

    def as_dict(self) -> dict[str, Any]:
        """Every number of the table, and those of each run behind it."""
        return {
            "label": self.label,
            "algorithm": self.algorithm,
            "seeds": self.seeds,
            "success_before": self.success_before,
            "success_after": self.success_after and asdict(self.success_after),
            "best_reward": self.best("rollout/reward"),
            "last_reward": self.last("rollout/reward"),
            "entropy": self.last("policy/entropy"),
            "tool_turns": self.last("rollout/tool_turns"),
            "seconds_a_step": self.mean("time/step"),
            "replay_fired": self.mean("replay/fired"),
            "runs": [
                {"path": str(run.path), "seed": run.seed, "steps": max(run.rows) + 1, "note": run.note}
                | {"success_before": run.before and run.before.value, "success_after": run.after and run.after.value}
                for run in self.runs
            ],
        }


def arms_of(runs: Sequence[RunRecord]) -> list[Arm]:
    """Runs by algorithm, and by the settings in which runs of one algorithm differ; each base before its SPEAR."""
    arms: dict[str, list[RunRecord]] = {}
    for run in sorted(runs, key=lambda r: (r.seed, str(r.path))):
        siblings = [_telling(other) for other in runs if other.algorithm == run.algorithm]
        own = [f"{key}={_text(_telling(run).get(key))}" for key in _varying(siblings)]
        arms.setdefault(run.algorithm + (f" [{', '.join(own)}]" if own else ""), []).append(run)

    def place(arm: Arm) -> tuple[str, bool, str]:
        return _base(arm.algorithm), arm.algorithm.startswith("spear-"), arm.label

    return sorted((Arm(label, members) for label, members in arms.items()), key=place)


def _telling(run: RunRecord) -> dict[str, Any]:
    """The settings that can change a run's result, its seed apart."""
    return {key: value for key, value in run.settings.items() if _matters(key, run.algorithm)}


def _matters(key: str, algorithm: str) -> bool:
    if key.startswith(_SPEAR_ONLY):
        return algorithm.startswith("spear-")
    return key == "run.steps" or not key.startswith(("run.", *_NO_EFFECT))


def _varying(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = sorted({key for each in settings for key in each})
    return [key for key in keys if len({_text(each.get(key)) for each in settings}) > 1]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "unset" if value is None else json.dumps(value)


def _base(algorithm: str) -> str:
    return algorithm.removeprefix("spear-")


def warnings_of(arms: Sequence[Arm]) -> list[str]:
    """Every reason why the arms are not like for like."""
    said = [f"{run.path} is {run.note}; its arm's curves stop there" for arm in arms for run in arm.runs if run.note]
    for arm in arms:
        repeated = [seed for seed in arm.seeds if len(arm.of_seed(seed)) > 1]
        if repeated:
            said.append(
                f"{arm.label} has several runs of seed {_listed(repeated)}: they count as one seed, by their mean"
            )
    differing = {"seeds": {arm.label: _listed(arm.seeds) for arm in arms}}
    for key in sorted({key for arm in arms for key in _telling(arm.runs[0])} - {"algorithm.name"}):
        if not (
            key.startswith("algorithm.") and any(f"{key}=" in arm.label for arm in arms)
        ):  # a label says it already
            concerned = [arm for arm in arms if _matters(key, arm.algorithm)]
            differing[key] = {arm.label: _text(arm.runs[0].settings.get(key)) for arm in concerned}
    for key, values in differing.items():
        distinct = dict.fromkeys(values.values())
        if len(distinct) > 1:
            parts = (f"{v} in {', '.join(label for label, own in values.items() if own == v)}" for v in distinct)
            said.append(f"not like for like: {key} {'are' if key == 'seeds' else 'is'} {'; '.join(parts)}")
    return said


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def t_quantile(confidence: float, freedom: int) -> float:
    """t with P(|T| < t) = confidence, by bisecting the closed form for whole degrees of freedom (A&S 26.7.3-4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _t_within(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) * tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(odd + 2, freedom + 2, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of two or more seeds' values with Student's interval."""
    mean = fmean(values)
    half = t_quantile(0.95, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, f"Student t, {len(values)} seeds")


def over_tasks(differences: Sequence[float]) -> Estimate:
    """Mean of paired differences in [-1, 1] with Agresti and Min's interval.

    It adds half a task to each of solved/unsolved by one/other, and so has a width even where all tasks agree.
    """
    count = len(differences) + 2
    center = math.fsum(differences) / count
    spread = (math.fsum(d * d for d in differences) + 1) / count - center**2
    half = 1.959963984540054 * math.sqrt(spread / count)
    low, high = max(center - half, -1.0), min(center + half, 1.0)
    return Estimate(fmean(differences), low, high, f"Agresti-Min, {len(differences)} tasks")


def sign_test(better: int, worse: int) -> float:
    """Chance of a split at least this uneven, either way, if better and worse were equally likely."""
    trials, fewer = better + worse, min(better, worse)
    return min(1.0, 2 * math.fsum(math.comb(trials, k) / 2**trials for k in range(fewer + 1)))


@dataclass(frozen=True, slots=True)
class Pair:
    """`arm` minus `base` over the seeds both have."""

    arm: str
    base: str
    seeds: list[int]
    """With a success after in both."""
    difference: Estimate | None
    """Of success after, over seeds; None with fewer than two."""
    per_task: Estimate | None
    """Of success after, over the tasks both were evaluated on."""
    better: int
    """Tasks `arm` solves more often."""
    worse: int
    sign_test_p: float | None

    @property
    def text(self) -> str:
        return " ".join([f"{self.arm} minus {self.base}:", *self._over_seeds(), *self._over_tasks()])

    def _over_seeds(self) -> Iterator[str]:
        if not self.seeds:
            yield "no seed with a success after in both, so nothing can be paired."
        elif self.difference is None:
            yield "1 seed in common, too few to say anything about the algorithms."
        else:
            d = self.difference
            verdict = "no difference shown" if d.low <= 0 <= d.high else "higher" if d.low > 0 else "lower"
            if d.high - d.low < 1e-9:  # rounding leaves a width of 1e-16, on which any verdict would be nonsense
                verdict = "all seeds differ by the same amount, so this interval says nothing"
            yield f"success after {_points(d)} over {len(self.seeds)} seeds in common (95 % t-interval): {verdict}."

    def _over_tasks(self) -> Iterator[str]:
        if self.per_task is not None and self.sign_test_p is not None:
            yield (
                f"Task by task: {_points(self.per_task)} over the tasks both played, "
                f"{self.better} better, {self.worse} worse, sign test p = {self.sign_test_p:.2g}; "
                "this speaks of these trained policies, not of training again."
            )


def pairs_of(arms: Sequence[Arm]) -> list[Pair]:
    """Arms of one base algorithm with each other, so spear-x with x; one without a partner with the first."""
    pairs = [(arm, base) for base, arm in combinations(arms, 2) if _base(arm.algorithm) == _base(base.algorithm)]
    partnered = {arm.label for pair in pairs for arm in pair}
    first = next((arm for arm in arms if arm.label in partnered), arms[0])
    pairs += [(arm, first) for arm in arms if arm is not first and arm.label not in partnered]
    return [_pair(arm, base) for arm, base in pairs]


def _pair(arm: Arm, base: Arm) -> Pair:
    mine, its = arm.after_by_seed, base.after_by_seed
    seeds = sorted(mine.keys() & its.keys())
    tasks: dict[str, list[float]] = {}
    for seed in seeds:
        own, other = _solved(arm.of_seed(seed)), _solved(base.of_seed(seed))
        for task in sorted(own.keys() & other.keys()):
            tasks.setdefault(task, []).append(own[task] - other[task])
    differences = [fmean(values) for values in tasks.values()]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Pair(
        arm=arm.label,
        base=base.label,
        seeds=seeds,
        difference=over_seeds([mine[s] - its[s] for s in seeds]) if len(seeds) > 1 else None,
        per_task=over_tasks(differences) if differences else None,
        better=better,
        worse=worse,
        sign_test_p=sign_test(better, worse) if differences else None,
    )


def _solved(runs: Sequence[RunRecord]) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for run in runs:
        for task, share in run.solved.items():
            shares.setdefault(task, []).append(share)
    return {task: fmean(values) for task, values in shares.items()}


def _points(d: Estimate) -> str:
    return f"{100 * d.value:+.1f} points ({100 * d.low:+.1f} to {100 * d.high:+.1f})"


@dataclass(frozen=True)
class Comparison:
    """Everything `compare` found; prints itself on a rich console."""

    arms: list[Arm]
    pairs: list[Pair]
    warnings: list[str]
    out: Path

    @property
    def cells(self) -> list[list[str]]:
        """A row of texts an arm, one under each of the columns."""
        return [_cells(arm) for arm in self.arms]

    @property
    def notes(self) -> list[str]:
        """What a reader of the table must know."""
        many = f"Each of these {len(self.pairs)} intervals is a 95 % one, not corrected for there being several."
        warned = [f"warning: {text}" for text in self.warnings]
        return [_COLUMNS_NOTE, *(pair.text for pair in self.pairs), *([many] if len(self.pairs) > 1 else []), *warned]

    @cached_property
    def curves(self) -> dict[str, dict[str, Curve]]:
        """Panel -> arm's label -> its curve, where it has one."""
        found = {
            n: {a.label: curve([r.smoothed(key) for r in a.runs]) for a in self.arms} for n, key in _CURVES.items()
        }
        return {name: {label: c for label, c in lines.items() if c.steps} for name, lines in found.items()}

    def table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        # Arms are columns: that fits 80 characters, which is also what a pipe gets. Text: [key=value] is no markup.
        table = Table(_COLUMNS[0])
        for arm in self.arms:
            table.add_column(Text(arm.label), justify="right", overflow="fold")
        for name, *row in list(zip(_COLUMNS, *self.cells, strict=True))[1:]:
            table.add_row(name, *map(Text, row))
        return table

    def markdown(self) -> str:
        lines = [_COLUMNS, ["---"] + ["---:"] * (len(_COLUMNS) - 1), *self.cells]
        table = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join(["# Comparison", "", *table, "", *notes, "", "![Curves](compare.png)", ""])

    def as_dict(self) -> dict[str, Any]:
        return {
            "arms": [arm.as_dict() for arm in self.arms],
            "pairs": [asdict(pair) | {"text": pair.text} for pair in self.pairs],
            "warnings": self.warnings,
            "curves": {n: {label: asdict(c) for label, c in lines.items()} for n, lines in self.curves.items()},
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        texts = (Text(note, style="yellow" if note.startswith("warning") else "") for note in self.notes)
        apart = (part for text in texts for part in (Text(), text))
        return Group(self.table(), *apart, Text(f"\ncurves and all numbers are in {self.out}"))


def _cells(arm: Arm) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    after, numbers = arm.success_after, arm.as_dict()
    wilson = " Wilson" if after and after.method.startswith("Wilson") else ""
    return [
        arm.label,
        str(len(arm.seeds)),
        number(arm.success_before, ".1%"),
        f"{after.value:.1%} ({after.low:.1%} to {after.high:.1%}{wilson})" if after else "-",
        number(numbers["best_reward"], ".3g"),
        number(numbers["last_reward"], ".3g"),
        number(numbers["entropy"], ".3f"),
        number(numbers["tool_turns"], ".2f"),
        number(numbers["seconds_a_step"], ".2f"),
        number(numbers["replay_fired"], ".0%"),
    ]


def comparison_of(runs: Sequence[RunRecord], out: Path) -> Comparison:
    """The comparison of runs, with nothing written yet."""
    arms = arms_of(runs)
    return Comparison(arms, pairs_of(arms), warnings_of(arms), out)


def compare(run_dirs: Sequence[Path], out: Path) -> Comparison:
    """Compare runs; writes compare.png, compare.md and compare.json into `out`."""
    if not run_dirs:
        raise UserError("there is no run to compare: name one or more run folders")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: name a folder for the comparison")
    found = comparison_of([load_run(path) for path in {path.resolve(): path for path in run_dirs}.values()], out)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "compare.png", found.arms, found.curves)
    (out / "compare.md").write_text(found.markdown(), "utf-8")
    (out / "compare.json").write_text(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n", "utf-8")
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
