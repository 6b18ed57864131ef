"""`openenv:SERVER`: environments behind an OpenEnv server: an http address, a Docker image, or a Python module's app.

A module (`echo_env`, whose app is `echo_env.server.app:app`, or `my_env:app`) is served by a process of ours at a free
port. Every episode is a session of its own: a WebSocket.
"""

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Annotated, Any

from spear_rl.envs.adapters.shared import (
    ANSWER_FORMAT,
    EXPERTS,
    SPLITS,
    answered,
    best_random_play,
    one_line,
    package,
    seeds,
    state_key,
)  # fmt: skip
from spear_rl.envs.shared.answer_tags import ParsedAnswer
from spear_rl.errors import ConfigError, OptionError
from spear_rl.rollout.contract import ContractError
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult, Task
from spear_rl.settings.names import look_in_current_folder, option_function
from spear_rl.settings.ranges import Length, OneOf, Range, has_checked_options

START_SECONDS, FREE_SECONDS = 120.0, 5.0
"""Waited for a server that starts, and for a free session."""
_URL = re.compile(r"(https?|wss?)://")
_REFUSED = "VALIDATION_ERROR"
"""What a server answers to an action against its schema; the session goes on."""
_FULL = "CAPACITY_REACHED"
_HIDDEN = ("done", "reward", "metadata")
"""Fields of an observation that are no part of its text."""


@dataclass(frozen=True, slots=True)
class Server:
    """Which server, and how its messages are put into words; picklable."""

    id: str
    action_field: str = ""
    """The field of an action that the policy's text fills; empty: the policy writes the whole action as JSON."""
    kind: str = "string"
    """The field's JSON type."""
    observation_field: str = ""
    choices: tuple[str, ...] = ()
    """The field's values, where the schema lists them."""


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    id: Annotated[str, Length(1, 2048, "characters")],
    action_field: Annotated[str, Length(0, 256, "characters")] = "",
    observation_field: Annotated[str, Length(0, 256, "characters")] = "",
    actions: Sequence[Annotated[str, Length(1, 1000, "characters")]] = (),
    expert: Annotated[str, Length(1, 256, "characters")] = "random",
    tries: Annotated[int, Range(1, 10_000, unit="episodes")] = 100,
    random_turns: Annotated[int, Range(1, 10_000, unit="turns")] = 100,
    instructions: Annotated[str, Length(0, 100_000, "characters")] = "",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
) -> Sequence[Task]:
    """The tasks of a split: one per seed, which the server's reset is given.

    Args:
        action_field: the field of an action that the policy fills; by default the only required one. With several the
            policy writes an action as JSON.
        observation_field: the field of an observation that the policy reads; by default all of them.
        actions: the moves that random play draws from; by default those that the schema of an action lists.
        expert: random (the first solved, or else the best, of `tries` random episodes; needs moves), none, or your
            module:function from the first observation, a dict, and a seed to a list of moves.
    """
    server, told = _described(id, action_field, observation_field)
    if expert not in EXPERTS:
        option_function(expert, "expert")
    return tuple(
        Task(
            id=f"openenv/{id}/{name}",
            make_env=partial(OpenEnvEnv, server, seed),
            family=id,
            instructions=instructions or told,
            answer_format=ANSWER_FORMAT,
            demonstrate=_demonstrator(server, seed, expert, tries, random_turns, tuple(actions) or server.choices),
        )
        for name, seed in seeds(split, max_tasks)
    )


def _demonstrator(
    server: Server, seed: int, expert: str, tries: int, max_turns: int, actions: tuple[str, ...]
) -> Callable[[int], list[str]] | None:
    if expert == "random" and actions:
        return partial(best_random_play, partial(OpenEnvEnv, server, seed), tries, max_turns, actions)
    return None if expert in EXPERTS else partial(_users_play, server, seed, expert)


def _users_play(server: Server, task_seed: int, expert: str, seed: int) -> list[str]:
    env = OpenEnvEnv(server, task_seed)
    try:
        env.reset()
        return [str(action) for action in option_function(expert, "expert")(env.first, seed)]
    finally:
        env.close()


def _described(id: str, action_field: str, observation_field: str) -> tuple[Server, str]:
    """The server, and the policy's instructions: made from the JSON schema of the server's actions."""
    package("openenv.core", extra="openenv")
    schema = _schema(_address(os.getpid(), id), id)
    properties = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
    needed = [name for name in schema.get("required", ()) if name in properties] or list(properties)
    if action_field and action_field not in properties:
        raise OptionError(f"action_field: an action of {id} has no {action_field}; it has: {', '.join(properties)}")
    field = action_field or (needed[0] if len(needed) == 1 else "")
    described = _resolved(properties.get(field, {}), schema)
    kind, listed = str(described.get("type", "string")), described.get("enum", ())
    choices = tuple(listed) if all(isinstance(value, str) for value in listed) else ()
    if field and kind in ("string", "integer", "number", "boolean"):
        said = f"one of: {', '.join(choices)}" if choices else f"the {field} ({kind}) of your action"
    else:
        field, said, choices = "", f"your action as JSON, an object with {', '.join(properties) or 'no fields'}", ()
    return Server(id, field, kind, observation_field, choices), f"Answer within <action></action> with {said}."


def _resolved(described: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a field's schema says, or what it refers to, as for an Enum."""
    [reference] = [part["$ref"] for part in (described, *described.get("allOf", ())) if "$ref" in part][:1] or [""]
    found = schema.get("$defs", {}).get(str(reference).rpartition("/")[2], described)
    return found if isinstance(found, Mapping) else {}


def _schema(address: str, id: str) -> dict[str, Any]:
    url = re.sub(r"\Aws", "http", address).rstrip("/") + "/schema"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            action = json.loads(answer.read(10_000_000))["action"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"task.env: no OpenEnv server answers for {id} at {url} ({one_line(error)})") from error
    return action if isinstance(action, dict) else {}


@lru_cache(maxsize=16)
def _address(pid: int, id: str) -> str:
    """The address of a server, started if it has none; by process, so that workers do not share one."""
    if _URL.match(id):
        return id
    module = id.partition(":")[0]
    if re.fullmatch(r"[\w.]+(:\w+)?", id) and _is_module(module):
        return _served(id if ":" in id else f"{module}.server.app:app")
    core = package("openenv.core", extra="openenv")
    try:
        client = core.GenericEnvClient.from_docker_image(id).sync()
    except Exception as error:
        what = f"{id} is no address, no importable module, and no Docker image that starts"
        raise ConfigError(f"task.env: {what} ({one_line(error)})") from error
    atexit.register(client.close)
    return str(client.async_client.base_url)


def _is_module(name: str) -> bool:
    look_in_current_folder()
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _served(app: str) -> str:
    """Starts an app with uvicorn at a free port; it ends with this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "error"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))}
    log = tempfile.TemporaryFile()  # noqa: SIM115 (a pipe that is not read would fill up and stop the server)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=env)
    atexit.register(process.kill)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ConfigError(f"task.env: the OpenEnv app {app} does not start: {' '.join(said)[:300]}")
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return address
        except OSError:
            time.sleep(0.1)
    raise ConfigError(f"task.env: the OpenEnv app {app} did not answer within {START_SECONDS:.0f} seconds")


class OpenEnvEnv:
    """One episode: a session with the server."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server, self._seed = server, seed
        self._client: Any = None
        self._said: list[str] = []
        self._last = Observation("")
        self.first: Mapping[str, Any] = {}
        """The first observation as the server sends it."""

    def reset(self) -> Observation:
        self.close()
        self._said = []
        result = self._begun()
        self.first = result.observation
        self._last = self._observation(result.observation)
        return self._last

    def _begun(self) -> Any:
        """The answer to a new session's reset; waits where the server is full: it may be ending one of ours."""
        core, end = package("openenv.core", extra="openenv"), time.monotonic() + FREE_SECONDS
        while True:
            self._client = core.GenericEnvClient(base_url=_address(os.getpid(), self._server.id)).sync()
            try:
                return self._client.reset(seed=self._seed)
            except RuntimeError as error:
                self.close()
                if _FULL not in str(error):
                    raise
                if time.monotonic() > end:
                    advice = "raise max_concurrent_envs in its create_app, or lower rollout.num_tasks and eval.tasks"
                    raise ContractError(f"the OpenEnv server has no free session: {advice}") from error
                time.sleep(0.2)

    def step(self, action: str) -> StepResult:
        if self._client is None:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        said = answered(action)
        move = None if said.invalid else self._action(said.command)
        if move is None:
            return self._refused(said)
        try:
            result = self._client.step(move)
        except RuntimeError as error:
            if _REFUSED not in str(error):
                raise
            return self._refused(said)
        self._said.append(said.command)
        reward = float(result.reward or 0.0)
        self._last = self._observation(result.observation)
        done = bool(result.done)
        if done:
            self.close()
        return StepResult(self._last, reward=reward, done=done, success=done and reward > 0, action=said.command)

    def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.close()

    def _refused(self, said: ParsedAnswer) -> StepResult:
        return StepResult(self._last, invalid=said.invalid or INADMISSIBLE, success=False, action=said.command)

    def _action(self, said: str) -> dict[str, Any] | None:
        """The action that is said; None if it is none."""
        server = self._server
        if server.choices:
            said = next((choice for choice in server.choices if choice.lower() == said.lower()), "")
            return {server.action_field: said} if said else None
        if server.action_field and server.kind == "string":
            return {server.action_field: said}
        try:
            value = json.loads(said)
        except (ValueError, RecursionError):
            return None
        if not server.action_field:
            return value if isinstance(value, dict) else None
        is_bool, is_whole = isinstance(value, bool), isinstance(value, int)
        known = {"boolean": is_bool, "integer": is_whole and not is_bool}
        is_right = known.get(server.kind, isinstance(value, int | float) and not is_bool)
        return {server.action_field: value} if is_right else None

    def _observation(self, seen: Any) -> Observation:
        fields = seen if isinstance(seen, Mapping) else {"observation": seen}
        shown = {
            name: value for name, value in fields.items() if name not in _HIDDEN and value not in (None, "", [], {})
        }
        if self._server.observation_field:
            shown = {"": fields.get(self._server.observation_field, "")}
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in shown.values()]
        if len(texts) > 1:
            texts = [f"{name}: {text}" for name, text in zip(shown, texts, strict=True)]
        text = "\n".join(texts) or "(nothing to see)"
        return Observation(text, state_key=state_key(self._said), choices=self._server.choices)
