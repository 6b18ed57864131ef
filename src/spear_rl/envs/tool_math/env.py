"""One problem as a conversation: calls are run and answered, a boxed answer ends it. Knows no sandbox and no data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from spear_rl.envs.tool_math.calls import Call, tool_calls, without_thoughts
from spear_rl.envs.tool_math.data.problem import Problem
from spear_rl.envs.tool_math.prompts import MANY_CALLS, SILENT, STATE_LOST, VOID, tool_response
from spear_rl.envs.tool_math.verification.answers import Checker, is_same_answer
from spear_rl.envs.tool_math.verification.boxed import boxed_answer
from spear_rl.rollout.env import Observation, StepResult

MAX_TURNS = 8
MAX_CALLS = 4
"""In one turn: its calls together must not take longer than a worker may."""


class Outcome(Protocol):
    """What a piece of code led to; `sandbox.Result` is one."""

    @property
    def stdout(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def state_lost(self) -> bool: ...


class Session(Protocol):
    """Runs the code of one episode, whose variables stay."""

    def run(self, code: str) -> Outcome: ...


Sessions = Callable[[], AbstractContextManager[Session]]


class ToolMathEnv:
    """One episode.

    A turn that calls the tool is answered by what its code prints, whatever else it says. A turn without a call that
    has a boxed answer ends the episode with +1 or -1. A turn with neither is void: it is answered by a reminder. After
    `max_turns` turns without an answer the episode ends with -1.

    Args:
        open_session: gives a place to run code in; asked at the first call.
        checker: compares answers that are not both integers.
    """

    def __init__(
        self, problem: Problem, *, open_session: Sessions, checker: Checker, max_turns: int = MAX_TURNS
    ) -> None:
        self._problem, self._open_session, self._checker = problem, open_session, checker
        self._max_turns, self._num_turns, self._num_tool_turns = max_turns, 0, 0
        self._place: AbstractContextManager[Session] | None = None
        self._session: Session | None = None
        self._history = hashlib.sha256(problem.text.encode("utf-8", "surrogatepass"))
        self._is_over = True

    def reset(self) -> Observation:
        self.close()
        self._num_turns, self._num_tool_turns, self._is_over = 0, 0, False
        self._history = hashlib.sha256(self._problem.text.encode("utf-8", "surrogatepass"))
        return self._seen(self._problem.text)

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        self._num_turns += 1
        said = without_thoughts(action)
        calls = tool_calls(said, at_most=MAX_CALLS + 1)
        answer = None if calls else boxed_answer(said)
        if calls:
            result = self._called(calls)
        elif answer is not None:
            result = self._answered(answer)
        else:
            result = StepResult(self._seen(VOID), invalid="void", success=False)
        self._num_tool_turns += result.used_tool
        is_cut_off = not result.done and self._num_turns >= self._max_turns
        if is_cut_off:
            self.close()
            result = replace(result, reward=-1.0, done=True)
        return replace(result, metrics={"tool_turns": float(self._num_tool_turns)})

    def close(self) -> None:
        self._is_over = True
        place, self._place, self._session = self._place, None, None
        if place is not None:
            place.__exit__(None, None, None)

    def _called(self, calls: list[Call]) -> StepResult:
        replies = [self._reply(call) for call in calls[:MAX_CALLS]]
        replies += [MANY_CALLS.format(limit=MAX_CALLS)] * (len(calls) - MAX_CALLS)
        has_run = any(not call.invalid for call in calls[:MAX_CALLS])
        seen = self._seen(tool_response(*replies))
        invalid = "" if has_run else calls[0].invalid
        return StepResult(seen, used_tool=has_run, invalid=invalid, success=False)

    def _reply(self, call: Call) -> str:
        if call.invalid:
            return call.complaint
        if self._session is None:
            self._place = self._open_session()
            self._session = self._place.__enter__()
        outcome = self._session.run(call.code)
        parts = [outcome.stdout.strip("\n"), (outcome.error or "").strip(), STATE_LOST * outcome.state_lost]
        reply = "\n".join(part for part in parts if part) or SILENT
        self._history.update(f"{len(call.code)} {call.code} {reply}".encode("utf-8", "surrogatepass"))
        return reply

    def _answered(self, answer: str) -> StepResult:
        is_right = is_same_answer(self._problem.answer, answer, self._checker)
        self.close()
        seen = Observation("Right." if is_right else "Wrong.", state_key="over")
        return StepResult(seen, reward=1.0 if is_right else -1.0, done=True, success=is_right)

    def _seen(self, text: str) -> Observation:
        return Observation(text, state_key=self._history.hexdigest()[:16])
