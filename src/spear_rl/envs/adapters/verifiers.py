"""`verifiers:TASKSET`: tasksets of verifiers (version 0.4, `verifiers.v1`), with their tools, metrics and rewards.

The package's own `Env.run` plays an episode in a thread; where it would ask a model, it asks the policy. Nothing runs
in a container: a task that needs one, or prepares one, is refused.
"""

import asyncio
import inspect
import io
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache, partial
from itertools import islice
from types import TracebackType
from typing import Annotated, Any

from spear_rl.envs.adapters.shared import SPLITS, missing_word_list, one_line, package, state_key
from spear_rl.envs.shared.generated_panels import content_split
from spear_rl.envs.tools import CALLS
from spear_rl.envs.tools.functions import Tool, argument_fault, as_text, tool_of
from spear_rl.errors import ConfigError, MissingExtraError, OptionError, UserError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.contract import RESERVED
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.tool_calls import calls_in, instructions
from spear_rl.settings.names import look_in_current_folder, option_function
from spear_rl.settings.ranges import Length, OneOf, Range, has_checked_options

OUTPUT_CHARS = 4000
"""Characters of a tool's result that the policy sees."""


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    id: Annotated[str, Length(1, 256, "characters")],
    calls: Annotated[str, OneOf(CALLS, "format", CALLS)] = "template",
    success: Annotated[float, Range(-1e6, 1e6)] = 1.0,
    expert: Annotated[str, Length(1, 256, "characters")] = "none",
    num_tasks: Annotated[int, Range(1, 1_000_000)] = sum(SPLITS.values()),
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    **config: Any,
) -> Sequence[Task]:
    """The tasks of a split, to which a hash of their content assigns them. Other options go to the taskset's config.

    Args:
        calls: the format of tool calls that the policy is asked for.
        success: the reward from which an episode counts as solved.
        expert: none, or your module:function from a task's data, a dict, and a seed to the answers of an episode.
        num_tasks: tasks to take of the taskset, before they are divided into splits.
    """
    settings = json.dumps(config, sort_keys=True)
    if expert != "none":
        option_function(expert, "expert")
    loaded, _ = _loaded(id, settings, num_tasks)
    schemas = [tool.schema for tool in _tools(id, settings, num_tasks).values()]
    told = f"\n\n{instructions(schemas, calls)}" if schemas and calls != "template" else ""
    templated = tuple(json.dumps(schema) for schema in schemas) if calls == "template" else ()
    chosen = [(number, task) for number, task in enumerate(loaded) if content_split(task.hash) == split]
    return tuple(
        Task(
            id=f"verifiers/{id}/{split}/{number:05d}",
            make_env=partial(VerifiersEnv, id, settings, num_tasks, number, success),
            family=id,
            instructions=f"{task.data.system_prompt or ''}{told}".strip(),
            instructions_role="system",
            tools=templated,
            demonstrate=None if expert == "none" else partial(_users_play, id, settings, num_tasks, number, expert),
        )
        for number, task in chosen[:max_tasks]
    )


def _users_play(id: str, settings: str, num_tasks: int, number: int, expert: str, seed: int) -> list[str]:
    data = _loaded(id, settings, num_tasks)[0][number].data
    return [str(answer) for answer in option_function(expert, "expert")(data.model_dump(), seed)]


@lru_cache(maxsize=8)
def _loaded(id: str, settings: str, num_tasks: int) -> tuple[list[Any], Any]:
    """(the tasks, what runs an episode of one)."""
    look_in_current_folder()
    vf = package("verifiers.v1", extra="verifiers")
    loaders = package("verifiers.v1.utils.loaders", extra="verifiers")
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # nltk tells of downloads that fail
            config = loaders.taskset_config_type(id)(id=id, **json.loads(settings))
            taskset, kind = loaders.load_taskset(config), loaders.environment_class(id)
            found = list(islice(iter(taskset), num_tasks))
    except ModuleNotFoundError as error:
        raise ConfigError(f"task.env: verifiers has no taskset {id!r}: {one_line(error)}") from error
    except Exception as error:  # settings that its config refuses, data that it cannot load
        raise _refusal(id, error) from error
    for task in found[:1]:
        if type(task).NEEDS_CONTAINER or type(task).setup is not vf.Task.setup or task.data.image:
            raise ConfigError(f"task.env: the tasks of {id} run in a container, which this adapter does not start")
    env = object.__new__(kind)  # its constructor prepares harnesses and runtimes
    env.config, env.taskset = None, taskset
    return found, env


def _refusal(id: str, error: Exception) -> UserError:
    """What to say of settings that a taskset's config refuses, or data that it cannot load."""
    if words := missing_word_list(error):
        return MissingExtraError(f"task.env: verifiers:{id} needs {words}")
    if callable(refused := getattr(error, "errors", None)):  # pydantic's
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in refused()]
        return OptionError(f"{clipped('; '.join(faults), 300)} (settings of the taskset {id})")
    return ConfigError(f"task.env: the taskset {id} cannot be loaded: {one_line(error)}")


@lru_cache(maxsize=8)
def _tools(id: str, settings: str, num_tasks: int) -> dict[str, Tool]:
    """The tools of the taskset and of its tasks, called without a server."""
    found, env = _loaded(id, settings, num_tasks)
    vf = package("verifiers.v1", extra="verifiers")
    decorators = package("verifiers.v1.utils.decorators", extra="verifiers")
    toolsets = list(type(env.taskset).toolsets(env.taskset.config))
    toolsets += [toolset for task in found[:1] for toolset in type(task).toolsets(task.config)]
    tools = {}
    for toolset in toolsets:
        if getattr(toolset, "_state_cls", vf.State) is not vf.State:
            raise ConfigError(
                f"task.env: the tools of {id} have a state of their server, which this adapter cannot give"
            )
        for function in decorators.discover_decorated(toolset, "tool"):
            tool = tool_of(function)
            tools[getattr(function, "tool_name", None) or tool.name] = tool
    return tools


class VerifiersEnv:
    """One episode: `Env.run` in a thread, which asks for one answer after the other."""

    def __init__(self, id: str, settings: str, num_tasks: int, number: int, success: float) -> None:
        self._source, self._number, self._success = (id, settings, num_tasks), number, success
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._asked: queue.Queue[Any] = queue.Queue()
        self._said: list[str] = []
        self._is_over = True
        self.traces: list[Any] = []
        self.used_tool = False

    def reset(self) -> Observation:
        self.close()
        self._answers, self._asked, self._said = queue.Queue(), queue.Queue(), []
        self.traces, self._is_over = [], False
        found, env = _loaded(*self._source)
        threading.Thread(target=self._play, args=(env, found[self._number]), daemon=True).start()
        text = self._asked.get()
        if not isinstance(text, str):
            self._is_over = True
            raise text if isinstance(text, BaseException) else RuntimeError("the episode ended before its first turn")
        return Observation(text, state_key=state_key(self._said))

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        said = without_thoughts(action)
        if not said.strip():
            seen = Observation("Your answer is empty.", state_key=state_key(self._said))
            return StepResult(seen, invalid="no_action", success=False)
        self._said.append(said)
        self.used_tool = False
        self._answers.put(said)
        text = self._asked.get()
        if isinstance(text, BaseException):
            self._is_over = True
            raise text
        if isinstance(text, str):
            seen = Observation(text, state_key=state_key(self._said))
            return StepResult(seen, used_tool=self.used_tool, success=False)
        self._is_over = True
        reward = float(sum(trace.reward for trace in self.traces))
        metrics = {
            f"rubric_{name}" if name in RESERVED or name.startswith("stop_") else name: float(value)
            for trace in self.traces
            for name, value in [*trace.metrics.items(), *((name, r and r.score) for name, r in trace.rewards.items())]
            if value is not None
        }
        last = Observation("The episode is over.", state_key="over")
        return StepResult(last, reward=reward, done=True, success=reward >= self._success, metrics=metrics)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._answers.put(None)

    def answer(self, text: str) -> str:
        """The policy's next answer to a text; called in the thread of the episode."""
        self._asked.put(text)
        said = self._answers.get()
        if said is None:
            raise _ClosedError
        return said

    def _play(self, env: Any, task: Any) -> None:
        try:
            asyncio.run(env.run(task, _Agents(self, _tools(*self._source))))
            self._asked.put(None)
        except _ClosedError:
            pass
        except BaseException as error:
            self._asked.put(error if isinstance(error, UserError) else RuntimeError(one_line(error)))


class _ClosedError(BaseException):
    """The episode was closed."""


class _Agents:
    """Every seat of an environment is the policy."""

    def __init__(self, episode: VerifiersEnv, tools: Mapping[str, Tool]) -> None:
        self._episode, self._tools = episode, tools

    def __getattr__(self, name: str) -> "_Seat":
        return _Seat(self._episode, self._tools)


class _Seat:
    def __init__(self, episode: VerifiersEnv, tools: Mapping[str, Tool]) -> None:
        self._episode, self._tools = episode, tools

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    def interaction(self, task: Any) -> "_Interaction":
        return _Interaction(self._episode, self._tools, task)


class _Interaction:
    """verifiers' Interaction with the policy as its model: `turn` sends a message and returns the reply."""

    def __init__(self, episode: VerifiersEnv, tools: Mapping[str, Tool], task: Any) -> None:
        self._vf = vf = package("verifiers.v1", extra="verifiers")
        self._episode, self._tools, self._task = episode, tools, task
        record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(task=record, agent=vf.AgentInfo(config=vf.AgentConfig()))
        episode.traces.append(self.trace)
        if task.data.system_prompt:
            self._add(vf.SystemMessage(content=task.data.system_prompt))

    async def __aenter__(self) -> "_Interaction":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.trace.is_completed = self.trace.ok = True
            await self._task.score(self.trace)

    async def turn(self, message: str | None = None) -> Any:
        vf, first = self._vf, len(self.trace.nodes)
        text = self._task.data.prompt_text if message is None else message
        self._add(vf.UserMessage(content=text))
        while True:
            said = self._episode.answer(text)
            self._add(vf.AssistantMessage(content=said), sampled=True)
            calls = calls_in(said, {name: tool.parameters for name, tool in self._tools.items()}) if self._tools else []
            if not calls:
                break
            replies = [await self._reply(call) for call in calls]
            for number, (call, reply) in enumerate(zip(calls, replies, strict=True)):
                self._add(vf.ToolMessage(tool_call_id=f"call_{number}", name=call.name, content=reply))
            text = "\n".join(f"<tool_response>\n{reply}\n</tool_response>" for reply in replies)
        return vf.Segment(messages=[node.message for node in self.trace.nodes[first + 1 :]])

    async def _reply(self, call: Any) -> str:
        tool = self._tools.get(call.name)
        fault = call.fault or (f"there is no tool {call.name[:60]!r}" if tool is None else "")
        if tool is None or (fault := fault or argument_fault(tool, call.arguments)):
            return f"Error: {fault}."
        self._episode.used_tool = True
        try:
            result = tool.run(**call.arguments)
            return as_text(await result if inspect.isawaitable(result) else result, OUTPUT_CHARS)
        except Exception as error:
            return f"Error: {tool.name} raised {one_line(error)}"

    def _add(self, message: Any, *, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        nodes.append(self._vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))
