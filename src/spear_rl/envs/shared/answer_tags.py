"""Parses the command out of a policy's answer: `<action>...</action>`, or one short line without tags."""

from typing import NamedTuple

from spear_rl.rollout.rendering.renderer import without_thoughts

MAX_BARE_LENGTH = 100
"""The longest answer without tags that is taken for a command."""


class ParsedAnswer(NamedTuple):
    """A command, or in one word why there is none."""

    command: str
    invalid: str = ""


def parsed_answer(text: str) -> ParsedAnswer:
    """The command in a policy's answer, in lower case with single spaces.

    "<think>the desk first</think><action>Go to  desk 1</action>" -> "go to desk 1"
    "go to desk 1"                                                -> "go to desk 1"
    "<think>hm</think><action>go to desk 1"                       -> unclosed_tag
    "I would rather not say.\\nSorry."                             -> no_action
    """
    text = without_thoughts(text.lower())
    end = text.rfind("</action>")
    start = text.rfind("<action>", 0, end) if end >= 0 else -1
    if start >= 0:
        command = text[start + len("<action>") : end]
    elif "<action>" in text:
        return ParsedAnswer("", "unclosed_tag")
    else:
        command = text.strip()
        if len(command) > MAX_BARE_LENGTH or len(command.splitlines()) > 1:
            return ParsedAnswer("", "no_action")
    command = " ".join(command.split())
    return ParsedAnswer(command) if command else ParsedAnswer("", "no_action")
