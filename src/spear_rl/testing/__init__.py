"""Checks for authors of environments and engines: what would go wrong in a training run. Never imports torch."""

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
from spear_rl.testing.checks import crash_fault, expert_faults, task_faults, worker_faults
from spear_rl.testing.engine import check_engine
from spear_rl.testing.play import STRANGE, Timing

__all__ = ["STRANGE", "Timing", "check_engine", "check_environment", "check_panels", "check_tasks", "loaded_tasks"]

MAX_TURNS = 20
MAX_STEP_MS = 250.0
MAX_RESET_MS = 5000.0
SPLITS = ("train", "validation", "test")


def check_tasks(
    tasks_of: TasksFn, *, options: Mapping[str, Any] | None = None, num_tasks: int = 5, timing: Timing | None = None
) -> list[str]:
    """All faults of an environment: of its panels, and of `num_tasks` tasks per split, in-process and in a worker.

    Args:
        options: passed to `tasks_of` with the split.
        timing: filled with the times of resets and steps.
    """
    options = dict(options or {})
    faults = check_panels(tasks_of, **options)
    for split in SPLITS:
        try:
            panel = panel_of(tasks_of, split, **options)
            first_tasks = panel[:num_tasks]
        except KeyboardInterrupt:
            raise
        except BaseException:  # reported by check_panels
            continue
        if crash := crash_fault(first_tasks, MAX_TURNS):
            faults.append(crash)
            break  # other splits may crash this process, too
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
    """The faults of the environments of `tasks`, one sentence per fault; an empty list is a pass.

    Args:
        in_worker: also play in a worker process and compare; a worker must be able to import the tasks' module.
        timing: filled with the times of resets and steps.
    """
    if not len(tasks):
        return ["there is no task at all"]
    try:
        tasks = [checked_task(task, "tasks") for task in tasks]
    except ContractError as error:
        return [error.what]
    faults = [f"the task id {name!r} occurs {n} times" for name, n in Counter(t.id for t in tasks).items() if n > 1]
    timing = Timing() if timing is None else timing
    task_ids: dict[str, list[str]] = {}
    tasks = tasks[:num_tasks]
    with same_folder():
        for task in tasks:
            for fault in task_faults(task, max_turns, timing):
                task_ids.setdefault(fault, []).append(task.id)
    for fault, (first, *others) in task_ids.items():
        faults.append(f"{first}{f' and {len(others)} more' if others else ''}: {fault}")
    if not task_ids:
        faults += expert_faults(tasks)
        faults += worker_faults(tasks, max_turns) if in_worker else []
    if timing.step_ms > MAX_STEP_MS:
        faults.append(f"a step takes {timing.step_ms:.0f} ms on average: a training would wait for it most of the time")
    if timing.reset_ms > MAX_RESET_MS:
        faults.append(f"making and resetting an environment takes {timing.reset_ms:.0f} ms on average")
    return faults


def check_panels(tasks_of: TasksFn, **options: Any) -> list[str]:
    """The faults of an environment's splits; `options` are passed to `tasks_of`."""
    faults, ids = [], {}
    for split in SPLITS:
        try:
            ids[split], again = ([task.id for task in panel_of(tasks_of, split, **options)] for _ in range(2))
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
