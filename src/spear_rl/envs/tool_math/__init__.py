"""Mathematics with a code interpreter: one growing conversation, tool calls in Hermes form, a boxed answer."""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Annotated

from spear_rl.envs.tool_math.calls import FORMATS, PROMPTS, instructions
from spear_rl.envs.tool_math.env import MAX_TURNS, ToolMathEnv
from spear_rl.envs.tool_math.generated import DEMONSTRATORS, LEVELS
from spear_rl.envs.tool_math.panel import KNOWN, SPLITS, Source, entries
from spear_rl.envs.tool_math.problems import Problem
from spear_rl.envs.tool_math.verification.answers import Checker, integer, normalised
from spear_rl.envs.tool_math.verification.checker import has_math_verify, math_verify
from spear_rl.envs.tool_math.verification.integers import is_integer_reference
from spear_rl.rollout.env import Task
from spear_rl.sandbox import Interpreter, Limits, Session
from spear_rl.sandbox.client.interpreter import BACKENDS
from spear_rl.settings.ranges import FilePath, Length, OneOf, Range, has_checked_options, require_known

__all__ = ["DEMONSTRATORS", "KNOWN", "LEVELS", "PROMPTS", "SPLITS", "VERIFIERS", "ToolMathEnv", "tasks"]

_log = logging.getLogger(__name__)

VERIFIERS = ("auto", "integer", "math-verify", "exact")


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    data: Annotated[str, FilePath(may_be_empty=True)] = "",
    test_data: Annotated[str, FilePath(may_be_empty=True)] = "",
    data_folder: Annotated[str, FilePath(may_be_empty=True)] = "",
    level: Annotated[str, OneOf(LEVELS, "level")] = "small",
    problem_column: Annotated[str, Length(0, 256, "characters")] = "",
    answer_column: Annotated[str, Length(0, 256, "characters")] = "",
    verifier: Annotated[str, OneOf(VERIFIERS, "verifier")] = "auto",
    prompt: Annotated[str, OneOf(PROMPTS, "prompt")] = "paper",
    calls: Annotated[str, OneOf(FORMATS, "format", FORMATS)] = "hermes",
    expert: Annotated[str, OneOf(DEMONSTRATORS, "expert")] = "tool",
    families: Sequence[str] = (),
    max_turns: Annotated[int, Range(1, 10_000, unit="turns")] = MAX_TURNS,
    tool_cost: Annotated[float, Range(0, 1000)] = 0.0,
    max_tasks: Annotated[int, Range(0, 10_000_000)] | None = None,
    seconds: Annotated[float, Range(0.1, 3600, unit="seconds")] = 5.0,
    memory_mb: Annotated[int, Range(16, 1_048_576, unit="MiB")] = 512,
    output_chars: Annotated[int, Range(1, 1_000_000, unit="characters")] = 10_000,
    backend: Annotated[str, OneOf(BACKENDS, "backend")] = "auto",
) -> Sequence[Task]:
    """The problems of a split, sorted by id: generated at a `level`, or those of the set or file `data`."""
    source = Source(data, test_data, data_folder, level, problem_column, answer_column)
    panel = entries(split, source)
    known = sorted({entry.problem.family for entry in panel})
    for family in families:
        require_known("families", family, known, what="family")
    if verifier == "math-verify":
        math_verify()
    chosen = [entry for entry in panel if not families or entry.problem.family in families]
    limits = Limits(seconds=seconds, memory_mb=memory_mb, output_chars=output_chars)
    return tuple(
        Task(
            id=entry.id,
            make_env=partial(
                tool_math_env,
                entry.problem,
                chosen_verifier(verifier, entry.problem),
                max_turns,
                limits,
                backend,
                calls,
                tool_cost,
            ),
            family=entry.problem.family,
            instructions=instructions(prompt, calls),
            demonstrate=partial(DEMONSTRATORS[expert], entry.problem) if entry.problem.code else None,
            instructions_role="system",
            unfinished_reward=-1.0,
        )
        for entry in chosen[:max_tasks]
    )


def tool_math_env(
    problem: Problem, verifier: str, max_turns: int, limits: Limits, backend: str, calls: str, tool_cost: float
) -> ToolMathEnv:
    checkers: dict[str, Checker] = {"integer": integer, "exact": normalised}
    checker, session = checkers.get(verifier) or math_verify(backend), partial(open_session, limits, backend)
    return ToolMathEnv(
        problem, open_session=session, checker=checker, max_turns=max_turns, calls=calls, tool_cost=tool_cost
    )


def open_session(limits: Limits, backend: str) -> Session:
    """A session of this process's interpreter; seeded, so that an episode can be repeated."""
    return _interpreter(os.getpid(), limits, backend).session(seed=0)


@lru_cache(maxsize=4)
def _interpreter(pid: int, limits: Limits, backend: str) -> Interpreter:
    """By process: a fork cannot use its parent's."""
    return Interpreter(limits, backend=backend)


def chosen_verifier(verifier: str, problem: Problem) -> str:
    """For auto: `integer` if the answer is one, else math-verify, or `exact` if that is not installed."""
    if verifier != "auto":
        return verifier
    if is_integer_reference(problem.answer):
        return "integer"
    if has_math_verify():
        return "math-verify"
    _warn_of_exact()
    return "exact"


@lru_cache(maxsize=1)
def _warn_of_exact() -> None:
    _log.warning(
        "math-verify is not installed (pip install 'spear-rl[math]'): answers that are no integers are compared as "
        "texts, and some right ones will count as wrong"
    )
