"""Play episodes: all living siblings take their turn together, one batched generation a turn."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.rollout.generator import Generator
from spear_rl.rollout.layout import Layout, growing_chat
from spear_rl.rollout.renderer import Renderer
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

_log = logging.getLogger(__name__)


@dataclass
class _Episode:
    task: Task
    env: Environment | None = None
    observations: list[Observation] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    success: bool | None = None
    stop: Stop | None = None
    error: BaseException | None = None

    @property
    def trajectory(self) -> Trajectory:
        cut_off = Stop.OVERLONG if self.turns and self.turns[-1].completion.truncated else Stop.MAX_TURNS
        success = math.fsum(turn.reward for turn in self.turns) > 0 if self.success is None else self.success
        return Trajectory(self.turns, self.stop or cut_off, success=success)


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
) -> list[Group]:
    """Play `group_size` episodes of every task.

    An episode whose environment raises is set up again and replayed once; if it raises again it is left out of its
    group and counted there. `max_context` ends an episode whose next prompt would be longer. A
    completion that hit its token limit does not end its episode: that would let a policy escape the rest of it,
    penalties included, by babbling.
    """
    groups = [[_started(task) for _ in range(group_size)] for task in tasks]
    episodes = [episode for group in groups for episode in group]
    for _ in range(max_turns):
        for episode in _living(episodes):
            episode.prompt_ids = layout(renderer, episode.task, episode.observations, episode.turns)
            if max_context is not None and len(episode.prompt_ids) > max_context:
                episode.stop = Stop.OVERLONG
        living = _living(episodes)
        if not living:
            break
        completions = generator.generate([episode.prompt_ids for episode in living])
        for episode, completion in zip(living, completions, strict=True):
            _advance(episode, completion, renderer)
    for episode in episodes:
        _close(episode)
    if episodes and all(episode.stop is Stop.FAILED for episode in episodes):
        raise RuntimeError(f"all {len(episodes)} episodes failed in their environments") from episodes[0].error
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


def demonstration(
    task: Task, *, renderer: Renderer, layout: Layout = growing_chat, tagged: bool, seed: int
) -> Trajectory:
    """An expert episode of `task`, in the tokens a policy that plays it would see and write.

    Args:
        tagged: write the expert's actions the way the task's instructions ask for (`Task.answer_format`).
    """
    if task.demonstrate is None:
        raise ValueError(f"task {task.id} has no expert to demonstrate it: use an environment with demonstrations")
    episode = _started(task)
    for action in task.demonstrate(seed):
        if episode.stop is not None:
            break
        episode.prompt_ids = layout(renderer, task, episode.observations, episode.turns)
        token_ids = renderer.answer(task.answer_format.format(action=action) if tagged else action)
        _advance(episode, Completion(token_ids, [0.0] * len(token_ids)), renderer)
    if episode.stop is Stop.FAILED:
        raise RuntimeError(f"the demonstration of {task.id} failed in its environment") from episode.error
    _close(episode)
    return episode.trajectory


def _living(episodes: Sequence[_Episode]) -> list[_Episode]:
    return [episode for episode in episodes if episode.stop is None]


def _started(task: Task) -> _Episode:
    episode = _Episode(task)
    for _ in range(2):
        try:
            episode.env = task.make_env()
            episode.observations = [episode.env.reset()]
            return episode
        except Exception as error:
            episode.error = error
    return _failed(episode)


def _advance(episode: _Episode, completion: Completion, renderer: Renderer) -> None:
    action = renderer.parse(completion.token_ids)
    result = _result(episode, action)
    if result is None:
        _failed(episode)
        return
    seen = episode.observations[-1]
    episode.turns.append(
        Turn(
            episode.prompt_ids,
            completion,
            reward=result.reward,
            state_key=seen.state_key,
            used_tool=result.used_tool,
            invalid=result.invalid,
            observation=seen.text,
            text=action,
        )
    )
    episode.observations.append(result.observation)
    if result.success is not None:
        episode.success = result.success
    if result.done:
        episode.stop = Stop.DONE


def _result(episode: _Episode, action: str) -> StepResult | None:
    """The environment's answer; after an error, that of a fresh environment brought to the same point."""
    for attempt in range(2):
        try:
            if attempt:
                episode.env = episode.task.make_env()
                episode.env.reset()
                for turn in episode.turns:
                    episode.env.step(turn.text)
            if episode.env is not None:
                return episode.env.step(action)
        except Exception as error:
            episode.error = error
    return None


def _close(episode: _Episode) -> None:
    if episode.env is not None:
        with suppress(Exception):  # the episode is over; what it earned stands
            episode.env.close()


def _failed(episode: _Episode) -> _Episode:
    _log.warning("an episode of %s was left out: its environment failed twice: %r", episode.task.id, episode.error)
    episode.stop = Stop.FAILED
    return episode
