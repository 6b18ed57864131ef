"""The runner: runs many environments at once, in-process (`InProcess`) or in a pool of workers (`pool`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from spear_rl.errors import UserError
from spear_rl.rollout import contract
from spear_rl.rollout.contract import MAX_NUMBER, MAX_TEXT, ContractError
from spear_rl.rollout.env import Environment, Observation, StepResult, Task


@dataclass(frozen=True, slots=True)
class Failure:
    """Instead of an answer: the environment or its worker failed, also when it was retried."""

    error: BaseException


Answer = Observation | StepResult | Failure
"""Observations and results are checked (`contract`)."""


class EnvRunner(Protocol):
    """Runs episodes, each named by a key: one pending request per episode, answers in any order.

    open     start an episode of `task`; its answer is the first Observation
    step     act in an episode; its answer is a StepResult
    answers  wait for `at_least` answers (at most as many as are pending) and return all there are
    close    end the episode; its pending answer, if any, is dropped
    call     call a function of an environment's author where the environments run; it returns plain values
    len()    the number of pending answers
    """

    def open(self, key: int, task: Task) -> None: ...
    def step(self, key: int, action: str) -> None: ...
    def answers(self, at_least: int) -> list[tuple[int, Answer]]: ...
    def close(self, key: int) -> None: ...
    def call(self, function: Callable[[], Any]) -> Any: ...
    def __len__(self) -> int: ...


def expert_actions(task: Task, seed: int, runner: EnvRunner) -> list[str]:
    """The checked actions of one expert episode."""
    if task.demonstrate is None:
        way_out = "give its Task `demonstrate`, or go without a cold start (sft.episodes=0)"
        raise UserError(f"task {task.id} has no expert to demonstrate it: {way_out}")
    try:
        actions = runner.call(partial(task.demonstrate, seed))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"demonstrate of {task.id} raised {contract.with_location(error)}") from error
    try:
        return contract.checked_actions(actions, f"demonstrate({seed})")
    except ContractError as error:
        raise error.of(task.id) from error


class NotRepeatableError(RuntimeError):
    """A replayed episode went another way, so its state cannot be restored."""


@dataclass
class Record:
    """The actions and answers of an episode: enough to restore its state in a new environment."""

    task: Task
    actions: list[str] = field(default_factory=list)
    answers: list[Observation | StepResult] = field(default_factory=list)
    """One for the reset and one per answered action."""

    def check(self, number: int, answer: Observation | StepResult) -> None:
        """Answer `number` of a replay must equal the recorded one."""
        if answer != self.answers[number]:
            raise NotRepeatableError(
                f"{self.task.id} did not repeat itself at answer {number} of a replay: it is not deterministic"
            )


class InProcess:
    """Runs environments in this process; every request is answered at once.

    An episode whose environment raises (also SystemExit) is replayed once in a new environment; if that raises too, the
    answer is a Failure. ContractError and KeyboardInterrupt end the run.
    """

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._envs: dict[int, Environment] = {}
        self._ready: list[tuple[int, Answer]] = []

    def open(self, key: int, task: Task) -> None:
        self._records[key] = Record(task)
        self._ready.append((key, self._answer(key)))

    def step(self, key: int, action: str) -> None:
        self._records[key].actions.append(action)
        self._ready.append((key, self._answer(key)))

    def answers(self, at_least: int) -> list[tuple[int, Answer]]:
        ready, self._ready = self._ready, []
        return ready

    def close(self, key: int) -> None:
        self._records.pop(key, None)
        self._ready = [(other, answer) for other, answer in self._ready if other != key]
        self._close_env(key)

    def call(self, function: Callable[[], Any]) -> Any:
        return function()

    def __len__(self) -> int:
        return len(self._ready)

    def _answer(self, key: int) -> Answer:
        record = self._records[key]
        error: BaseException
        for _ in range(2):
            try:
                answer = self._env_answer(key, record)
                record.answers.append(answer)
                return answer
            except KeyboardInterrupt:
                raise
            except ContractError as raised:
                raise raised.of(record.task.id) from raised
            except BaseException as raised:
                error = raised
                self._close_env(key)
        return Failure(error)

    def _env_answer(self, key: int, record: Record) -> Observation | StepResult:
        """The answer to the last action, after a replay if the environment is new."""
        if key in self._envs:
            return checked_step(self._envs[key], record.actions[-1])
        env = self._envs[key] = record.task.make_env()
        answer: Observation | StepResult = checked_reset(env)
        for number, action in enumerate(record.actions):
            record.check(number, answer)
            answer = checked_step(env, action)
        return answer

    def _close_env(self, key: int) -> None:
        if (env := self._envs.pop(key, None)) is not None:
            close_quietly(env)


def checked_reset(env: Any) -> Observation:
    """The checked first observation of a new environment."""
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise ContractError(f"make_env returned {contract.described(env)}, which has no method {method}")
    seen = env.reset()
    return seen if is_plain(seen) else contract.checked_observation(seen, f"{type(env).__name__}.reset")


def checked_step(env: Environment, action: str) -> StepResult:
    result = env.step(action)
    return result if is_plain_result(result) else contract.checked_result(result, f"{type(env).__name__}.step")


def close_quietly(env: Environment) -> None:
    """Close an environment and ignore what it raises: the episode is over and its rewards stand."""
    try:
        env.close()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return


def is_plain(seen: object) -> bool:
    """Whether an Observation is as the contract wants it: the common case, and much faster than converting."""
    try:
        if type(seen) is not Observation or type(seen.choices) is not tuple or type(seen.images) is not tuple:
            return False
        texts = [seen.text, seen.state_key, seen.task, *seen.choices]
        if seen.images or {*map(type, texts)} != {str}:
            return False
        return len(text := "".join(texts)) <= MAX_TEXT and text.isascii()
    except AttributeError:  # a field that was never set
        return False


def is_plain_result(result: object) -> bool:
    """Whether a StepResult is as the contract wants it."""
    try:
        if type(result) is not StepResult or not is_plain(result.observation):
            return False
        action = "" if result.action is None else result.action
        values = (result.reward, result.done, result.used_tool, result.invalid, action, result.metrics)
        if not all(type(v) is kind for v, kind in zip(values, (float, bool, bool, str, str, dict), strict=True)):
            return False
        if result.metrics or type(result.success) not in (bool, type(None)):
            return False
        said = result.invalid + action
        return abs(result.reward) <= MAX_NUMBER and len(said) <= MAX_TEXT and said.isascii()
    except AttributeError:
        return False
