"""Collect rollouts: environments answer, prompts are rendered and the policy completes them, each when it is ready."""

import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from spear_rl.errors import ConfigError, UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.io.files import same_folder
from spear_rl.rollout.choice import Start, TaskChoice
from spear_rl.rollout.contract import with_location
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.generator import Generator, Stream, Streaming
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.renderer import Layout, Renderer, growing_chat
from spear_rl.rollout.workers.runner import Answer, EnvRunner, Failure, InProcess, expert_actions
from spear_rl.types import Completion, Group, Metrics, ShortPrompt, Stop, Trajectory, Turn, images_of

_log = logging.getLogger(__name__)


class EpisodesFailedError(UserError, RuntimeError):
    """Every episode failed, so there is nothing to train on."""


class Rollouts:
    """The `collect` function of a training step: chooses the step's tasks and plays them with `collect`.

    Fresh tasks depend on the step alone, so that runs are comparable and resuming is exact: every epoch shuffles all
    tasks, and a step takes the next `num_tasks` of them.

    Args:
        choice: replaces some of them by tasks that were played before. It is a state that a checkpoint holds.
    """

    def __init__(
        self, collect: Callable[..., list[Group]], tasks: Sequence[Task], *, num_tasks: int, seed: int,
        choice: TaskChoice | None = None,
    ) -> None:  # fmt: skip
        self._collect, self._tasks, self._num_tasks, self._seed = collect, tasks, num_tasks, seed
        self._choice = choice

    def __call__(self, step: int) -> list[Group]:
        if self._choice is None:
            return self._collect(self.tasks(step), step=step)
        chosen = self._choice.chosen(self._places(step), step)
        starts = [choice.start for choice in chosen]
        groups = self._collect([self._tasks[choice.place] for choice in chosen], step=step, starts=starts)
        return self._choice.noted(chosen, groups, step)

    def tasks(self, step: int) -> list[Task]:
        """The fresh tasks of a step."""
        return [self._tasks[place] for place in self._places(step)]

    def _places(self, step: int) -> list[int]:
        places = [divmod(p, len(self._tasks)) for p in range(step * self._num_tasks, (step + 1) * self._num_tasks)]
        numbers = range(len(self._tasks))
        epochs = {epoch for epoch, _ in places}
        orders = {epoch: random.Random(f"{self._seed}/{epoch}").sample(numbers, len(numbers)) for epoch in epochs}
        return [orders[epoch][place] for epoch, place in places]

    def state_dict(self) -> dict[str, Any]:
        return self._choice.state_dict() if self._choice else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._choice and state:
            self._choice.load_state_dict(state)


def collect_within(tasks: Sequence[Task], *, max_context: int | None, **settings: Any) -> list[Group]:
    """`collect_groups`; ConfigError if no first prompt fits into `max_context`."""
    groups = collect_groups(tasks, max_context=max_context, **settings)
    if max_context and not any(played.turns for group in groups for played in group.trajectories):
        raise ConfigError(f"rollout.max_context={max_context}: every first prompt is longer: raise it")
    return groups


@dataclass
class _Episode:
    task: Task
    observations: list[Observation] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    tokens_left: int | None = None
    """What the policy may still write in this episode; None is any number."""
    completion: Completion = field(default_factory=lambda: Completion([], []))
    text: str = ""
    """The last completion, parsed."""
    success: bool | None = None
    metrics: Metrics = field(default_factory=dict)
    stop: Stop | None = None
    error: BaseException | None = None
    start: Start | None = None
    """Its first turns, if they are given."""
    has_strayed: bool = False

    @property
    def trajectory(self) -> Trajectory:
        turns = self.turns
        if turns and self.stop is not Stop.DONE and self.task.unfinished_reward:
            *earlier, last = turns
            turns = [*earlier, replace(last, reward=last.reward + self.task.unfinished_reward)]
        cut_off = Stop.OVERLONG if turns and turns[-1].completion.truncated else Stop.MAX_TURNS
        success = math.fsum(turn.reward for turn in self.turns) > 0 if self.success is None else self.success
        answer = self.observations[-1].text if turns else ""
        given = min(self.start.num_given, len(turns)) if self.start else 0
        return Trajectory(
            turns, self.stop or cut_off, success=success, metrics=self.metrics, last_observation=answer, num_given=given
        )  # fmt: skip

    @property
    def given(self) -> Completion | None:
        """The next completion, if it is given."""
        if self.start is None or len(self.turns) >= self.start.num_given:
            return None
        return self.start.win[len(self.turns)].completion

    def strays(self) -> bool:
        """Whether given turns led to another state than they did in the win; the episode then begins anew without."""
        number = len(self.turns)
        if self.start is None or number > self.start.num_given or self.stop is Stop.FAILED:
            return False
        seen, known = self.observations[-1], self.start.win[number]
        repeats = (seen.text, seen.state_key) == (known.observation, known.state_key) and self.stop is None
        if repeats and (not number or self.turns[-1].reward == self.start.win[number - 1].reward):
            return False
        if self.tokens_left is not None:
            self.tokens_left += sum(len(turn.completion.token_ids) for turn in self.turns)
        self.observations, self.turns, self.metrics = [], [], {}
        self.success, self.stop, self.start, self.has_strayed = None, None, None, True
        return True

    def add_answer(self, answer: Answer) -> None:
        """Record the environment's answer to the reset or to the last completion."""
        if isinstance(answer, Failure):
            self.error, self.stop = answer.error, Stop.FAILED
            _log.debug("an episode of %s failed: %s", self.task.id, in_words(answer.error), exc_info=answer.error)
        elif isinstance(answer, StepResult):
            self._add_turn(answer)
        else:
            self.observations.append(answer)

    def _add_turn(self, result: StepResult) -> None:
        seen, images = self.observations[-1], images_of(self.prompt_ids)
        self.turns.append(
            Turn(
                list(self.prompt_ids) if images else self.prompt_ids,
                self.completion,
                reward=result.reward,
                state_key=seen.state_key,
                used_tool=result.used_tool,
                invalid=result.invalid,
                observation=seen.text,
                text=self.text,
                images=images,
                action=result.action,
            )
        )
        self.observations.append(result.observation)
        if result.success is not None:
            self.success = result.success
        self.metrics |= result.metrics
        if result.done:
            self.stop = Stop.DONE

    @property
    def request(self) -> list[int]:
        """The prompt as the generator gets it: with the episode's limit, where it has one."""
        if self.tokens_left is None:
            return self.prompt_ids
        return ShortPrompt(self.prompt_ids, images_of(self.prompt_ids), self.tokens_left)

    def add_completion(self, completion: Completion, renderer: Renderer) -> str:
        """Record the completion, cut to what the episode has left; its text for the environment.

        That is without thoughts, unless the task asks for them.
        """
        if self.tokens_left is not None:
            completion = cut(completion, self.tokens_left)
            self.tokens_left -= len(completion.token_ids)
        self.completion, self.text = completion, renderer.parse(completion.token_ids)
        is_asked_for = "<think" in self.task.instructions + self.task.answer_format
        return self.text if "</think>" not in self.text or is_asked_for else without_thoughts(self.text).strip()

    def goes_on(self, renderer: Renderer, layout: Layout, *, max_turns: int, max_context: int | None) -> bool:
        """Whether there is another turn; if so, `prompt_ids` is its prompt."""
        if self.stop is not None or len(self.turns) >= max_turns:
            return False
        if self.tokens_left == 0:
            self.stop = Stop.OVERLONG
            return False
        self.prompt_ids = layout(renderer, self.task, self.observations, self.turns)
        if max_context is not None and len(self.prompt_ids) > max_context:
            self.stop = Stop.OVERLONG
        return self.stop is None


def collect_groups(
    tasks: Sequence[Task], *, group_size: int, generator: Generator, renderer: Renderer, max_turns: int, step: int,
    layout: Layout = growing_chat, max_context: int | None = None, max_response_tokens: int | None = None,
    envs: EnvRunner | None = None, starts: Sequence[Start | None] | None = None,
) -> list[Group]:  # fmt: skip
    """Play `group_size` episodes of every task.

    An episode whose environment raises is replayed once in a new environment. If that raises too, the episode is left
    out of its group and counted there; EpisodesFailedError if none is left. ContractError, which is never retried, if
    an environment returns what its protocol does not allow.

    `max_context` ends an episode whose next prompt would be longer. `max_response_tokens` is what the policy may write
    in an episode, over all turns: a turn may take what is left of it, and the episode ends when nothing is. A
    completion that reaches its own token limit does not end its episode: otherwise a policy could escape later
    penalties by long answers.

    With continuous batching the generator goes on while environments answer. Without it, all running episodes form one
    batch, in their order, once every environment has answered.

    Args:
        envs: the runner: in-process (the default) or a pool of workers.
        starts: per task, the given turns that its episodes begin with, in the state that they lead to. An episode in
            which they do not repeat themselves is played from the start instead.
    """
    begun = zip(tasks, starts or [None] * len(tasks), strict=True)
    new = partial(_Episode, tokens_left=max_response_tokens)
    groups = [[new(task, start=start) for _ in range(group_size)] for task, start in begun]
    episodes = [episode for group in groups for episode in group]
    stream: Stream = generator.stream() if isinstance(generator, Streaming) else Lockstep(generator)
    runner = InProcess() if envs is None else envs
    folder = os.curdir
    with suppress(OSError):
        folder = os.getcwd()
    try:
        for key, episode in enumerate(episodes):
            runner.open(key, episode.task)
        while len(runner) or len(stream):
            num_needed = len(runner) if isinstance(stream, Lockstep) else int(not len(stream))
            for key, answer in sorted(runner.answers(num_needed), key=lambda entry: entry[0]):
                episode = episodes[key]
                episode.add_answer(answer)
                if episode.strays():
                    runner.close(key)
                    runner.open(key, episode.task)
                elif not episode.goes_on(renderer, layout, max_turns=max_turns, max_context=max_context):
                    runner.close(key)
                elif episode.start and (given := episode.given):
                    runner.step(key, episode.add_completion(given, renderer))
                else:
                    stream.add(key, episode.request)
            for key, completion in stream.finished():
                runner.step(key, episodes[key].add_completion(completion, renderer))
    finally:
        try:
            for key in range(len(episodes)):
                runner.close(key)
        finally:
            with suppress(OSError):
                os.chdir(folder)  # an environment may have left it, and our paths may be relative
    if failed := [(episode.task, episode.error) for episode in episodes if episode.error is not None]:
        report_failures(failed, num_episodes=len(episodes))
    return [
        Group(
            task.id,
            [episode.trajectory for episode in group if episode.stop is not Stop.FAILED],
            step=step,
            info={"family": task.family} | (strayed(group) if starts else {}),
            num_failed=sum(episode.stop is Stop.FAILED for episode in group),
        )
        for task, group in zip(tasks, groups, strict=True)
    ]


def strayed(group: Sequence[_Episode]) -> dict[str, str]:
    """How many episodes of a group did not repeat their given turns, if any."""
    count = sum(episode.has_strayed for episode in group)
    return {"strayed": str(count)} if count else {}


def cut(completion: Completion, most: int) -> Completion:
    """The first `most` tokens of a completion, truncated if it has more."""
    if len(completion.token_ids) <= most:
        return completion
    lists = {name: getattr(completion, name) for name in ("token_ids", "logprobs", "weights", "entropies")}
    return replace(completion, truncated=True, **{name: values and values[:most] for name, values in lists.items()})


class Lockstep:
    """A stream over a generator without continuous batching: all pending prompts are completed as one batch."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._pending: list[tuple[int, list[int]]] = []

    def add(self, key: int, prompt: list[int]) -> None:
        self._pending.append((key, prompt))

    def finished(self) -> list[tuple[int, Completion]]:
        pending, self._pending = self._pending, []
        completions = self._generator.generate([prompt for _, prompt in pending]) if pending else []
        return list(zip((key for key, _ in pending), completions, strict=True))

    def __len__(self) -> int:
        return len(self._pending)


def report_failures(failed: Sequence[tuple[Task, BaseException]], *, num_episodes: int) -> None:
    """Log how many episodes failed and why the last one did; EpisodesFailedError if all did."""
    task, error = failed[-1]
    last = f"the last, of {clipped(task.id, 200)}, with: {with_location(error)}"
    if len(failed) == num_episodes:
        raise EpisodesFailedError(f"all {len(failed)} episodes failed in their environments, {last}") from error
    _log.warning("%d of %d episodes failed and were left out, %s", len(failed), num_episodes, last)


def demonstration(
    task: Task, *, renderer: Renderer, layout: Layout = growing_chat, tagged: bool, seed: int,
    envs: EnvRunner | None = None,
) -> Trajectory:  # fmt: skip
    """An expert episode of `task`, in the tokens that a policy would see and write.

    Args:
        tagged: write the expert's actions in the task's `answer_format`.
    """
    runner = InProcess() if envs is None else envs
    with same_folder():
        actions = expert_actions(task, seed, runner)
    answers = [renderer.answer(task.answer_format.format(action=action) if tagged else action) for action in actions]
    [group] = collect_groups(
        [task],
        group_size=1,
        generator=_Script(answers),
        renderer=renderer,
        layout=layout,
        max_turns=len(answers),
        step=0,
        envs=runner,
    )
    return group.trajectories[0]


class _Script:
    """A generator with fixed completions."""

    def __init__(self, answers: Sequence[list[int]]) -> None:
        self._answers = iter(answers)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [Completion(ids, [0.0] * len(ids)) for ids in (next(self._answers) for _ in prompts)]
