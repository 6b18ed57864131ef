"""One problem as a conversation: tool calls are run and answered, a boxed answer ends it."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from spear_rl.envs.tool_math.calls import Call, reminder, tool_calls, tool_response
from spear_rl.envs.tool_math.problems import Problem
from spear_rl.envs.tool_math.verification.answers import Checker, boxed_answer, is_same_answer
from spear_rl.rollout.env import Observation, StepResult
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.sandbox import Session

MAX_TURNS = 8
MAX_CALLS = 4
"""Per turn: its calls together must stay within a worker's time limit."""

MANY_CALLS = "Error: this call was not run; a turn may have {limit} calls at most."
SILENT = "(The code ran and printed nothing.)"
STATE_LOST = "(The variables of earlier calls are gone.)"


class ToolMathEnv:
    """One episode.

    A turn that calls the tool is answered with the output of its code, whatever else it says. A turn without a call and
    with a boxed answer ends the episode with +1 or -1. A turn with neither is void and answered with a reminder. After
    `max_turns` turns without an answer the episode ends with -1.

    Args:
        open_session: opens the interpreter session of the episode, at its first call.
        checker: compares answers that are not both integers.
        calls: the formats of a call, a key of `FORMATS`.
        tool_cost: reward taken for every call that is run.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        open_session: Callable[[], AbstractContextManager[Session]],
        checker: Checker,
        max_turns: int = MAX_TURNS,
        calls: str = "hermes",
        tool_cost: float = 0.0,
    ) -> None:
        self._problem, self._open_session, self._checker = problem, open_session, checker
        self._formats, self._tool_cost = calls, tool_cost
        self._max_turns, self._num_turns, self._num_tool_turns = max_turns, 0, 0
        self._session: Session | None = None
        self._opened, self._history, self._is_over = ExitStack(), hashlib.sha256(), True

    def reset(self) -> Observation:
        self.close()
        self._num_turns, self._num_tool_turns, self._is_over = 0, 0, False
        self._history = hashlib.sha256(self._problem.text.encode("utf-8", "surrogatepass"))
        return self._observation(self._problem.text)

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        self._num_turns += 1
        said = without_thoughts(action)
        calls = tool_calls(said, at_most=MAX_CALLS + 1, formats=self._formats)
        answer = None if calls else boxed_answer(said)
        if calls:
            result = self._run_calls(calls)
        elif answer is not None:
            result = self._score(answer)
        else:
            result = StepResult(self._observation(reminder(self._formats)), invalid="void", success=False)
        self._num_tool_turns += result.used_tool
        if not result.done and self._num_turns >= self._max_turns:
            self.close()
            result = replace(result, reward=result.reward - 1.0, done=True)
        return replace(result, metrics={"tool_turns": float(self._num_tool_turns)})

    def close(self) -> None:
        self._is_over, self._session = True, None
        self._opened.close()

    def _run_calls(self, calls: list[Call]) -> StepResult:
        replies = [self._reply(call) for call in calls[:MAX_CALLS]]
        replies += [MANY_CALLS.format(limit=MAX_CALLS)] * (len(calls) - MAX_CALLS)
        num_run = sum(not call.invalid for call in calls[:MAX_CALLS])
        return StepResult(
            self._observation(tool_response(*replies)),
            reward=0.0 - self._tool_cost * num_run,
            used_tool=num_run > 0,
            invalid="" if num_run else calls[0].invalid,
            success=False,
        )

    def _reply(self, call: Call) -> str:
        if call.invalid:
            return call.complaint
        if self._session is None:
            self._session = self._opened.enter_context(self._open_session())
        result = self._session.run(call.code)
        parts = [result.stdout.strip("\n"), (result.error or "").strip(), STATE_LOST * result.state_lost]
        reply = "\n".join(part for part in parts if part) or SILENT
        self._history.update(f"{len(call.code)} {call.code} {reply}".encode("utf-8", "surrogatepass"))
        return reply

    def _score(self, answer: str) -> StepResult:
        is_right = is_same_answer(self._problem.answer, answer, self._checker, self._problem.text)
        self.close()
        observation = Observation("Right." if is_right else "Wrong.", state_key="over")
        return StepResult(observation, reward=1.0 if is_right else -1.0, done=True, success=is_right)

    def _observation(self, text: str) -> Observation:
        return Observation(text, state_key=self._history.hexdigest()[:16])
