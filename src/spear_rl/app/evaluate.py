"""The verb `eval`: any policy on a panel. Torch is imported for a model of this machine only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from spear_rl.app.build_rollout import Player, sampling_of, tasks_of
from spear_rl.app.config import Config, check, load
from spear_rl.app.resume import is_run, stored_with
from spear_rl.app.versions import versions
from spear_rl.errors import CheckpointError, ConfigError
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError, UnansweredError
from spear_rl.rollout.policies.endpoint import ChatEndpoint
from spear_rl.rollout.policies.reference import REFERENCES, ReferencePolicy
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.rollout.workers.progress import Tally
from spear_rl.settings.ranges import Range, checked
from spear_rl.train.evaluate import Evaluation, evaluation
from spear_rl.train.pass_at_k import Samples, sampled

Notice = Callable[[Tally], None]


@dataclass(frozen=True, slots=True)
class Panel:
    """What to play."""

    split: str = "validation"
    num_tasks: int = 0
    """The first so many of the panel; 0 is all."""
    num_episodes: int = 1
    """Of every task."""
    num_samples: int = 0
    """k of mean@k and pass@k, for which at least so many episodes of every task are played; 0 is neither."""

    @property
    def num_played(self) -> int:
        """Episodes of every task."""
        return max(self.num_episodes, self.num_samples)


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach an endpoint's model."""

    model: str = ""
    """Its name there; may be left out where there is only one."""
    api_key_env: str = ""
    """The variable that holds the key; OPENAI_API_KEY, if that is set, when left out."""
    num_parallel: int = 16
    timeout: float = 120.0


@dataclass(frozen=True, slots=True)
class Report:
    """A result and what it is a result of."""

    evaluation: Evaluation
    about: dict[str, Any]
    samples: Samples | None = None
    """mean@k and pass@k, where they were asked for."""

    def as_dict(self) -> dict[str, Any]:
        return self.about | self.evaluation.as_dict() | (self.samples.as_dict() if self.samples else {})


def evaluate_from(
    policy: str,
    overrides: Sequence[str],
    panel: Panel = Panel(),  # noqa: B008 - both are frozen
    connection: Connection = Connection(),  # noqa: B008
    *,
    source: str = "",
    notice: Notice | None = None,
) -> Report:
    """Play a panel with a policy by name: expert, random, an endpoint's address, a run folder or a model.

    Args:
        overrides: settings as section.key=value.
        source: a preset or TOML file to take the other settings from; a run's own if left out, else the defaults.
        notice: is told how far it has come.
    """
    _check(panel, connection)
    report = _report(policy, overrides, panel, connection, source, notice)
    if not panel.num_samples:
        return report
    return replace(report, samples=sampled(report.evaluation.counts.values(), panel.num_samples))


def _report(
    policy: str, overrides: Sequence[str], panel: Panel, connection: Connection, source: str, notice: Notice | None
) -> Report:
    is_endpoint = "://" in policy
    if not is_endpoint and connection != Connection():
        raise ConfigError("--model, --api-key-env, --parallel and --timeout are for an endpoint: http://host:port/v1")
    if policy in REFERENCES:
        return _with_reference(policy, load(source or None, overrides), panel, notice)
    if is_endpoint:
        return _with_endpoint(policy, load(source or None, overrides), panel, connection, notice)
    return _with_model(policy, overrides, panel, source, notice)


def _with_reference(name: str, config: Config, panel: Panel, notice: Notice | None) -> Report:
    tasks, renderer = _tasks(config, panel), MessageRenderer()
    with Player(config, renderer=renderer) as player:
        watched = player.watched(len(tasks) * panel.num_played, notice)
        policy = ReferencePolicy(REFERENCES[name], watched, renderer, seed=config.run.seed)
        result = _played(config, player, tasks, policy, panel)
    about = {"policy": name, "model": name, **_about(config, panel, tasks), "versions": versions()}
    return Report(result, about)


def _with_endpoint(url: str, config: Config, panel: Panel, connection: Connection, notice: Notice | None) -> Report:
    server = ChatServer(url, api_key=_api_key(connection.api_key_env), timeout=connection.timeout)
    tasks, renderer = _tasks(config, panel), MessageRenderer()
    model = connection.model or _only_model(server)
    with Player(config, renderer=renderer) as player:
        watched = player.watched(len(tasks) * panel.num_played, notice)
        policy = ChatEndpoint(
            server,
            model=model,
            renderer=renderer,
            sampling=sampling_of(config, temperature=config.eval.temperature),
            seed=config.run.seed,
            num_parallel=connection.num_parallel,
            on_lost=watched.fail,
        )
        result = _played(config, player, tasks, policy, panel)
    about = {"policy": "endpoint", "model": model, "endpoint": server.name, **_about(config, panel, tasks)}
    return Report(result, about | _sampling(config) | {"versions": versions()})


def _with_model(model: str, overrides: Sequence[str], panel: Panel, source: str, notice: Notice | None) -> Report:
    """A run's newest policy under its own settings, or any model under the defaults and `overrides`."""
    place = Path(model)
    homes = [place, place.parent, place.parent.parent] if os.path.isdir(place) else []
    home = next((folder for folder in homes if is_run(folder)), None)
    config = stored_with(home, overrides, folder=place) if home and not source else load(source or None, overrides)
    tasks = _tasks(config, panel)
    from spear_rl.app.build_training import engine_of
    from spear_rl.app.train import evaluated
    from spear_rl.train.checkpoint import MANIFEST, checked_step, checkpoints

    folder = place if os.path.isdir(place) else None
    if home is not None and home == place:
        saved = [*checkpoints(home / "checkpoints"), *home.glob("model")]
        if not saved:
            raise CheckpointError(f"{home} has no checkpoint yet, so there is nothing to evaluate")
        folder = saved[-1]
    if folder is not None and (folder / MANIFEST).exists():
        checked_step(folder)
    if folder is None:
        config.engine.model = model
        check(config)
    engine = engine_of(config, folder=folder)
    with Player(config, engine.tokenizer, processor=engine.processor) as player:
        player.watched(len(tasks) * panel.num_played, notice)
        result = evaluated(config, engine, player, tasks, step=0, num_episodes=panel.num_played)
    about = {"policy": "model", "model": model, "folder": str(folder) if folder else None}
    about |= _about(config, panel, tasks) | _sampling(config)
    return Report(result, about | {"versions": versions("torch", "transformers", "tokenizers")})


def _played(config: Config, player: Player, tasks: Sequence[Task], policy: Generator, panel: Panel) -> Evaluation:
    max_turns = config.eval.max_turns
    return evaluation(player.groups(tasks, policy, group_size=panel.num_played, step=0, max_turns=max_turns))


def _about(config: Config, panel: Panel, tasks: Sequence[Task]) -> dict[str, Any]:
    return {
        "env": config.task.env,
        "options": config.task.options,
        "split": panel.split,
        "tasks": [task.id for task in tasks],
        "episodes_per_task": panel.num_played,
        "max_turns": config.eval.max_turns or config.rollout.max_turns,
        "seed": config.run.seed,
    }


def _sampling(config: Config) -> dict[str, Any]:
    """What a policy that reads prompts and samples was set to."""
    rollout = config.rollout
    names = ("top_p", "max_new_tokens", "stop", "layout", "detail")
    return {"temperature": config.eval.temperature} | {name: getattr(rollout, name) for name in names}


def _tasks(config: Config, panel: Panel) -> Sequence[Task]:
    return tasks_of(config, panel.split, count=panel.num_tasks or None)


def _only_model(server: ChatServer) -> str:
    try:
        names = server.models()
    except UnansweredError as error:
        raise EndpointError(str(error)) from error
    if len(names) != 1:
        there = f"; {server.name} has: {', '.join(name[:80] for name in names[:20])}" if names else ""
        raise ConfigError(f"--model is missing: name the endpoint's model{there}")
    return names[0]


def _api_key(variable: str) -> str:
    if variable and not os.environ.get(variable):
        raise ConfigError(f"--api-key-env: the variable {variable} is not set or empty")
    return os.environ.get(variable or "OPENAI_API_KEY", "")


def _check(panel: Panel, connection: Connection) -> None:
    checked(panel.num_tasks, Annotated[int, Range(1, 10_000_000, zero="all")], "--tasks")
    checked(panel.num_episodes, Annotated[int, Range(1, 10_000)], "--episodes")
    checked(panel.num_samples, Annotated[int, Range(1, 10_000, zero="none")], "--samples")
    checked(connection.num_parallel, Annotated[int, Range(1, 1024)], "--parallel")
    checked(connection.timeout, Annotated[float, Range(0, 86_400, "(]", unit="seconds")], "--timeout")
