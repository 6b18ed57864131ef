"""What the policy sees at each turn: one growing conversation, or an independent prompt per turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.renderer import Message, Renderer
from spear_rl.types import ImagePrompt, Turn

Layout = Callable[[Renderer, Task, Sequence[Observation], Sequence[Turn]], list[int]]
"""Task, all observations so far (one more than turns) and all turns so far in; the next prompt's token ids out."""

Detail = Literal["full", "short"]
"""full: instructions and the list of possible actions are in the prompt; short: observations only, for tiny models."""

_TAGS = re.compile(r"</?\w+>")


def growing_chat(
    renderer: Renderer,
    task: Task,
    observations: Sequence[Observation],
    turns: Sequence[Turn],
    *,
    detail: Detail = "full",
) -> list[int]:
    """The whole conversation so far, in the tokens that were sampled. Its turns train as one row."""
    text, images = _text(observations[-1], detail), observations[-1].images
    if not turns:
        return renderer.prompt(_first_messages(task, detail, text, images))
    last = turns[-1]
    before = ImagePrompt(last.prompt_ids, last.images) if last.images else last.prompt_ids
    return renderer.extended(before, last.completion.token_ids, text, images)


def independent_turns(
    renderer: Renderer,
    task: Task,
    observations: Sequence[Observation],
    turns: Sequence[Turn],
    *,
    detail: Detail = "full",
    num_recent: int = 2,
    names_earlier: bool = False,
) -> list[int]:
    """A new prompt per turn: task, step count, the last (observation, action) pairs and the current observation.

    Only the current observation's images are shown. With `names_earlier` the actions before the last pairs are listed
    too, without their observations, so that a policy that searches knows where it has been. To make room, the first
    observation is then cut to its last paragraph after the first turn: environments state the task there.

    Example, turn 4 with num_recent = 1 and detail = "short":

        You are in ... Your task is to: put a mug in shelf.
        Steps taken: 3. The last 1:
        [2] You arrive at desk 1. On the desk 1, you see a mug 1.
        > take mug 1 from desk 1
        Now: You pick up the mug 1 from the desk 1.
    """
    first, now = observations[0], observations[-1]
    lines = [first.text.rpartition("\n\n")[2] if names_earlier and turns else first.text]
    if turns:
        start = max(len(turns) - num_recent, 0)
        lines.append(f"Steps taken: {len(turns)}. The last {len(turns) - start}:")
        if names_earlier:
            lines[-1] = "Earlier: " + ("; ".join(_action(turn) for turn in turns[:start]) or "nothing")
        for number in range(start, len(turns)):
            seen = "(shown above)" if number == 0 else observations[number].text
            lines += [f"[{number}] {seen}", f"> {_action(turns[number]) if names_earlier else turns[number].text}"]
        lines.append(f"Now: {_text(now, detail)}")
    elif detail == "full" and first.choices:
        lines.append(_choices(first))
    return renderer.prompt(_first_messages(task, detail, "\n".join(lines), now.images))


def present_only(
    renderer: Renderer,
    task: Task,
    observations: Sequence[Observation],
    turns: Sequence[Turn],
    *,
    detail: Detail = "full",
) -> list[int]:
    """A new prompt per turn with the current observation alone: for environments that show their whole state."""
    now = observations[-1]
    return renderer.prompt(_first_messages(task, detail, _text(now, detail), now.images))


LAYOUTS: dict[str, Callable[..., list[int]]] = {
    "chat": growing_chat,
    "turns": independent_turns,
    "log": partial(independent_turns, names_earlier=True),
    "now": present_only,
}


def without_thoughts(text: str) -> str:
    """The text without its closed <think> blocks, and without what a closing tag alone ends: the prompt opened it."""
    *closed, rest = text.split("</think>")
    said = [part.partition("<think>")[0] if "<think>" in part else "" for part in closed]
    return "".join([*said, rest])


def _first_messages(task: Task, detail: Detail, content: str, images: tuple[bytes, ...]) -> list[Message]:
    """The task's instructions, in their role, and `content`."""
    message: Message = {"role": "user", "content": content}
    if images:
        message["images"] = images
    if detail == "short" or not task.instructions:
        return [message]
    if task.instructions_role == "system":
        return [{"role": "system", "content": task.instructions}, message]
    return [message | {"content": f"{task.instructions}\n\n{content}"}]


def _action(turn: Turn) -> str:
    """What the policy did, without thoughts and tags, up to 60 characters."""
    return _TAGS.sub("", without_thoughts(turn.text)).strip()[:60] or "(nothing)"


def _text(observation: Observation, detail: Detail) -> str:
    if detail == "full" and observation.choices:
        return f"{observation.text}\n{_choices(observation)}"
    return observation.text


def _choices(observation: Observation) -> str:
    return "Possible actions: " + "; ".join(observation.choices)
