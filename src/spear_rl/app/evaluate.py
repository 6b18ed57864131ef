"""The verb `eval`: any policy on a panel of tasks. Torch is imported only for a local model."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from spear_rl.app.build.prompting import Prompted, PromptOptions, Trials
from spear_rl.app.build.rollout import Player, eval_sampling_of, tasks_of
from spear_rl.app.config import Config, check, load
from spear_rl.app.resume import is_run, stored_with
from spear_rl.errors import CheckpointError, ConfigError, DiskError
from spear_rl.io.record import PACKAGES, versions
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError, UnansweredError
from spear_rl.rollout.policies.endpoint import ChatEndpoint
from spear_rl.rollout.policies.reference import REFERENCES, ReferencePolicy
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.rollout.workers.progress import Tally
from spear_rl.settings.ranges import Range, checked
from spear_rl.train.episode_files import EVALUATIONS, write_evaluation
from spear_rl.train.evaluate import Evaluation, Samples, evaluation, sampled
from spear_rl.types import Group

Notice = Callable[[Tally], None]


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What to play, and for an endpoint how to reach it: the options of `spear eval`, under the same names."""

    split: str = "validation"
    tasks: Annotated[int, Range(1, 10_000_000, zero="all")] = 0
    episodes: Annotated[int, Range(1, 10_000)] = 1
    """Per task."""
    samples: Annotated[int, Range(1, 10_000, zero="none")] = 0
    """k of mean@k and pass@k, for which at least k episodes per task are played; 0 is eval.samples if above 1."""
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

    def under(self, config: Config) -> Self:
        """These options, with eval.samples where they say nothing of episodes."""
        says_nothing = self.num_played == 1 and not self.samples and self.prompts.prompting != "reflexion"
        return replace(self, samples=config.eval.samples) if says_nothing and config.eval.samples > 1 else self

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
    notes: tuple[str, ...] = ()
    """Where its episodes are, or why they were not kept."""
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
    episodes: Path | None = None,
) -> Report:
    """Play a panel with a policy by name: expert, random, an endpoint's address, a run folder or a model.

    Args:
        overrides: settings as section.key=value.
        source: a preset or TOML file to take the other settings from; a run's own if left out, else the defaults.
        notice: called with the progress so far.
        episodes: file to write the episodes to; those of a run's policy are kept in its evaluations/ too.
    """
    if "://" not in policy and options.is_for_endpoint:
        raise ConfigError("--model, --api-key-env, --parallel and --timeout are for an endpoint: http://host:port/v1")
    if policy in REFERENCES and options.prompts.is_used:
        raise ConfigError(f"--prompting is for policies that read prompts: an endpoint or a model, not {policy}")
    if policy in REFERENCES or "://" in policy:
        return _with_messages(policy, load(source or None, overrides), options, notice, episodes)
    return _with_model(policy, overrides, options, source, notice, episodes)


def episodes_beside(out: Path) -> Path:
    """The file for the episodes of a result: result.json -> result.episodes.jsonl."""
    return out.with_suffix(".episodes.jsonl")


def _kept(groups: Sequence[Group], places: Sequence[Path], *, step: int, split: str) -> tuple[str, ...]:
    """Write the episodes; a file that cannot be written costs no result."""
    notes = []
    for path in places:
        try:
            write_evaluation(path, groups, step=step, split=split)
            notes.append(f"episodes are in {path}")
        except DiskError as error:
            notes.append(f"episodes are not kept: {error}")
    return tuple(notes)


def _with_messages(
    policy: str, config: Config, options: EvalOptions, notice: Notice | None, episodes: Path | None
) -> Report:
    """A policy that reads messages instead of tokens: the expert, the random one, or an endpoint's model."""
    options, server = options.under(config), None
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
            groups = trials.groups
        else:
            generator = generator_of(eval_sampling_of(config), 0)
            max_turns = config.eval.max_turns
            groups = player.groups(tasks, generator, group_size=options.num_played, step=0, max_turns=max_turns)
    settings = _about(config, options, tasks, prompted, is_sampled=server is not None)
    notes = _kept(groups, [episodes] if episodes else [], step=0, split=options.split)
    return _report(groups, options, about | settings | {"versions": versions()}, notes, trials)


def _with_model(
    model: str, overrides: Sequence[str], options: EvalOptions, source: str, notice: Notice | None,
    episodes: Path | None,
) -> Report:  # fmt: skip
    """A run's newest policy under its own settings, or any model under the defaults and `overrides`."""
    place = Path(model := os.path.expanduser(model))
    homes = [place, place.parent, place.parent.parent] if os.path.isdir(place) else []
    home = next((folder for folder in homes if is_run(folder)), None)
    config = stored_with(home, overrides, folder=place) if home and not source else load(source or None, overrides)
    options = options.under(config)
    tasks = tasks_of(config, options.split, count=options.tasks or None)
    from spear_rl.app.build.training import engine_of
    from spear_rl.app.train import played
    from spear_rl.engines.generation.choice import Choice
    from spear_rl.engines.models.hub import used_commits
    from spear_rl.train.checkpoint import MANIFEST, checked_step, checkpoints

    folder = place if os.path.isdir(place) else None
    if home is not None and home == place:
        saved = [*checkpoints(home / "checkpoints"), *home.glob("model")]
        if not saved:
            raise CheckpointError(f"{home} has no checkpoint yet, so there is nothing to evaluate")
        folder = saved[-1]
    step = checked_step(folder) if folder is not None and (folder / MANIFEST).exists() else 0
    if folder is None:
        config.engine.model = model
        check(config)
    choices: list[Choice] = []
    engine = engine_of(config, folder=folder, on_choice=choices.append)
    with Player(config, engine.tokenizer, processor=engine.processor) as player:
        prompted, trials = _prompted(options, config, player, tasks), None
        envs = player.watched(len(tasks) * options.num_played, notice)
        if prompted and options.prompts.prompting == "reflexion":
            trials = prompted.trials(lambda s, n: engine.evaluation_generator(s, seed=config.run.seed + 7919 + n), envs)
            groups = trials.groups
        else:
            groups = played(config, engine, player, tasks, step=0, num_episodes=options.num_played)
    places = [episodes] if episodes else []
    if home is not None and folder is not None and config.run.trajectories_every:
        name = re.sub(r"[^\w.-]", "_", f"eval_{options.split[:100]}_{folder.name}", flags=re.ASCII)
        places.append(home / EVALUATIONS / f"{name}.jsonl")
    taken = tuple(choice.sentence for choice in choices)
    notes = (*taken, *_kept(groups, places, step=step, split=options.split))
    about = {"policy": "model", "model": model, "folder": str(folder) if folder else None, "commits": used_commits()}
    about |= _about(config, options, tasks, prompted, is_sampled=True)
    return _report(groups, options, about | {"versions": versions(*PACKAGES)}, notes, trials)


def _report(
    groups: Sequence[Group],
    options: EvalOptions,
    about: dict[str, Any],
    notes: tuple[str, ...],
    trials: Trials | None,
) -> Report:
    result = evaluation(groups, k=options.samples)
    samples = sampled(result.counts.values(), options.samples) if options.samples else None
    return Report(result, about, samples, notes, trials)


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
        sampling, names = (
            eval_sampling_of(config),
            ("max_new_tokens", "max_response_tokens", "stop", "layout", "detail", "thinking"),
        )
        about |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        about |= {name: getattr(config.rollout, name) for name in names}
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
