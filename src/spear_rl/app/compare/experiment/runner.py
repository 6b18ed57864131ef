"""Runs the commands of a plan, several processes at once; what is finished is left, what failed is retried once."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spear_rl.app.compare.experiment.cells import Cell, ColdStart, gpus, on_gpu
from spear_rl.app.compare.experiment.plan import Plan
from spear_rl.app.compare.experiment.state import State, cell_state, cold_state, holder, progress
from spear_rl.app.config import Config
from spear_rl.errors import DiskError
from spear_rl.io.escaping import clipped
from spear_rl.io.signals import Stop, Stopped

JobState = Literal["waiting", "running", "elsewhere", "done", "failed"]
_POLL, _LONGEST_KILL = 0.2, 30.0
_LOG_END = 65_536
ATTEMPTS = 2


@dataclass
class Job:
    """One command of the plan and how it stands."""

    name: str
    arguments: list[str]
    """After `spear`."""
    folder: Path
    config: Config
    on_disk: Callable[[], State]
    needs: "Job | None" = None
    state: JobState = "waiting"
    attempts: int = 0
    error: str = ""
    """Why it failed, or who has it."""
    began: float = 0.0
    seconds: float = 0.0
    """Of all its attempts in this command."""
    first_step: int = 0
    """Steps that earlier commands have taken."""
    was_done: bool = False
    """Finished by an earlier command."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    gpu: str = ""

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def is_cell(self) -> bool:
        return self.arguments[0] == "train"


def jobs_of(plan: Plan) -> list[Job]:
    """All commands in order: a cold start comes before the first cell that needs it."""
    jobs: list[Job] = []
    cold: dict[Path, Job] = {}
    for cell in plan.cells:
        shared = cell.cold_start
        if shared and shared.folder not in cold:
            cold[shared.folder] = _cold_job(shared)
            jobs.append(cold[shared.folder])
        jobs.append(_cell_job(cell, cold[shared.folder] if shared else None))
    needed = {id(job.needs) for job in jobs if job.on_disk() != "finished"}
    for job in jobs:
        # A cold start that no unfinished cell needs may have been deleted.
        if job.on_disk() == "finished" or not (job.is_cell or id(job) in needed):
            job.state, job.was_done = "done", True
        elif job.is_cell and (found := progress(job.folder)):
            job.first_step = min(found.step, job.config.run.steps - 1)
    return jobs


def _cell_job(cell: Cell, needs: Job | None) -> Job:
    return Job(cell.name, cell.arguments, cell.folder, cell.config, lambda: cell_state(cell), needs)


def _cold_job(cold: ColdStart) -> Job:
    return Job(cold.name, cold.arguments, cold.folder, cold.config, lambda: cold_state(cold))


def processes_at_once(plan: Plan, asked: int | None) -> int:
    """--jobs, or what the plan says, or one per GPU, or as many as the cores have room for."""
    if asked or plan.jobs:
        return asked or plan.jobs
    configs = [cell.config for cell in plan.cells]
    if any(map(on_gpu, configs)):
        return max(len(gpus()), 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // max(max(config.run.threads, 1) for config in configs), 1)


def standing(job: Job) -> tuple[str, str]:
    """A job's state and the reason; of a job that this command did not start, by what earlier ones left on disk."""
    if job.state != "waiting":
        return job.state, job.error
    found = progress(job.folder) if job.is_cell else None
    parts = [f"step {found.step} of {job.config.run.steps}"] if found else []
    parts += [f"the last line of its log: {line}"] if (line := _last_line(job.log)) else []
    if parts or job.on_disk() == "begun":
        return "unfinished", "; ".join(parts)
    state, why = standing(job.needs) if job.needs else ("", "")
    return "waiting", f"its {job.needs.name} is {state}: {why}" if job.needs and why else ""


Notice = Callable[[Job, str], None]
"""Called with a job when something happened to it, and what, in words."""


class Runner:
    """The pool. `run` returns when no job can go on, or raises Stopped once all processes have ended."""

    def __init__(self, jobs: Sequence[Job], at_once: int, notice: Notice, tick: Callable[[], None]) -> None:
        self.jobs, self._at_once, self._notice, self._tick = jobs, at_once, notice, tick

    def run(self, stop: Stop) -> None:
        try:
            with stop.finished():
                while self._advance():
                    stop.check()
                    time.sleep(_POLL)
        except BaseException as error:
            with stop.finished():
                self._end_all(error)
            raise

    def _advance(self) -> bool:
        """Look after every job once; whether anything is left to do."""
        for job in self.jobs:
            if job.state == "running":
                self._look_after(job)
            elif job.state == "elsewhere" and not holder(job.folder):
                self._settle(job, "it ended in the other process")
        running = sum(job.state == "running" for job in self.jobs)
        for job in self.jobs:
            if job.state != "waiting":
                continue
            if job.needs and job.needs.state == "failed":
                job.state, job.error = "failed", f"its {job.needs.name} failed"
                self._notice(job, f"cannot run: {job.error}")
            elif running < self._at_once and (job.needs is None or job.needs.state == "done"):
                running += self._begin(job)
        self._tick()
        return any(job.state in ("running", "elsewhere", "waiting") for job in self.jobs)

    def _begin(self, job: Job) -> bool:
        """Start a job's process; one that another process is still at is waited for instead."""
        if found := holder(job.folder):
            job.state, job.error = "elsewhere", found
            self._notice(job, f"is being run by {found}: waiting for it")
            return False
        goes_on = job.on_disk() == "begun"
        job.state, job.began = "running", time.monotonic()
        job.attempts += 1
        job.gpu = self._free_gpu() if on_gpu(job.config) else ""
        try:
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            with job.log.open("ab") as log:
                command = [sys.executable, "-m", "spear_rl.cli", *job.arguments]
                # A session of its own: Ctrl-C reaches this process alone, which then ends the others in order.
                job.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_variables(job),
                    start_new_session=True,
                )
        except OSError as error:
            raise DiskError(f"{job.log} cannot be written: {error.strerror}") from error
        self._notice(job, "goes on" if goes_on else "begins")
        return True

    def _look_after(self, job: Job) -> None:
        assert job.process
        code = job.process.poll()
        if code is None:
            return
        job.seconds += time.monotonic() - job.began
        job.process = None
        if code and (found := holder(job.folder)):  # an earlier command's process began it at the same moment
            job.state, job.error = "elsewhere", found
            job.attempts -= 1
            self._notice(job, f"is being run by {found}: waiting for it")
            return
        self._settle(job, _ending(code, job.log))

    def _settle(self, job: Job, ending: str) -> None:
        """Decide what becomes of a job without a process, by what is on disk."""
        if job.on_disk() == "finished":
            job.state, job.error = "done", ""
            self._notice(job, "is done")
        elif job.attempts < ATTEMPTS:
            if job.attempts:
                self._notice(job, f"failed and is retried: {ending}")
            job.state, job.error = "waiting", ""
        else:
            job.state, job.error = "failed", ending
            self._notice(job, f"failed: {ending}")

    def _free_gpu(self) -> str:
        taken = Counter(job.gpu for job in self.jobs if job.state == "running" and job.process)
        return min(gpus() or ("",), key=lambda gpu: taken[gpu])

    def _end_all(self, error: BaseException) -> None:
        """Let every process save its state and end; a second signal ends them at once."""
        going = [job for job in self.jobs if job.process]
        sent, limit = 0, 0.0
        while any(job.process and job.process.poll() is None for job in going):
            try:
                if not sent or (isinstance(error, Stopped) and error.at_once and sent == 1):
                    for job in going:
                        if job.process and job.process.poll() is None:
                            job.process.terminate()
                    sent += 1
                    limit = time.monotonic() + _LONGEST_KILL
                if sent > 1 and time.monotonic() > limit:
                    for job in going:
                        if job.process:
                            job.process.kill()
                time.sleep(_POLL)
            except Stopped as again:
                error = again
        for job in going:
            job.state, job.process = "waiting", None


def _variables(job: Job) -> Mapping[str, str]:
    """The environment of a cell's process."""
    own = {"PYTHONUNBUFFERED": "1"}
    if job.gpu:
        own["CUDA_VISIBLE_DEVICES"] = job.gpu
    if job.config.run.threads and not on_gpu(job.config):
        own["OMP_NUM_THREADS"] = str(job.config.run.threads)
    return {**os.environ, **own}


def _ending(code: int, log: Path) -> str:
    """How a process ended: its last line, and the signal if one killed it."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}; its last line: {line}" if (line := _last_line(log)) else how


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LOG_END, 0))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError:
        return ""
    return clipped(next((line for line in reversed(lines) if line), ""), 300)
