"""An episode as the code it ran and what that printed."""

import re
from collections.abc import Sequence
from itertools import zip_longest

from spear_rl.envs.shared.scenes import MAX_TEXT, Scene, Script, Seen
from spear_rl.envs.tool_math.calls import tool_calls
from spear_rl.rollout.rendering.conversation import without_thoughts

_REPLY = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def scripts(turns: Sequence[Seen]) -> list[Scene | None]:
    """Of every turn with a call: each call's code with the reply that the next observation has."""
    found = list[Scene | None]()
    for turn, following in zip_longest(turns, turns[1:], fillvalue=Seen()):
        said = without_thoughts(turn.text[:MAX_TEXT])
        codes = [call.code for call in tool_calls(said, formats="all")]
        replies = _REPLY.findall(following.observation[:MAX_TEXT])
        cells = tuple((code, reply) for code, reply in zip_longest(codes, replies, fillvalue="") if code)
        found.append(Script(cells) if cells else None)
    return found
