"""Play episodes: environments answer, prompts are rendered, the policy writes, whichever is ready first."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spear_rl.errors import UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.io.files import same_folder
from spear_rl.rollout.contract import with_place
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.generator import Generator, Lockstep, Stream, Streaming
from spear_rl.rollout.layouts import Layout, growing_chat
from spear_rl.rollout.rendering.renderer import Renderer
from spear_rl.rollout.workers.runner import Answer, EnvRunner, Failure, InProcess, demonstrated
from spear_rl.types import Completion, Group, Metrics, Stop, Trajectory, Turn

_log = logging.getLogger(__name__)


class EpisodesFailedError(UserError, RuntimeError):
    """Every episode failed, so there is nothing to go on with."""


@dataclass
class _Episode:
    task: Task
    observations: list[Observation] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None
    """What the policy said last, until the environment has answered it."""
    said: str = ""
    success: bool | None = None
    metrics: Metrics = field(default_factory=dict)
    stop: Stop | None = None
    error: BaseException | None = None

    @property
    def trajectory(self) -> Trajectory:
        cut_off = Stop.OVERLONG if self.turns and self.turns[-1].completion.truncated else Stop.MAX_TURNS
        success = math.fsum(turn.reward for turn in self.turns) > 0 if self.success is None else self.success
        return Trajectory(self._paid_turns(), self.stop or cut_off, success=success, metrics=self.metrics)

    def _paid_turns(self) -> list[Turn]:
        """The turns, with what the task takes for an episode that did not come to its end."""
        unpaid = self.task.unfinished_reward if self.turns and self.stop is not Stop.DONE else 0.0
        if not unpaid:
            return self.turns
        *earlier, last = self.turns
        return [*earlier, replace(last, reward=last.reward + unpaid)]

    def say(self, completion: Completion, renderer: Renderer) -> str:
        """The policy's words, for the environment."""
        self.completion, self.said = completion, renderer.parse(completion.token_ids)
        return self.said

    def hear(self, answer: Answer) -> None:
        """Write down what the environment answered."""
        if isinstance(answer, Failure):
            self.error, self.stop = answer.error, Stop.FAILED
            _log.debug("an episode of %s failed: %s", self.task.id, in_words(answer.error), exc_info=answer.error)
        elif isinstance(answer, StepResult):
            self._end_turn(answer)
        else:
            self.observations.append(answer)

    def _end_turn(self, result: StepResult) -> None:
        assert self.completion is not None
        seen, images = self.observations[-1], getattr(self.prompt_ids, "images", ())
        self.turns.append(
            Turn(
                list(self.prompt_ids) if images else self.prompt_ids,
                self.completion,
                reward=result.reward,
                state_key=seen.state_key,
                used_tool=result.used_tool,
                invalid=result.invalid,
                observation=seen.text,
                text=self.said,
                images=images,
            )
        )
        self.observations.append(result.observation)
        if result.success is not None:
            self.success = result.success
        self.metrics |= result.metrics
        if result.done:
            self.stop = Stop.DONE


def collect_groups(
    tasks: Sequence[Task],
    *,
    group_size: int,
    generator: Generator,
    renderer: Renderer,
    max_turns: int,
    step: int,
    layout: Layout = growing_chat,
    max_context: int | None = None,
    envs: EnvRunner | None = None,
) -> list[Group]:
    """Play `group_size` episodes of every task.

    An episode whose environment raises is set up again and replayed once; if it raises again it is left out of its
    group and counted there; it is an EpisodesFailedError if none is left. An environment that returns what its protocol
    does not allow is a ContractError at once.

    `max_context` ends an episode whose next prompt would be longer. A completion that hit its token limit does not end
    its episode: that would let a policy escape the rest of it, penalties included, by babbling.

    A generator that can stream goes on writing while environments answer. One that cannot is given all living episodes
    together, in their order, once the last environment has answered.

    Args:
        envs: who runs the environments; this process if left out.
    """
    groups = [[_Episode(task) for _ in range(group_size)] for task in tasks]
    episodes = [episode for group in groups for episode in group]
    stream: Stream = generator.stream() if isinstance(generator, Streaming) else Lockstep(generator)
    runner = InProcess() if envs is None else envs
    with same_folder():
        try:
            for key, episode in enumerate(episodes):
                runner.open(key, episode.task)
            while len(runner) or len(stream):
                due = len(runner) if isinstance(stream, Lockstep) else int(not len(stream))
                for key, answer in sorted(runner.answers(due), key=lambda entry: entry[0]):
                    episode = episodes[key]
                    episode.hear(answer)
                    if _has_turn(episode, renderer, layout, max_turns=max_turns, max_context=max_context):
                        stream.add(key, episode.prompt_ids)
                    else:
                        runner.close(key)
                for key, completion in stream.finished():
                    runner.step(key, episodes[key].say(completion, renderer))
        finally:
            for key in range(len(episodes)):
                runner.close(key)
    report_failures([(episode.task, episode.error) for episode in episodes])
    return [
        Group(
            task.id,
            [episode.trajectory for episode in group if episode.stop is not Stop.FAILED],
            step=step,
            info={"family": task.family},
            num_failed=sum(episode.stop is Stop.FAILED for episode in group),
        )
        for task, group in zip(tasks, groups, strict=True)
    ]


def report_failures(episodes: Sequence[tuple[Task, BaseException | None]]) -> None:
    """Say how many of the episodes failed, and why the last one did; an EpisodesFailedError if all did."""
    failed = [(task, error) for task, error in episodes if error is not None]
    if not failed:
        return
    task, error = failed[-1]
    last = f"the last, of {clipped(task.id, 200)}, with: {with_place(error)}"
    if len(failed) == len(episodes):
        raise EpisodesFailedError(f"all {len(failed)} episodes failed in their environments, {last}") from error
    _log.warning("%d of %d episodes failed and were left out, %s", len(failed), len(episodes), last)


def demonstration(
    task: Task,
    *,
    renderer: Renderer,
    layout: Layout = growing_chat,
    tagged: bool,
    seed: int,
    envs: EnvRunner | None = None,
) -> Trajectory:
    """An expert episode of `task`, in the tokens a policy that plays it would see and write.

    Args:
        tagged: write the expert's actions the way the task's instructions ask for (`Task.answer_format`).
    """
    runner = InProcess() if envs is None else envs
    with same_folder():
        actions = demonstrated(task, seed, runner)
    said = [renderer.answer(task.answer_format.format(action=action) if tagged else action) for action in actions]
    [group] = collect_groups(
        [task],
        group_size=1,
        generator=_Script(said),
        renderer=renderer,
        layout=layout,
        max_turns=len(said),
        step=0,
        envs=runner,
    )
    return group.trajectories[0]


def _has_turn(
    episode: _Episode, renderer: Renderer, layout: Layout, *, max_turns: int, max_context: int | None
) -> bool:
    """Whether it is the policy's turn, and if so with which prompt."""
    if episode.stop is not None or len(episode.turns) >= max_turns:
        return False
    episode.prompt_ids = layout(renderer, episode.task, episode.observations, episode.turns)
    if max_context is not None and len(episode.prompt_ids) > max_context:
        episode.stop = Stop.OVERLONG
    return episode.stop is None


class _Script:
    """Says the same whatever it is asked."""

    def __init__(self, said: Sequence[list[int]]) -> None:
        self._said = iter(said)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [Completion(ids, [0.0] * len(ids)) for ids in (next(self._said) for _ in prompts)]
