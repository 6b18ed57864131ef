"""Retries of failed tasks, with a reflection that the policy writes about every failed attempt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spear_rl.rollout.env import Task
from spear_rl.rollout.rendering.conversation import THINK_TAGS, without_thoughts
from spear_rl.rollout.rendering.renderer import Message
from spear_rl.types import Group, Stop, Trajectory

MAX_REFLECTION = 1000
"""Characters of a reflection that later prompts show."""
_MAX_OBSERVATION, _MAX_ANSWER = 1500, 800
"""Characters of one turn in the transcript of a failed attempt."""
_ENDS = {
    Stop.DONE: "The attempt ended without success.",
    Stop.MAX_TURNS: "The attempt ended without success because no turns were left.",
    Stop.OVERLONG: "The attempt ended without success because the conversation or an answer became too long.",
}


@dataclass
class Attempts:
    """The episodes of one task, at most one per trial, and the reflections between them."""

    task: Task
    groups: list[Group] = field(default_factory=list)
    """One per trial in which the task was played; without a trajectory if infrastructure failed."""
    reflections: list[str] = field(default_factory=list)

    @property
    def last(self) -> Trajectory | None:
        """The last episode that did not fail for infrastructure's sake."""
        return next((group.trajectories[0] for group in reversed(self.groups) if group.trajectories), None)

    @property
    def solved_in(self) -> int | None:
        """The number of the trial that solved it, from 1."""
        for number, group in enumerate(self.groups, 1):
            if any(played.success for played in group.trajectories):
                return number
        return None


def play_trials(
    tasks: Sequence[Task],
    *,
    num_trials: int,
    play: Callable[[Sequence[Task], int], Sequence[Group]],
    reflect: Callable[[Sequence[Attempts], int], Sequence[str]],
) -> list[Attempts]:
    """Play every task until it is solved, at most `num_trials` times.

    A task whose first episode is lost to infrastructure has no result and is not tried again.

    Args:
        play: one group of one episode per task; tasks and the trial's number, from 1, in.
        reflect: a reflection per failed attempt, which the next trial's prompts show; the trial's number is in.
    """
    attempts = [Attempts(task) for task in tasks]
    unsolved = attempts
    for trial in range(1, num_trials + 1):
        for attempt, group in zip(unsolved, play([a.task for a in unsolved], trial), strict=True):
            attempt.groups.append(group)
        unsolved = [a for a in unsolved if a.last is not None and a.solved_in is None]
        if not unsolved or trial == num_trials:
            break
        failed = [a for a in unsolved if a.groups[-1].trajectories]
        for attempt, reflection in zip(failed, reflect(failed, trial), strict=True):
            attempt.reflections.append(reflection)
    return attempts


def reflection_messages(
    task: Task, played: Trajectory, *, ending: str, earlier: Sequence[str], max_chars: int
) -> list[Message]:
    """The request for a reflection about a failed attempt, whose transcript has about `max_chars` characters.

    Args:
        ending: the observation after the last answer.
        earlier: reflections on earlier attempts.
    """
    notes = "".join(f"\n- {note}" for note in earlier)
    parts = [
        task.instructions,
        "You attempted the task below and did not succeed. This is what you saw and answered.",
        transcript(played, max_chars),
        f"After your last answer you saw: {_cut(ending, min(max_chars, _MAX_OBSERVATION))}" if ending else "",
        _ENDS.get(played.stop, _ENDS[Stop.DONE]),
        f"What you noted after earlier attempts:{notes}" if notes else "",
        "You will attempt the same task again from its beginning. In two to four sentences, say what went wrong and "
        "what you will do differently, with concrete steps. Write these sentences only, and no action.",
    ]
    return [{"role": "user", "content": "\n\n".join(filter(None, parts))}]


def transcript(played: Trajectory, max_chars: int) -> str:
    """Observations and answers; turns after the first are left out, the oldest first, until it is short enough."""
    turns = [
        f"Observation: {_cut(turn.observation, _MAX_OBSERVATION)}\nAnswer: {_cut(turn.text, _MAX_ANSWER)}"
        for turn in played.turns
    ]
    start = 1
    while start < len(turns) and sum(map(len, [turns[0], *turns[start:]])) > max_chars:
        start += 1
    left_out = [f"({start - 1} turns are left out)"] if start > 1 else []
    return _cut("\n".join([*turns[:1], *left_out, *turns[start:]]), 2 * max_chars)


def reflection_in(answer: str) -> str:
    """The reflection in the policy's answer: without thoughts, on one line, cut to its limit."""
    said = THINK_TAGS.sub("", without_thoughts(answer))  # a thought that was cut off stays, without its tag
    return _cut(" ".join(said.split()), MAX_REFLECTION)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."
