"""From a configuration to the parts of a rollout: tasks, environments, sampling. Never imports torch."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from spear_rl.app.config import Config, require_env
from spear_rl.envs import option_names, tasks_fn
from spear_rl.errors import ConfigError, OptionError, UserError
from spear_rl.io.escaping import clipped
from spear_rl.io.files import same_folder
from spear_rl.rollout.agents.collect import AgentRunner
from spear_rl.rollout.agents.records import EPISODES, Recorded, num_records, read_records, texts_in, write_records
from spear_rl.rollout.agents.rendering import AgentRenderer, require_text
from spear_rl.rollout.choice import TaskChoice
from spear_rl.rollout.collect import Rollouts, collect_within, demonstration, report_failures
from spear_rl.rollout.contract import ContractError, with_location
from spear_rl.rollout.env import StepResult, Task, TasksFn
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.rendering.images import VisionRenderer
from spear_rl.rollout.rendering.layouts import LAYOUTS
from spear_rl.rollout.rendering.renderer import ChatRenderer, Layout, Renderer
from spear_rl.rollout.tasks import panel_of, tasks_in_file
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.progress import ProgressRunner, Tally
from spear_rl.rollout.workers.runner import EnvRunner, Failure, InProcess, expert_actions
from spear_rl.types import Group, Trajectory

SPLITS = ("train", "validation", "test")
"""The splits of every environment; some have more."""


def tasks_of(config: Config, split: str, *, count: int | None = None, key: str = "--split") -> Sequence[Task]:
    """The panel of a split, or its first `count` tasks; an error names `key` as what asks for the split."""
    name, options, is_usual = config.task.env, config.task.options, split in SPLITS
    tasks = _tasks_fn(config)
    try:
        panel = panel_of(tasks, split, **options)
    except ContractError as error:
        raise ConfigError(f"task.env: {name}: {error}") from error
    except OptionError as error:
        is_other = is_usual or not str(error).startswith("split")
        raise ConfigError(
            f"{'task.options.' if is_other else f'{key} cannot be {split!r} with {name}: '}{error}"
        ) from error
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, which would end the run as if all were well
        if not is_usual and isinstance(error, (ValueError, TypeError, LookupError)):
            raise ConfigError(f"{key} cannot be {split!r} with {name}: {clipped(str(error), 500)}") from error
        if options and isinstance(error, (ValueError, TypeError)):
            raise ConfigError(f"task.options: {clipped(str(error), 500)}") from error
        raise ConfigError(f"task.env: tasks({split!r}) of {name} raised {with_location(error)}") from error
    if not len(panel):
        setting = "task.options leave" if options else "task.env: there is"
        raise ConfigError(f"{setting} no task in the {split} panel of {name}{': widen them' if options else ''}")
    return panel if count is None else panel[:count]


def _tasks_fn(config: Config) -> TasksFn:
    """The environment's `tasks` function, after checking the names of its options.

    With task.python it runs in that virtual environment, which checks the options.
    """
    name, python = config.task.env, config.task.python
    require_env(config)
    if name.endswith(".jsonl"):
        _check_file(config)
        return partial(tasks_in_file, name)
    tasks = tasks_fn(name, python=python)
    if python:
        return tasks
    known = option_names(tasks)
    for option in config.task.options:
        if known is not None and option not in known:
            raise ConfigError(f"task.options.{option}: {name} has no such option; it has: {', '.join(known)}")
    return tasks


def runner_of(config: Config) -> Pool | InProcess:
    """The runner of the environments: a pool of workers, or this process."""
    rollout = config.rollout
    if not rollout.workers or config.task.agent:
        return InProcess()
    python = os.path.abspath(config.task.python) if config.task.python else None
    return Pool(num_workers=rollout.workers, python=python, step_timeout=rollout.step_timeout)


def expert_texts(config: Config, *, num_episodes: int = 400, num_parallel: int = 16) -> list[str]:
    """Observations and actions of expert episodes of the training panel: the corpus of a tokenizer from scratch."""
    told = texts_in(config.sft.from_, key="sft.from") if config.sft.from_ else []
    tasks = tasks_of(config, "train")[:num_episodes]
    if config.task.env.endswith(".jsonl"):
        return told + [json.dumps(dict(task.data)) for task in tasks]
    texts: list[list[str]] = [[] for _ in tasks]
    errors: list[BaseException | None] = [None] * len(tasks)
    runner = runner_of(config)
    try:
        with same_folder():
            for first in range(0, len(tasks), num_parallel):  # a bounded number of environments in memory
                _play_experts(tasks, range(len(tasks))[first : first + num_parallel], runner, texts, errors)
    finally:
        if isinstance(runner, Pool):
            runner.shut()
    if failed := [(task, error) for task, error in zip(tasks, errors, strict=True) if error is not None]:
        report_failures(failed, num_episodes=len(tasks))
    if config.rollout.detail == "full":
        texts = [[*episode, task.instructions] for episode, task in zip(texts, tasks, strict=True)]
    return told + [text for episode in texts for text in episode]


def _play_experts(
    tasks: Sequence[Task],
    indices: Sequence[int],
    runner: EnvRunner,
    texts: list[list[str]],
    errors: list[BaseException | None],
) -> None:
    """Play the tasks at `indices` in parallel; fills `texts`, or `errors` where an episode fails."""
    actions: dict[int, Iterator[str]] = {}
    for index in indices:
        runner.open(index, tasks[index])
    while len(runner):
        for index, answer in runner.answers(1):
            if isinstance(answer, Failure):
                errors[index] = answer.error
            elif isinstance(answer, StepResult):
                texts[index].append(answer.observation.text)
            else:
                task, texts[index] = tasks[index], [answer.text]
                actions[index] = iter(expert_actions(task, index, runner) if task.demonstrate else ())
            is_over = isinstance(answer, Failure) or getattr(answer, "done", False)
            action = None if is_over else next(actions[index], None)
            if action is None:
                runner.close(index)
            else:
                texts[index].append(action)
                runner.step(index, action)


class Player:
    """Plays tasks as configured, with any generator; a context manager, which ends its workers.

    Args:
        tokenizer: of a policy that reads tokens.
        processor: of a vision-language policy.
        renderer: instead, of a policy that does not read tokens; rollout.max_context and max_response_tokens then have
            no effect.
    """

    def __init__(
        self, config: Config, tokenizer: Any = None, *, processor: Any = None, renderer: Renderer | None = None
    ) -> None:
        thinking = config.rollout.thinking
        vision = None if processor is None else VisionRenderer(processor, thinking=thinking)
        self._config, self.renderer = config, renderer or vision or ChatRenderer(tokenizer, thinking=thinking)
        # Tokens of a policy that does not read them are not known.
        limits = config.rollout if renderer is None else None
        self.max_context = limits.max_context if limits else None
        self._max_response_tokens = limits.max_response_tokens or None if limits else None
        self._runner, self._tokenizer = runner_of(config), tokenizer
        self.envs: EnvRunner = self._runner
        self.layout = layout_of(config)
        self._agents = None if renderer or not config.task.agent else agents_of(config, tokenizer, processor)
        self.answer: Callable[[Task, str], str] | None = None
        """What a watched environment is given of an answer; by default all of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._runner, Pool):
            self._runner.shut()
        if self._agents is not None:
            self._agents.close()

    def watched(self, num_episodes: int, notice: Callable[[Tally], None] | None = None) -> ProgressRunner:
        """Report progress for the next `num_episodes` episodes."""
        watched = ProgressRunner(self._runner, num_episodes=num_episodes, notice=notice, answer=self.answer)
        self.envs = watched
        return watched

    def groups(
        self, tasks: Sequence[Task], generator: Generator, *, group_size: int, step: int, max_turns: int = 0
    ) -> list[Group]:
        """`group_size` episodes of every task; refuses a max_context that no first prompt fits into."""
        return self._collect(generator, group_size, max_turns)(tasks, step=step)

    def rollouts(
        self, tasks: Sequence[Task], generator: Generator, *,
        corrected: Callable[[list[Group]], list[Group]] | None = None,
    ) -> Rollouts:  # fmt: skip
        """The `collect` of a training step; `corrected` is applied to what was played."""
        rollout, seed = self._config.rollout, self._config.run.seed
        play = self._collect(generator, rollout.group_size)
        collect = (lambda tasks, **settings: corrected(play(tasks, **settings))) if corrected else play
        if self._agents is not None:
            collect = partial(self._recorded, collect)
        return Rollouts(collect, tasks, num_tasks=rollout.num_tasks, seed=seed, choice=choice_of(self._config, tasks))

    def _recorded(self, collect: Callable[..., list[Group]], tasks: Sequence[Task], *, step: int) -> list[Group]:
        """What agents played, whose exact tokens are kept as often as episodes are dumped."""
        groups, run = collect(tasks, step=step), self._config.run
        if run.trajectories_every and step % run.trajectories_every == 0:
            write_records(Path(run.dir) / EPISODES / f"step_{step:06d}.jsonl", groups)
        return groups

    def _collect(self, generator: Generator, group_size: int, max_turns: int = 0) -> Callable[..., list[Group]]:
        limits: dict[str, Any] = {
            "group_size": group_size,
            "generator": generator,
            "max_turns": max_turns or self._config.rollout.max_turns,
            "max_context": self.max_context,
            "max_response_tokens": self._max_response_tokens,
        }
        if self._agents is not None:
            return partial(self._agents.collect, **limits)
        return partial(collect_within, renderer=self.renderer, layout=self.layout, envs=self.envs, **limits)

    def demonstrations(self, tasks: Sequence[Task], count: int) -> list[Trajectory]:
        """`count` expert episodes over `tasks`, repeated as needed with other seeds; or the won ones of sft.from."""
        if self._config.sft.from_:
            found = episodes_in(self._config, self._config.sft.from_, self._tokenizer, key="sft.from", count=count)
            return [recorded.trajectory for recorded in found]
        return [
            demonstration(
                tasks[number % len(tasks)],
                renderer=self.renderer,
                layout=self.layout,
                tagged=self._config.rollout.detail == "full",
                seed=self._config.run.seed * 1_000_003 + number,
                envs=self.envs,
            )
            for number in range(count)
        ]


def agents_of(config: Config, tokenizer: Any, processor: Any) -> AgentRunner:
    """The runner of task.agent."""
    require_text(processor)
    rollout, python = config.rollout, config.task.python
    return AgentRunner(
        config.task.agent,
        agent_renderer(config, tokenizer),
        num_parallel=rollout.workers or 64,
        timeout=rollout.step_timeout,
        python=os.path.abspath(python) if python else None,
        seed=config.run.seed,
    )


def _check_file(config: Config) -> None:
    """The tasks of a file are for an agent, and have no expert."""
    name, sft = config.task.env, config.sft
    if not config.task.agent:
        raise ConfigError(f"task.env: {name} has tasks for an agent: set task.agent=package.module:function")
    if sft.episodes and not sft.from_:
        advice = "set sft.from to a file of chats or episodes, or sft.episodes=0"
        raise ConfigError(f"sft.episodes: the tasks of {name} have no expert to demonstrate them: {advice}")


def agent_renderer(config: Config, tokenizer: Any) -> AgentRenderer:
    """The renderer of conversations with tools; it reads calls in every format that we know."""
    return AgentRenderer(tokenizer, thinking=config.rollout.thinking)


def counted(config: Config) -> Config:
    """The config with the number of episodes in sft.from, where sft.episodes does not say how many to take."""
    if config.sft.from_ and not config.sft.episodes:
        config.sft.episodes = num_records(config.sft.from_, key="sft.from")
    return config


def episodes_in(config: Config, path: str, tokenizer: Any, *, key: str, count: int | None = None) -> list[Recorded]:
    """Those of the first `count` episodes of a file, or of all, that succeeded; `key` names the setting."""
    found = read_records(path, agent_renderer(config, tokenizer), key=key, count=count)
    won = [recorded for recorded in found if recorded.trajectory.success]
    if not won:
        raise ConfigError(f"{key}: none of the first {len(found)} episodes of {path} succeeded")
    return won


def choice_of(config: Config, tasks: Sequence[Task]) -> TaskChoice | None:
    """What chooses tasks that were played before; None if all are fresh."""
    rollout = config.rollout
    if not (rollout.return_share or rollout.restart_share):
        return None
    return TaskChoice(
        tasks,
        seed=config.run.seed,
        return_share=rollout.return_share,
        return_when=rollout.return_when,
        restart_share=rollout.restart_share,
        restart_success=rollout.restart_success,
    )


def layout_of(config: Config) -> Layout:
    """How the prompt of a turn is laid out."""
    rollout = config.rollout
    recent = {"history": rollout.history} if rollout.layout in ("turns", "log", "transcript") else {}
    return partial(LAYOUTS[rollout.layout], detail=rollout.detail, **recent)


def sampling_of(config: Config) -> Sampling:
    """How tokens are sampled in training."""
    rollout = config.rollout
    return Sampling(rollout.max_new_tokens, rollout.temperature, rollout.top_p, stop=tuple(rollout.stop))


def eval_sampling_of(config: Config) -> Sampling:
    """How tokens are sampled in an evaluation."""
    top_p = config.rollout.top_p if config.eval.top_p is None else config.eval.top_p
    return replace(sampling_of(config), temperature=config.eval.temperature, top_p=top_p)
