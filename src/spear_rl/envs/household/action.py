"""What command a policy's free text means."""

from __future__ import annotations

from typing import NamedTuple

from spear_rl.rollout.layouts import without_thoughts

MAX_BARE_LENGTH = 100
"""A text without tags is taken for a command only if it is one line of at most so many characters."""


class Said(NamedTuple):
    """A command, or in one word why there is none."""

    command: str
    invalid: str = ""


def said_command(text: str) -> Said:
    """The command in a policy's answer.

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
        return Said("", "unclosed_tag")
    else:
        command = text.strip()
        if len(command) > MAX_BARE_LENGTH or len(command.splitlines()) > 1:
            return Said("", "no_action")
    command = " ".join(command.split())
    return Said(command) if command else Said("", "no_action")
