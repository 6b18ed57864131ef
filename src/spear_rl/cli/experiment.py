"""The command `experiment`: a plan's runs and their report."""

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from spear_rl.cli.shared import app, console, within
from spear_rl.errors import ConfigError, DiskError, UserError
from spear_rl.io.escaping import one_line
from spear_rl.io.lock import locked
from spear_rl.io.signals import Stopped, stop_on_signals

if TYPE_CHECKING:
    from spear_rl.app.compare.experiment import Block, Plan, Results

_WHAT = "A plan (TOML), or folders of existing runs."
_OUT = "Folder of cells and report; experiments_out/NAME of the plan if left out."


@app.command(no_args_is_help=True)
def experiment(
    what: Annotated[list[Path], Argument(metavar="PLAN.TOML|RUN_DIR...", help=_WHAT)],
    out: Annotated[Path | None, Option(help=_OUT)] = None,
    jobs: Annotated[
        int | None, Option(help="Processes at once; by cores or GPUs if left out.", callback=within(1, 1024))
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands, one per line, and do nothing.")] = False,
    report_only: Annotated[bool, Option("--report-only", help="Write the report of what is finished.")] = False,
    primary: Annotated[str, Option(help="Of existing runs: the measure; a plan declares its own.")] = "",
    reference: Annotated[
        str, Option(help="Of existing runs: the arm to compare with, or the folder of a run of it.")
    ] = "",
) -> None:
    """Run a plan's grid of arms, blocks and seeds like for like, and report it; give the same command again to go on.

    Examples: spear experiment experiments/lookup.toml --jobs 2

    spear experiment runs/base_0 runs/base_1 runs/spear_0 runs/spear_1
    """
    from spear_rl.app.compare.experiment import read_plan, results_of_runs

    # A pattern as seed_* also names the log of a cell, beside its folder.
    what = [path for path in what if not (path.suffix == ".log" and path.with_suffix("") in what)]
    if all(path.is_dir() for path in what):
        if dry_run or report_only or jobs:
            raise UserError("--dry-run, --report-only and --jobs are for a plan; these are folders of runs")
        if home := next((path for path in what if (path / "plan.json").is_file()), None):
            raise UserError(
                f"{home} is the folder of an experiment: name its plan, with --out {home} and --report-only"
            )
        folder = out or Path("experiments_out/runs")
        for name, owner in (("plan.json", "an experiment"), ("config.toml", "a run")):
            if (folder / name).exists():
                raise UserError(f"{folder} is the folder of {owner}: choose another --out, so that its report is kept")
        _tell(results_of_runs(what, folder, _command(), primary=primary or "eval_mean", reference=reference or None))
        return
    if len(what) > 1:
        odd = next(path for path in what if not path.is_dir())
        raise UserError(f"{odd} is not a folder: name one plan, or folders of runs only")
    if primary or reference:
        raise UserError(f"--primary and --reference are declared in a plan: write them into {what[0]}")
    plan = read_plan(what[0], out)
    if dry_run:
        from spear_rl.app.compare.experiment import commands

        for line in commands(plan):
            typer.echo(line)
        return
    try:
        with locked(plan.out):
            failed = _run(plan, jobs, report_only=report_only)
    except (ConfigError, DiskError) as error:
        raise type(error)(str(error).removeprefix("run.dir: ")) from error
    if failed:
        raise typer.Exit(1)


def _run(plan: "Plan", at_once: int | None, *, report_only: bool) -> bool:
    """Run what is not finished, and report; whether a cell failed or is damaged."""
    from spear_rl.app.compare.experiment import (
        Runner,
        check_folders,
        declare,
        jobs_of,
        note_first_cell,
        processes_at_once,
        results_of_plan,
    )
    from spear_rl.app.compare.experiment.live import LiveTable
    from spear_rl.app.resume import command_to_go_on

    check_folders(plan)
    declare(plan)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    jobs = jobs_of(plan)
    todo = [job for job in jobs if job.state != "done"]
    if todo and not report_only:
        count = processes_at_once(plan, at_once)
        cells = sum(job.is_cell for job in jobs)
        done = cells - sum(job.is_cell for job in todo)
        console.print(f"{cells} cells, {done} of them done, {count} at once -> {plan.out}", soft_wrap=True)
        note_first_cell(plan)
        try:
            with stop_on_signals(_stopping) as stop, LiveTable(console, jobs, count) as live:
                Runner(jobs, count, live.notice, live.tick).run(stop)
        except Stopped as stopped:
            console.print(f"stopped; what was finished is kept; go on: {shlex.join(_command())}", soft_wrap=True)
            raise typer.Exit(stopped.exit_code) from None
    results = results_of_plan(plan, jobs, _command())
    failed = [f"{job.name} failed: {job.error} ({job.log})" for job in jobs if job.state == "failed"]
    damaged = [
        f"{cell['cell']} is damaged: {cell['error']}; to mend it: {command_to_go_on(cell['folder'], 'train')}"
        ", or delete its folder to have it played again"
        for cell in results.cells
        if cell["state"] == "damaged"
    ]
    try:
        _tell(results)
    finally:  # a report that cannot be written hides none of them
        for text in [*failed, *damaged]:
            console.print(Text(one_line(text), style="red"), soft_wrap=True)
        if failed:
            console.print(f"{len(failed)} failed; to try them again: {shlex.join(_command())}", soft_wrap=True)
    return bool(failed or damaged)


def _stopping() -> None:
    console.print("stopping: every cell saves its last whole step; a second Ctrl-C ends them now", soft_wrap=True)


def _command() -> list[str]:
    return ["spear", *sys.argv[1:]]


def _print_table(results: "Results", block: "Block") -> None:
    """A block's table: a row per arm, intervals below their means where it is too wide, or else a line per number."""
    place = [*range(2 + len(results.measures)), results.header().index("optimizer steps")]
    header, *rows = ([one_line(row[n]) for n in place] for row in [results.header(), *results.rows(block)])
    broken = [[arm, *(cell.replace(" (", "\n(") for cell in cells)] for arm, *cells in rows]
    for names, cells_of in ((header, rows), ([name.replace(" ", "\n", 1) for name in header], broken)):
        columns = zip(names, *cells_of, strict=True)
        widths = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
        if sum(widths) + 3 * len(widths) < console.width:
            table = Table(*(Column(name, no_wrap=True) for name in names))
            for row in cells_of:
                table.add_row(*map(Text, row))
            console.print(table)
            return
    widest = max(map(len, header[1:]))
    for arm, *cells in rows:
        console.print(Text(arm, overflow="fold"))
        for name, cell in zip(header[1:], cells, strict=True):
            console.print(Text(f"  {name:<{widest}}  {cell}"), soft_wrap=True)


def _tell(results: "Results") -> None:
    """Write the report and print its tables."""
    from spear_rl.app.compare.experiment import difference_rows, write_report

    write_report(results)
    for block in results.blocks:
        if len(results.blocks) > 1:
            console.print(Text(one_line(block.label), style="bold"))
        _print_table(results, block)
        for name, measure, points, shown_by, _ in difference_rows(block):
            console.print(Text(one_line(f"{name}, {measure}: {points}: {shown_by}")), soft_wrap=True)
    for text in results.summary:
        console.print(Text(one_line(text), style="bold"), soft_wrap=True)
    for text in results.warnings:
        console.print(Text(one_line(f"warning: {text}"), style="yellow"), soft_wrap=True)
    console.print(f"report: {results.out / 'report.html'}", soft_wrap=True)
    if find_spec("pyarrow") and find_spec("jinja2"):
        from spear_rl.app.show.view.report import write_runs_of

        arms = {
            f"{block.label}, {arm.label}" if len(results.blocks) > 1 else arm.label: [run.path for run in arm.runs]
            for block in results.blocks
            for arm in block.arms
        }
        if written := write_runs_of(arms, results.out / "runs.html"):
            console.print(f"curves and episodes of its runs: {written}", soft_wrap=True)
