"""Like-for-like experiments: a plan's grid of runs, each one `spear train` command, and their report.

Reads settings and run folders only; the runs are processes of their own, so torch is never imported here.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spear_rl.app.compare.arms import Arm, arms_of, warnings_of
from spear_rl.app.compare.experiment.about import cells_ran_on, declaration, declare, machine, note_first_cell, now
from spear_rl.app.compare.experiment.analysis import Block, lacking, unlike_evaluations
from spear_rl.app.compare.experiment.measures import MEASURES
from spear_rl.app.compare.experiment.plan import Plan, read_plan
from spear_rl.app.compare.experiment.report import Results, difference_rows, write_report
from spear_rl.app.compare.experiment.runner import Job, Runner, jobs_of, processes_at_once, standing
from spear_rl.app.compare.experiment.state import check_folders, finished_run
from spear_rl.app.compare.runs import RunRecord, load_run
from spear_rl.errors import UserError
from spear_rl.settings.ranges import nearest, shown

__all__ = [
    "Block", "Job", "Plan", "Results", "Runner", "check_folders", "commands", "declare", "difference_rows", "jobs_of",
    "note_first_cell", "processes_at_once", "read_plan", "results_of_plan", "results_of_runs", "write_report",
]  # fmt: skip


def commands(plan: Plan) -> list[str]:
    """Every command of the plan in order, quoted for a shell."""
    return [shlex.join(["spear", *job.arguments]) for job in jobs_of(plan)]


def results_of_plan(plan: Plan, jobs: Sequence[Job], command: Sequence[str]) -> Results:
    """The results of a plan's finished cells."""
    failures = {job.folder: job for job in jobs if job.state != "done"}
    found: dict[tuple[str, ...], dict[str, list[RunRecord]]] = {}
    cells, warnings = list[dict[str, Any]](), list(plan.notes)
    for cell in plan.cells:
        arms = found.setdefault(cell.block, {})
        job = failures.get(cell.folder)
        state, why = standing(job) if job else ("done", "")
        try:
            run = finished_run(cell)
        except UserError as error:
            run, state, why = None, "damaged", str(error)
        if run:
            arms.setdefault(cell.arm, []).append(run)
        cells.append({"cell": cell.name, "folder": str(cell.folder), "state": state, "error": why})
    unfinished = sum(cell["state"] != "done" for cell in cells)
    if unfinished:
        warnings.append(
            f"{unfinished} of {len(cells)} cells have no result yet; means are over the seeds that have one"
        )
    declared, when, changes = declaration(plan)
    blocks = [
        Block(
            " / ".join(block) or plan.name,
            [Arm(name, arms[name]) for name in plan.arms if name in arms],
            plan.reference,
            [plan.primary, *plan.secondary],
        )
        for block, arms in found.items()
        if arms
    ]
    about = {"date": now(), "command": shlex.join(command), "plan": str(plan.path), **declared, **machine()}
    about["cells ran with"] = cells_ran_on([cell.folder for cell in plan.cells])
    return Results(
        plan.name,
        blocks,
        plan.primary,
        plan.secondary,
        plan.out,
        [*changes, *warnings, *lacking(blocks), *unlike_evaluations(blocks)],
        about,
        cells,
        plan.text,
        plan.question,
        when,
        len({cell.block for cell in plan.cells}),
    )


def results_of_runs(
    folders: Sequence[Path], out: Path, command: Sequence[str], *, primary: str, reference: str | None
) -> Results:
    """The results of existing runs: blocks by task, arms by settings as `spear compare` names them."""
    if primary not in MEASURES:
        known = f"it is one of: {', '.join(MEASURES)}"
        raise UserError(f"--primary cannot be {shown(primary)}{nearest(primary, list(MEASURES))}; {known}")
    runs = [load_run(path) for path in {path.resolve(): path for path in folders}.values()]
    warnings = [f"{run.path} is left out: it is {run.note}" for run in runs if run.note]
    whole = [run for run in runs if not run.note]
    if whole and all(MEASURES[primary](run) is None for run in whole):
        had = [name for name, measure in MEASURES.items() if any(measure(run) is not None for run in whole)]
        raise UserError(f"--primary={primary}: no run has it; they have: {', '.join(had) or 'no measure at all'}")
    tasks: dict[str, list[RunRecord]] = {}
    for run in whole:
        tasks.setdefault(_task(run), []).append(run)
    secondary = [name for name in ("eval_mean", "eval_final") if name != primary]
    blocks, known_arms, others, is_known = [], dict[str, None](), list[str](), False
    for task, members in tasks.items():
        arms = arms_of(members)
        known_arms |= dict.fromkeys(arm.label for arm in arms)
        wanted = [arm for arm in arms if reference is not None and _is_called(arm, reference)]
        base = (wanted or arms)[0].label
        if wanted:
            is_known = True
        elif reference is not None:
            others.append(f"{task}: no arm is {reference} here, so arms are compared with {base}")
        # The reference first, so that it is the first line of every table.
        arms.sort(key=lambda arm: arm.label != base)
        blocks.append(Block(task, arms, base, [primary, *secondary]))
        warnings += [f"{task}: {text}" if len(tasks) > 1 else text for text in warnings_of(arms)]
    if reference is not None and not is_known:
        known = f"name one of the folders that are finished, or an arm: {', '.join(known_arms) or 'there is none'}"
        raise UserError(f"--reference is no arm of these runs: {shown(reference)}; {known}")
    warnings += [*others, *lacking(blocks), *unlike_evaluations(blocks)]
    cells = [{"cell": str(r.path), "folder": str(r.path), "state": "unfinished" if r.note else "done"} for r in runs]
    about: dict[str, Any] = {"date": now(), "command": shlex.join(command), **machine()}
    about["cells ran with"] = cells_ran_on([run.path for run in whole])
    warnings.insert(0, "these runs were not made by a plan: no primary measure was declared before they ran")
    return Results("existing runs", blocks, primary, secondary, out, warnings, about, cells)


def _is_called(arm: Arm, name: str) -> bool:
    """Whether an arm has this label, or the run in this folder."""
    place = os.path.realpath(name)  # Path.resolve fails at a link that leads to itself
    return arm.label == name or any(os.path.realpath(run.path) == place for run in arm.runs)


def _task(run: RunRecord) -> str:
    options = {
        key.removeprefix("task.options."): v for key, v in run.settings.items() if key.startswith("task.options.")
    }
    told = ", ".join(f"{key}={value}" for key, value in sorted(options.items()))
    return f"{run.settings['task.env']} ({told})" if told else str(run.settings["task.env"])
