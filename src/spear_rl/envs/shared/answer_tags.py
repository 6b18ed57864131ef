"""Parses the command out of a policy's answer: `<action>...</action>`, or one short line without tags."""

import re
from collections.abc import Collection
from typing import NamedTuple

from spear_rl.rollout.env import NO_THOUGHT
from spear_rl.rollout.rendering.conversation import without_thoughts

MAX_BARE_LENGTH = 100
"""The longest answer without tags that is taken for a command."""


RULES = {"strict": "<action>{action}</action>", "published": "<think></think><action>{action}</action>"}
"""Which answers of a text game are invalid -> the shortest valid one.

strict     by `parsed_answer`, and what the game refuses
published  by `published_answer`
"""

_TAGS = re.compile("</?(?:think|action)>")


class ParsedAnswer(NamedTuple):
    """A command, or in one word why there is none or why the answer is charged."""

    command: str
    invalid: str = ""


def parsed_answer(text: str) -> ParsedAnswer:
    """The command in a policy's answer, in lower case with single spaces.

    "<think>the desk first</think><action>Go to  desk 1</action>" -> "go to desk 1"
    "go to desk 1"                                                -> "go to desk 1"
    "<think>hm</think><action>go to desk 1"                       -> unclosed_tag
    "<action>look</action></action>"                              -> "look"
    "I would rather not say.\\nSorry."                             -> no_action
    """
    text = without_thoughts(text.lower())
    command = _tagged(text)
    if command is None:
        if "<action>" in text:
            return ParsedAnswer("", "unclosed_tag")
        command = text.strip()
        if len(command) > MAX_BARE_LENGTH or len(command.splitlines()) > 1:
            return ParsedAnswer("", "no_action")
        command = " ".join(command.split())
    return ParsedAnswer(command) if command else ParsedAnswer("", "no_action")


def published_answer(text: str, commands: Collection[str]) -> ParsedAnswer:
    """The command as the published ALFWorld runs read it, and which of the two tags is missing, which they charge.

    Without an action tag it is the one of `commands` that the last line ends with; that line may be a thought, so
    nothing else of it counts.

    "<think>hm</think><action>Look</action>"  -> "look"
    "<action>look</action>"                   -> "look", no_thought
    "<think>hm</think>\\nI will look."         -> "look", no_action
    "<think>hm"                               -> "", no_action
    """
    text = text.lower()
    said = without_thoughts(text)
    tagged = _tagged(said)
    if tagged is not None:
        has_thought = "<think>" in text and "</think>" in text
        return ParsedAnswer(tagged, "" if has_thought else NO_THOUGHT)
    lines = _TAGS.sub("\n", said).strip(" \n.!\"'`*").splitlines()
    last = " ".join(lines[-1].split()) if lines else ""
    ending = [command for command in commands if f" {last}".endswith(f" {command}")]
    return ParsedAnswer(max(ending, key=len, default=""), "no_action")


def _tagged(text: str) -> str | None:
    """What the last closed action tag holds, with single spaces; a second closing tag after it is not part of it."""
    end = text.rfind("</action>")
    start = text.rfind("<action>", 0, end) if end >= 0 else -1
    if start < 0:
        return None
    return " ".join(text[start + len("<action>") : text.find("</action>", start)].split())
