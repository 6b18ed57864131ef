"""The verb `eval`: any policy on a panel of tasks. Torch is imported only for a local model."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from spear_rl.app.build.rollout import Player, sampling_of, tasks_of
from spear_rl.app.config import Config, check, load
from spear_rl.app.prompting import Prompted, PromptOptions, Trials
from spear_rl.app.resume import is_run, stored_with
from spear_rl.errors import CheckpointError, ConfigError
from spear_rl.io.record import PACKAGES, versions
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError, UnansweredError
from spear_rl.rollout.policies.endpoint import ChatEndpoint
from spear_rl.rollout.policies.reference import REFERENCES, ReferencePolicy
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.rollout.workers.progress import Tally
from spear_rl.settings.ranges import Range, checked
from spear_rl.train.evaluate import Evaluation, Samples, evaluation, sampled

Notice = Callable[[Tally], None]


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to play, and for an endpoint how to reach it: the options of `spear eval`, under the same names."""

    split: str = "validation"
    tasks: Annotated[int, Range(1, 10_000_000, zero="all")] = 0
    episodes: Annotated[int, Range(1, 10_000)] = 1
    """Per task."""
    samples: Annotated[int, Range(1, 10_000, zero="none")] = 0
    """k of mean@k and pass@k, for which at least k episodes per task are played."""
    model: str = ""
    api_key_env: str = ""
    parallel: Annotated[int, Range(1, 1024)] = 16
    timeout: Annotated[float, Range(0, 86_400, "(]", unit="seconds")] = 120.0
    prompts: PromptOptions = field(default_factory=PromptOptions)

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(EvalOptions, include_extras=True).items():
            if name != "prompts":
                checked(getattr(self, name), hint, f"--{name.replace('_', '-')}")
        if self.prompts.prompting == "reflexion" and self.num_played > 1:
            raise ConfigError("--prompting reflexion plays a task once per trial: leave out --episodes and --samples")

    @property
    def num_played(self) -> int:
        """Episodes per task."""
        return max(self.episodes, self.samples)

    @property
    def is_for_endpoint(self) -> bool:
        theirs = (self.model, self.api_key_env, self.parallel, self.timeout)
        return theirs != ("", "", 16, 120.0)


@dataclass(frozen=True, slots=True)
class Report:
    """A result and what it is a result of."""

    evaluation: Evaluation
    about: dict[str, Any]
    samples: Samples | None = None
    """mean@k and pass@k, where they were asked for."""
    trials: Trials | None = None
    """Of Reflexion; `evaluation` is of every task's last episode."""

    def as_dict(self) -> dict[str, Any]:
        extras = [extra.as_dict() for extra in (self.samples, self.trials) if extra]
        return reduce(or_, extras, self.about | self.evaluation.as_dict())


def evaluate_from(
    policy: str,
    overrides: Sequence[str],
    options: EvalOptions,
    *,
    source: str = "",
    notice: Notice | None = None,
) -> Report:
    """Play a panel with a policy by name: expert, random, an endpoint's address, a run folder or a model.

    Args:
        overrides: settings as section.key=value.
        source: a preset or TOML file to take the other settings from; a run's own if left out, else the defaults.
        notice: called with the progress so far.
    """
    if "://" not in policy and options.is_for_endpoint:
        raise ConfigError("--model, --api-key-env, --parallel and --timeout are for an endpoint: http://host:port/v1")
    if policy in REFERENCES and options.prompts.is_used:
        raise ConfigError(f"--prompting is for policies that read prompts: an endpoint or a model, not {policy}")
    if policy in REFERENCES or "://" in policy:
        report = _with_messages(policy, load(source or None, overrides), options, notice)
    else:
        report = _with_model(policy, overrides, options, source, notice)
    if not options.samples:
        return report
    return replace(report, samples=sampled(report.evaluation.counts.values(), options.samples))


def _with_messages(policy: str, config: Config, options: EvalOptions, notice: Notice | None) -> Report:
    """A policy that reads messages instead of tokens: the expert, the random one, or an endpoint's model."""
    server = None
    if "://" in policy:
        server = ChatServer(policy, api_key=_api_key(options.api_key_env), timeout=options.timeout)
    tasks, renderer = tasks_of(config, options.split, count=options.tasks or None), MessageRenderer()
    about = {"policy": policy, "model": policy}
    if server is not None:
        about = {"policy": "endpoint", "model": options.model or _only_model(server), "endpoint": server.name}
    with Player(config, renderer=renderer) as player:
        prompted = _prompted(options, config, player, tasks)
        envs = player.watched(len(tasks) * options.num_played, notice)

        def generator_of(sampling: Sampling, seed: int) -> Generator:  # a first trial has the seed 0
            if server is None:
                return ReferencePolicy(REFERENCES[policy], envs, renderer, seed=config.run.seed)
            return ChatEndpoint(
                server,
                model=about["model"],
                renderer=renderer,
                sampling=sampling,
                seed=config.run.seed + seed,
                num_parallel=options.parallel,
                on_lost=envs.fail,
                has_answered=seed > 0,
            )

        trials = None
        if prompted and options.prompts.prompting == "reflexion":
            trials = prompted.trials(generator_of, envs)
            result = evaluation(trials.groups)
        else:
            generator = generator_of(sampling_of(config, temperature=config.eval.temperature), 0)
            max_turns = config.eval.max_turns
            groups = player.groups(tasks, generator, group_size=options.num_played, step=0, max_turns=max_turns)
            result = evaluation(groups)
    settings = _about(config, options, tasks, prompted, is_sampled=server is not None)
    return Report(result, about | settings | {"versions": versions()}, trials=trials)


def _with_model(
    model: str, overrides: Sequence[str], options: EvalOptions, source: str, notice: Notice | None
) -> Report:
    """A run's newest policy under its own settings, or any model under the defaults and `overrides`."""
    place = Path(model)
    homes = [place, place.parent, place.parent.parent] if os.path.isdir(place) else []
    home = next((folder for folder in homes if is_run(folder)), None)
    config = stored_with(home, overrides, folder=place) if home and not source else load(source or None, overrides)
    tasks = tasks_of(config, options.split, count=options.tasks or None)
    from spear_rl.app.build.training import engine_of
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
        prompted, trials = _prompted(options, config, player, tasks), None
        envs = player.watched(len(tasks) * options.num_played, notice)
        if prompted and options.prompts.prompting == "reflexion":
            trials = prompted.trials(lambda s, n: engine.evaluation_generator(s, seed=config.run.seed + 7919 + n), envs)
            result = evaluation(trials.groups)
        else:
            result = evaluated(config, engine, player, tasks, step=0, num_episodes=options.num_played)
    about = {"policy": "model", "model": model, "folder": str(folder) if folder else None}
    about |= _about(config, options, tasks, prompted, is_sampled=True)
    return Report(result, about | {"versions": versions(*PACKAGES)}, trials=trials)


def _prompted(options: EvalOptions, config: Config, player: Player, tasks: Sequence[Task]) -> Prompted | None:
    return Prompted(options.prompts, config, player, tasks, options.split) if options.prompts.is_used else None


def _about(
    config: Config, options: EvalOptions, tasks: Sequence[Task], prompted: Prompted | None, *, is_sampled: bool
) -> dict[str, Any]:
    about = {
        "env": config.task.env,
        "options": config.task.options,
        "split": options.split,
        "tasks": [task.id for task in tasks],
        "episodes_per_task": options.num_played,
        "max_turns": config.eval.max_turns or config.rollout.max_turns,
        "seed": config.run.seed,
    }
    if is_sampled:
        names = ("top_p", "max_new_tokens", "stop", "layout", "detail")
        about |= {"temperature": config.eval.temperature} | {name: getattr(config.rollout, name) for name in names}
    return about | (prompted.about() if prompted else {})


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
