"""Checks for authors of environments and engines: what would go wrong in a training run. Never imports torch."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from spear_rl.errors import UserError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import same_folder
from spear_rl.rollout.contract import ContractError, checked_task
from spear_rl.rollout.env import Task, TasksFn
from spear_rl.rollout.tasks import loaded_tasks, panel_of
from spear_rl.testing.checks import Faults, crash_fault, expert_faults, rebuilt_faults, task_faults, worker_faults
from spear_rl.testing.engine import check_engine
from spear_rl.testing.play import STRANGE, Timing

__all__ = [
    "STRANGE", "Timing", "check_engine", "check_environment", "check_panels", "check_tasks", "loaded_tasks", "notes_on",
]  # fmt: skip

MAX_TURNS = 20
MAX_STEP_MS = 250.0
MAX_RESET_MS = 5000.0
SPLITS = ("train", "validation", "test")
_QUOTED_OR_NUMBER = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+""")


def check_tasks(
    tasks_of: TasksFn, *, options: Mapping[str, Any] | None = None, num_tasks: int = 5, timing: Timing | None = None
) -> list[str]:
    """All faults of an environment: of its panels, and of `num_tasks` tasks per split, in-process and in a worker.

    Args:
        options: passed to `tasks_of` with the split.
        timing: filled with the times of resets and steps.
    """
    options, timing = dict(options or {}), Timing() if timing is None else timing
    faults = [("", fault) for fault in check_panels(tasks_of, **options)]
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
            found = list(_faults(panel, num_tasks, MAX_TURNS, timing, in_worker=True))
            again = () if found else panel_of(tasks_of, split, **options)[:num_tasks]
            faults += found or rebuilt_faults(first_tasks, again, MAX_TURNS)
    return _grouped([*faults, *_slowness(timing)])


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
    timing = Timing() if timing is None else timing
    return _grouped([*_faults(tasks, num_tasks, max_turns, timing, in_worker=in_worker), *_slowness(timing)])


def _faults(tasks: Sequence[Task], num_tasks: int, max_turns: int, timing: Timing, *, in_worker: bool) -> Faults:
    if not len(tasks):
        yield "", "there is no task at all"
        return
    try:
        tasks = [checked_task(task, "tasks") for task in tasks]
    except ContractError as error:
        yield "", error.what
        return
    for name, count in Counter(task.id for task in tasks).items():
        if count > 1:
            yield "", f"the task id {name!r} occurs {count} times"
    tasks = tasks[:num_tasks]
    with same_folder():
        found = [(task.id, fault) for task in tasks for fault in task_faults(task, max_turns, timing)]
    yield from found
    if not found:
        yield from expert_faults(tasks, timing)
        yield from worker_faults(tasks, max_turns) if in_worker else ()


def _slowness(timing: Timing) -> Faults:
    if timing.step_ms > MAX_STEP_MS:
        yield "", f"a step takes {timing.step_ms:.0f} ms on average: a training would wait for it most of the time"
    if timing.reset_ms > MAX_RESET_MS:
        yield "", f"making and resetting an environment takes {timing.reset_ms:.0f} ms on average"


def _grouped(faults: Iterable[tuple[str, str]]) -> list[str]:
    """One line per fault, with the number of tasks that have it; texts that differ in numbers and quotes are equal."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for task_id, fault in faults:
        groups.setdefault(_QUOTED_OR_NUMBER.sub("", fault), []).append((task_id, fault))
    lines = []
    for (first_id, fault), *others in groups.values():
        ids = {task_id for task_id, _ in others} - {first_id}
        where = f"{first_id}{f' and {len(ids)} more' if ids else ''}: " if first_id else ""
        texts = {text for _, text in others} - {fault}
        lines.append(f"{where}{fault}{f' (and {len(texts)} more like it)' if texts else ''}")
    return lines


def notes_on(timing: Timing) -> list[str]:
    """What is no fault but may surprise, one sentence each."""
    if timing.tool_turns or not timing.steps:
        return []
    way_out = "set used_tool=True in the StepResult of a turn that used one, or algorithm.bonus.mode=none"
    return [f"no turn ever used a tool: the bonus will pay nothing ({way_out})"]


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
