"""For authors: says what is wrong with an environment before a training does. Standard library and our types only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import same_folder
from spear_rl.rollout.contract import ContractError, checked_task
from spear_rl.rollout.env import Task, TasksFn
from spear_rl.rollout.tasks import loaded_tasks, panel_of
from spear_rl.testing.faults import deadly_fault, expert_faults, task_faults, worker_faults
from spear_rl.testing.play import STRANGE, Timing

__all__ = ["STRANGE", "Timing", "check_environment", "check_panels", "check_tasks", "loaded_tasks"]

MAX_TURNS = 20
MAX_STEP_MS = 250.0
MAX_RESET_MS = 5000.0
SPLITS = ("train", "validation", "test")


def check_tasks(
    tasks_of: TasksFn, *, options: Mapping[str, Any] | None = None, num_tasks: int = 5, timing: Timing | None = None
) -> list[str]:
    """All that is wrong with an environment: with its panels, and with `num_tasks` tasks of each, here and in a worker.

    Args:
        options: go to the environment with the split.
        timing: is filled with what resets and steps took.
    """
    options = dict(options or {})
    faults = check_panels(tasks_of, **options)
    for split in SPLITS:
        try:
            panel = panel_of(tasks_of, split, **options)
            tried = panel[:num_tasks]
        except KeyboardInterrupt:
            raise
        except BaseException:  # check_panels has said so
            continue
        if deadly := deadly_fault(tried, MAX_TURNS):
            faults.append(deadly)
            break  # the others may be just as deadly
        if len(panel):
            faults += check_environment(panel, num_tasks=num_tasks, in_worker=True, timing=timing)
    return list(dict.fromkeys(faults))


def check_environment(
    tasks: Sequence[Task],
    *,
    num_tasks: int = 5,
    max_turns: int = MAX_TURNS,
    in_worker: bool = False,
    timing: Timing | None = None,
) -> list[str]:
    """What is wrong with the environments of `tasks`, one sentence a fault; an empty list is a pass.

    Args:
        in_worker: also play in a process of its own, and compare. Tasks must be importable from a module for that.
        timing: is filled with what resets and steps took.
    """
    if not len(tasks):
        return ["there is no task at all"]
    try:
        tasks = [checked_task(task, "tasks") for task in tasks]
    except ContractError as error:
        return [error.what]
    faults = [f"the task id {name!r} occurs {n} times" for name, n in Counter(t.id for t in tasks).items() if n > 1]
    timing = Timing() if timing is None else timing
    found: dict[str, list[str]] = {}
    tried = tasks[:num_tasks]
    with same_folder():
        for task in tried:
            for fault in task_faults(task, max_turns, timing):
                found.setdefault(fault, []).append(task.id)
    faults += [f"{names[0]}{_and_more(names)}: {fault}" for fault, names in found.items()]
    if not found:
        faults += expert_faults(tried)
        faults += worker_faults(tried, max_turns) if in_worker else []
    if timing.step_ms > MAX_STEP_MS:
        faults.append(f"a step takes {timing.step_ms:.0f} ms on average: a training would wait for it most of the time")
    if timing.reset_ms > MAX_RESET_MS:
        faults.append(f"making and resetting an environment takes {timing.reset_ms:.0f} ms on average")
    return faults


def check_panels(tasks_of: TasksFn, **options: Any) -> list[str]:
    """What is wrong with the splits of an environment; `options` go to it with the split."""
    faults, ids = [], {}
    for split in SPLITS:
        try:
            ids[split] = [task.id for task in panel_of(tasks_of, split, **options)]
            again = [task.id for task in panel_of(tasks_of, split, **options)]
        except ContractError as error:
            faults.append(error.what)
            continue
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            faults.append(f"the split {split} is missing: tasks({split!r}) raised {in_words(error)}")
            continue
        if not ids[split]:
            faults.append(f"the split {split} has no task")
        if ids[split] != again:
            faults.append(f"the split {split} came in another order, or with other tasks, when asked for again")
    for one, other in combinations(ids, 2):
        shared = sorted({*ids[one]} & {*ids[other]})
        if shared:
            faults.append(f"{one} and {other} share {len(shared)} tasks, {shared[0]} for one")
    return faults


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
