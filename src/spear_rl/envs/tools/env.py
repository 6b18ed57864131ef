"""One problem as a conversation: tool calls are run and answered, a turn without a call is the answer."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from spear_rl.envs.tools.functions import Tool, argument_fault, as_text
from spear_rl.envs.tools.sources import opened_tools
from spear_rl.io.escaping import in_words
from spear_rl.rollout.contract import ContractError, described
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.tool_calls import Call, calls_in, until_last

MAX_CALLS = 8
"""Calls per turn; the others are not run."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ServerLostError(RuntimeError):
    """What runs a tool has gone: the episode has failed, and is no wrong answer of the policy."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its answer for the reward, and, if there is one, how an expert solves it."""

    id: str
    question: str
    answer: str = ""
    family: str = ""
    demonstration: tuple[Any, ...] = ()
    """Texts, and calls as {"name": ..., "arguments": {...}}."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All of the problem, for a reward function."""


Reward = Callable[[Mapping[str, Any], str], float]
"""The problem's fields and the policy's answer in, the reward out."""


class ToolEnv:
    """One episode.

    Args:
        sources: where the tools come from.
        max_turns: an episode without an answer after so many turns is over, with no reward.
        output_chars: characters of a tool's result that the policy sees.
    """

    def __init__(
        self, problem: Problem, sources: Sequence[str], reward: Reward, max_turns: int = 8, output_chars: int = 4000
    ) -> None:
        self._problem, self._sources, self._reward = problem, sources, reward
        self._max_turns, self._output_chars = max_turns, output_chars
        self._opened, self._tools = ExitStack(), dict[str, Tool]()
        self._num_turns, self._num_tool_turns, self._is_over = 0, 0, True
        self._history = hashlib.sha256()

    def reset(self) -> Observation:
        self.close()
        self._tools = self._opened.enter_context(opened_tools(self._sources))
        self._num_turns, self._num_tool_turns, self._is_over = 0, 0, False
        self._history = hashlib.sha256(self._problem.question.encode("utf-8", "surrogatepass"))
        return self._observation(self._problem.question)

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        self._num_turns += 1
        said = without_thoughts(action)
        calls = calls_in(said, {name: tool.parameters for name, tool in self._tools.items()})
        is_last = self._num_turns >= self._max_turns
        if calls:
            replies = [self._reply(call) for call in calls[:MAX_CALLS]]
            replies += [(f"Error: this call was not run; a turn may have {MAX_CALLS} calls.", "")] * (
                len(calls) > MAX_CALLS
            )
            num_run = sum(not invalid for _, invalid in replies)
            self._num_tool_turns += num_run > 0
            text = "\n".join(f"<tool_response>\n{reply}\n</tool_response>" for reply, _ in replies)
            invalid = "" if num_run else replies[0][1]
            return self._result(text, done=is_last, used_tool=num_run > 0, invalid=invalid)
        answer = answer_in(said)
        if not answer:
            return self._result("Call a tool, or give your answer within <answer></answer>.", is_last, invalid="void")
        paid: Any = self._reward(self._problem.fields, answer)
        try:
            reward = float(paid)
        except (TypeError, ValueError) as error:
            raise ContractError(f"the reward function returned {described(paid)}, not a number") from error
        return self._result("Right." if reward > 0 else "Wrong.", True, reward=reward, success=reward > 0)

    def close(self) -> None:
        self._is_over = True
        self._opened.close()

    def _reply(self, call: Call) -> tuple[str, str]:
        """(what the policy is told, why the call was not run or nothing)."""
        if call.invalid:
            return f"Error: {call.fault}.", call.invalid
        tool = self._tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool {call.name[:60]!r}; there are: {', '.join(self._tools)}.", INADMISSIBLE
        if fault := argument_fault(tool, call.arguments):
            return f"Error: {fault}.", INADMISSIBLE
        try:
            reply = as_text(tool.run(**call.arguments), self._output_chars)
        except (KeyboardInterrupt, ServerLostError):
            raise
        except BaseException as error:  # also SystemExit: a tool's failure is an answer, not the end of the run
            reply = f"Error: {tool.name} raised {in_words(error)}"
        self._history.update(
            repr((call.name, sorted(call.arguments), call.arguments, reply)).encode("utf-8", "replace")
        )
        return reply, ""

    def _result(self, text: str, done: bool, **fields: Any) -> StepResult:
        if done:
            self.close()
        seen, metrics = self._observation(text), {"tool_turns": float(self._num_tool_turns)}
        return StepResult(seen, done=done, **{"success": False, "metrics": metrics, **fields})

    def _observation(self, text: str) -> Observation:
        return Observation(text, state_key=self._history.hexdigest()[:16])


def answer_in(text: str) -> str:
    """The last answer within tags, or the whole text."""
    tagged = _ANSWER.findall(until_last("</answer>", text))
    return (tagged[-1] if tagged else text).strip()


def is_same(problem: Mapping[str, Any], answer: str) -> float:
    """1 if the answer is the problem's, whatever the case, spaces, articles and a final stop; numbers by value."""
    wanted = problem.get("answer", "")
    return float(any(_normal(answer) == _normal(one) for one in (wanted if isinstance(wanted, list) else [wanted])))


def _normal(answer: object) -> str | float:
    text = " ".join(re.sub(r"\b(a|an|the)\b", " ", str(answer).lower()).split()).rstrip(".")
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text
