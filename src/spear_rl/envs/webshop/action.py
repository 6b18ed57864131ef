"""What a policy's free text asks the shop to do: search[...] or click[...]."""

from __future__ import annotations

import re
from typing import NamedTuple

from spear_rl.envs.shared.answer_tags import parsed_answer

_ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL)

NOT_AN_ACTION = "not_an_action"
"""The reason for a turn with a readable command that is neither a search nor a click."""


class Said(NamedTuple):
    """An action with what is in its brackets, or in one word why there is none."""

    verb: str
    words: str
    invalid: str = ""


def said_action(text: str) -> Said:
    """The action in a policy's answer, in lower case and with single spaces.

    "<think>hm</think><action>Search[Red  Shoes]</action>" -> search, "red shoes"
    "click[buy now]"                                       -> click, "buy now"
    "<action>buy it</action>"                              -> not_an_action
    "<action>click[a"                                      -> unclosed_tag
    """
    bare = _ACTION.fullmatch(" ".join(text.lower().split()))
    if bare is None:
        said = parsed_answer(text)
        if said.invalid:
            return Said("", "", said.invalid)
        bare = _ACTION.fullmatch(said.command)
    if bare is None:
        return Said("", "", NOT_AN_ACTION)
    return Said(bare[1], bare[2].strip())
