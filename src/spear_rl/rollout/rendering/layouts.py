"""Layouts with a new prompt per turn: the last turns, the last turns and the names of all before, a transcript.

`LAYOUTS` names them and the growing chat of `renderer`, which is a single conversation.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.renderer import Detail, Renderer, choices_line, first_messages, growing_chat, shown_text
from spear_rl.types import Turn

History = Literal["action", "answer"]
"""What later prompts show of an answer: its action alone, or all of it, thoughts included."""

MAX_ACTION, MAX_NAME = 400, 60
"""Characters of an action: in one of the last pairs, and in the list of earlier ones."""

_TAGS = re.compile(r"</?\w+>")


def independent_turns(
    renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn], *,
    detail: Detail = "full", history: History = "action", num_recent: int = 2, names_earlier: bool = False,
) -> list[int]:  # fmt: skip
    """A new prompt per turn: task, step count, the last (observation, action) pairs and the current observation.

    Only the current observation's images are shown, and no thoughts (`history`). After the first turn the task alone
    is repeated (`Observation.task`); where the environment does not give it, the whole first observation.

    With `names_earlier` the actions before the last pairs are listed too, without their observations, so that a policy
    that searches knows where it has been. A first observation without a task of its own is then cut to its last
    paragraph, where environments state it.

    Example, turn 4 with num_recent = 1 and detail = "short":

        Your task is to: put a mug in shelf.
        Steps taken: 3. The last 1:
        [2] You arrive at desk 1. On the desk 1, you see a mug 1.
        > take mug 1 from desk 1
        Now: You pick up the mug 1 from the desk 1.
    """
    first, now = observations[0], observations[-1]
    lines = [first.text]
    if turns:
        start, limit = max(len(turns) - num_recent, 0), MAX_NAME if names_earlier else MAX_ACTION
        lines = [first.task or (first.text.rpartition("\n\n")[2] if names_earlier else first.text)]
        lines.append(f"Steps taken: {len(turns)}. The last {len(turns) - start}:")
        if names_earlier:
            lines[-1] = "Earlier: " + ("; ".join(_action(turn, limit) for turn in turns[:start]) or "nothing")
        for number in range(start, len(turns)):
            seen = "(shown at the start)" if number == 0 else observations[number].text
            done = turns[number].text if history == "answer" else _action(turns[number], limit)
            lines += [f"[{number}] {seen}", f"> {done}"]
        lines.append(f"Now: {shown_text(now, detail)}")
    elif detail == "full" and first.choices:
        lines.append(choices_line(first))
    return renderer.prompt(first_messages(task, detail, "\n".join(lines), now.images))


def transcript(
    renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn], *,
    detail: Detail = "full", history: History = "action",
) -> list[int]:  # fmt: skip
    """A prompt per turn: the first observation, then all actions and observations so far; its end alone is new.

    Possible actions are listed once, and later as what changed, where that is shorter. So a prompt repeats the last one
    up to its end, which generation and updates compute once.

    Example, turn 2:

        You are in a room with a desk 1 and a shelf 1. Your task is to: put a mug in shelf.
        Possible actions: go to desk 1; go to shelf 1; look
        > go to desk 1
        You arrive at desk 1. On the desk 1, you see a mug 1.
        > take mug 1 from desk 1
        You pick up the mug 1 from the desk 1.
        Possible actions: as at the start, without: go to desk 1. Also: move mug 1 to desk 1
    """
    first, now = observations[0], observations[-1]
    lines = [shown_text(first, detail)]
    for turn, seen in zip(turns, observations[1:], strict=True):
        lines += [f"> {turn.text if history == 'answer' else _action(turn, MAX_ACTION)}", seen.text]
    if turns and detail == "full" and now.choices:
        lines.append(_changed_choices(first, now))
    return renderer.prompt(first_messages(task, detail, "\n".join(lines), now.images))


def present_only(
    renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn], *,
    detail: Detail = "full",
) -> list[int]:  # fmt: skip
    """A new prompt per turn with the current observation alone: for environments that show their whole state."""
    now = observations[-1]
    return renderer.prompt(first_messages(task, detail, shown_text(now, detail), now.images))


LAYOUTS: dict[str, Callable[..., list[int]]] = {
    "chat": growing_chat,
    "turns": independent_turns,
    "log": partial(independent_turns, names_earlier=True),
    "transcript": transcript,
    "now": present_only,
}


def _action(turn: Turn, limit: int) -> str:
    """What the policy did, up to `limit` characters: as the environment says, or else its answer without thoughts,
    also one that was cut off, and without tags."""
    text = turn.text if turn.action is None else turn.action
    done = without_thoughts(text, any_case=True).partition("<think>")[0]
    return (_TAGS.sub("", done) if turn.action is None else done).strip()[:limit] or "(nothing)"


def _changed_choices(first: Observation, now: Observation) -> str:
    """The possible actions as what is gone and new since the first observation, or all of them if that is shorter."""
    before, after = set(first.choices), set(now.choices)
    gone = [choice for choice in first.choices if choice not in after]
    new = [choice for choice in now.choices if choice not in before]
    changes = "Possible actions: as at the start"
    changes += f", without: {'; '.join(gone)}" if gone else ""
    changes += f". Also: {'; '.join(new)}" if new else ""
    return min(choices_line(now), changes, key=len)
