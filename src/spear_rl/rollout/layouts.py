"""What the policy is shown at each turn: one growing conversation, or an independent prompt a turn."""

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

_TAGS = re.compile(r"</?\w+>")

Detail = Literal["full", "short"]
"""full: instructions and the list of possible actions are in the prompt; short: observations only, for tiny models."""


def growing_chat(
    renderer: Renderer,
    task: Task,
    observations: Sequence[Observation],
    turns: Sequence[Turn],
    *,
    detail: Detail = "full",
) -> list[int]:
    """Everything said so far, in the very tokens it was said in. Its turns train as one row."""
    shown, images = _shown(observations[-1], detail), observations[-1].images
    if turns and (images or turns[-1].images):
        before = ImagePrompt(turns[-1].prompt_ids, turns[-1].images)
        return renderer.extended(before, turns[-1].completion.token_ids, shown, images)
    if turns:
        return renderer.extended(turns[-1].prompt_ids, turns[-1].completion.token_ids, shown)
    return renderer.prompt(_opened(task, detail, shown, images))


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
    """A fresh prompt a turn: task, step count, the last (observation, action) pairs, and what is seen now.

    Of pictures, only the current ones are shown.

    With `names_earlier` the actions before those are listed too, without what they led to: a policy that searches
    should know where it has been. To make room, the opening is cut to its last paragraph after the first turn: that is
    where an environment says what is asked for.

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
            lines[-1] = "Earlier: " + ("; ".join(_named(turn) for turn in turns[:start]) or "nothing")
        for number in range(start, len(turns)):
            said = "(shown above)" if number == 0 else observations[number].text
            lines += [f"[{number}] {said}", f"> {_named(turns[number]) if names_earlier else turns[number].text}"]
        lines.append(f"Now: {_shown(now, detail)}")
    elif detail == "full" and first.choices:
        lines.append(_choices(first))
    return renderer.prompt(_opened(task, detail, "\n".join(lines), now.images))


def present_only(
    renderer: Renderer,
    task: Task,
    observations: Sequence[Observation],
    turns: Sequence[Turn],
    *,
    detail: Detail = "full",
) -> list[int]:
    """A fresh prompt a turn with what is seen now and nothing else: for games that show their whole state."""
    now = observations[-1]
    return renderer.prompt(_opened(task, detail, _shown(now, detail), now.images))


LAYOUTS: dict[str, Callable[..., list[int]]] = {
    "chat": growing_chat,
    "turns": independent_turns,
    "log": partial(independent_turns, names_earlier=True),
    "now": present_only,
}


def _opened(task: Task, detail: Detail, content: str, images: tuple[bytes, ...] = ()) -> list[Message]:
    """A conversation that begins with the task's instructions, in their role, and `content`."""
    if images:
        *before, last = _opened(task, detail, content)
        return [*before, last | {"images": images}]
    if detail == "short" or not task.instructions:
        return [{"role": "user", "content": content}]
    if task.instructions_role == "system":
        return [{"role": "system", "content": task.instructions}, {"role": "user", "content": content}]
    return [{"role": "user", "content": f"{task.instructions}\n\n{content}"}]


def without_thoughts(text: str) -> str:
    """The text without its closed <think> blocks: what is thought is not said."""
    kept, position = [], 0
    while (start := text.find("<think>", position)) >= 0:
        end = text.find("</think>", start)
        if end < 0:
            break
        kept.append(text[position:start])
        position = end + len("</think>")
    return "".join([*kept, text[position:]])


def _named(turn: Turn) -> str:
    """What the policy did, in its own words without the tags; a long answer is cut."""
    return _TAGS.sub("", without_thoughts(turn.text)).strip()[:60] or "(nothing)"


def _shown(observation: Observation, detail: Detail) -> str:
    if detail == "full" and observation.choices:
        return f"{observation.text}\n{_choices(observation)}"
    return observation.text


def _choices(observation: Observation) -> str:
    return "Possible actions: " + "; ".join(observation.choices)
