"""Runs side by side: arms over seeds, paired differences, curves. Reads run folders; never imports torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from spear_rl.app.compare.arms import Arm, arms_of, warnings_of
from spear_rl.app.compare.estimates import NO_WIDTH, Estimate, over_seeds, over_tasks, sign_test, t_quantile
from spear_rl.app.compare.pairs import Pair, pairs_of
from spear_rl.app.compare.plots import Curve, curve, curves_of, draw
from spear_rl.app.compare.runs import WINDOW, RunRecord, load_run
from spear_rl.errors import UserError
from spear_rl.io.escaping import markdown, one_line

__all__ = [
    "WINDOW", "Arm", "Comparison", "Curve", "Estimate", "Pair", "RunRecord", "arms_of", "compare", "comparison_of",
    "curve", "draw", "load_run", "over_seeds", "over_tasks", "pairs_of", "sign_test", "t_quantile", "warnings_of",
]  # fmt: skip

_NUMBERS = {
    "best reward": ("best_reward", ".3g"), "last reward": ("last_reward", ".3g"), "entropy": ("entropy", ".3f"),
    "tool turns": ("tool_turns", ".2f"), "s/step": ("seconds_a_step", ".2f"), "replay fired": ("replay_fired", ".0%"),
}  # fmt: skip
"""Column -> key of `Arm.as_dict` and format."""
_COLUMNS = ("algorithm", "seeds", "success before", "success after (95 %)", *_NUMBERS)
_COLUMNS_NOTE = (
    f"Rewards, entropy and tool turns are of training episodes, as means of {WINDOW} steps: the last, or the best. "
    "Replay fired: share of steps that trained on stored episodes."
)


@dataclass(frozen=True)
class Comparison:
    """Everything `compare` found; prints itself on a rich console."""

    arms: list[Arm]
    pairs: list[Pair]
    warnings: list[str]
    out: Path

    @property
    def cells(self) -> list[list[str]]:
        """One row per arm, one text per column."""
        rows = []
        for arm in self.arms:
            before, after, numbers = arm.success_before, arm.success_after, arm.as_dict()
            wilson = " Wilson" if after and after.method.startswith("Wilson") else ""
            row = [arm.label, str(len(arm.seeds)), "-" if before is None else f"{before:.1%}"]
            interval = f"{after.low:.1%} to {after.high:.1%}{wilson}" if after else ""
            if after and after.high - after.low < NO_WIDTH:
                interval = "all seeds equal"
            row.append(f"{after.value:.1%} ({interval})" if after else "-")
            for key, form in _NUMBERS.values():
                row.append("-" if numbers[key] is None else format(numbers[key], form))
            rows.append(row)
        return rows

    @property
    def notes(self) -> list[str]:
        """What a reader of the table must know."""
        notes = [_COLUMNS_NOTE, *(pair.text for pair in self.pairs)]
        if len(self.pairs) > 1:
            notes.append(
                f"Each of these {len(self.pairs)} intervals is a 95 % one, not corrected for there being several."
            )
        return notes + [f"warning: {text}" for text in self.warnings]

    @cached_property
    def curves(self) -> dict[str, dict[str, Curve]]:
        """Panel -> arm's label -> its curve, where it has one."""
        return curves_of(self.arms)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.table import Column, Table
        from rich.text import Text

        # Arms are columns, in as many tables as it takes to break no number. Text: [key=value] is no markup.
        widest = max((len(word) for row in self.cells for cell in row[1:] for word in cell.split()), default=1)
        first = max(map(len, _COLUMNS))
        count = max((options.max_width - first - 4) // (widest + 3), 1)
        for begin in range(0, max(len(self.cells), 1), count):
            (corner, *labels), *rows = zip(_COLUMNS, *self.cells[begin : begin + count], strict=True)
            arms = (Column(Text(one_line(label)), justify="right", overflow="fold") for label in labels)
            table = Table(Column(corner, no_wrap=True), *arms)
            for name, *values in rows:
                table.add_row(name, *map(Text, values))
            yield table
        for note in self.notes:
            yield Text()
            yield Text(one_line(note), style="yellow" if note.startswith("warning") else "", overflow="fold")
        yield Text(f"\ncurves and all numbers are in {one_line(str(self.out))}", overflow="fold")

    def markdown(self) -> str:
        lines = [_COLUMNS, ["---"] + ["---:"] * (len(_COLUMNS) - 1), *self.cells]
        table = ["| " + " | ".join(map(markdown, line)) + " |" for line in lines]
        notes = [f"- {markdown(note)}" for note in self.notes]
        return "\n".join(["# Comparison", "", *table, "", *notes, "", "![Curves](compare.png)", ""])

    def as_dict(self) -> dict[str, Any]:
        return {
            "arms": [arm.as_dict() for arm in self.arms],
            "pairs": [asdict(pair) | {"text": pair.text} for pair in self.pairs],
            "warnings": self.warnings,
            "curves": {n: {label: asdict(c) for label, c in lines.items()} for n, lines in self.curves.items()},
        }


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
    distinct = {path.resolve(): path for path in run_dirs}
    found = comparison_of([load_run(path) for path in distinct.values()], out)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "compare.png", found.arms, found.curves)
    (out / "compare.md").write_text(found.markdown(), "utf-8")
    (out / "compare.json").write_text(json.dumps(found.as_dict(), indent=1, allow_nan=False) + "\n", "utf-8")
    return found
