"""Conversations as a chat template can show them: roles that it knows, tools, and results of tools."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from spear_rl.rollout.rendering.tool_calls import instructions, until_last

THINK_TAGS = re.compile("</?think>", re.IGNORECASE)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "A text."}},
    "required": ["text"],
}
_PROBE = {"type": "function", "function": {"name": "probe_tool", "description": "Probes.", "parameters": _PARAMETERS}}
"""A tool that shows whether a template describes tools."""


class ToolSupport(NamedTuple):
    """What a chat template does with tools."""

    shows_tools: bool
    has_role: bool
    """Results have a role of their own, also after an answer in plain text."""


def tool_support(rendered: Callable[..., str]) -> ToolSupport:
    """What the template behind `rendered(messages, **options)` does with tools; templates raise what they like."""
    shows_tools = has_role = False
    said = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant", "tool")]
    with suppress(Exception):
        shows_tools = "probe_tool" in rendered(said[:1], tools=[_PROBE])
        has_role = shows_tools and "the tool" in rendered(said)
    return ToolSupport(shows_tools, has_role)


def merged(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without a system role, and in turns: a system message goes into the user's, equal roles into one."""
    out: list[dict[str, Any]] = []
    for message in messages:
        message = message | {"role": "user"} if message["role"] == "system" else message
        if out and out[-1]["role"] == message["role"]:
            images = (*out[-1].get("images", ()), *message.get("images", ()))
            out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n\n{message['content']}"}
            out[-1] |= {"images": images} if images else {}
        else:
            out.append(message)
    return out


def system_message(told: str, tools: Sequence[str]) -> dict[str, Any]:
    """The instructions, with the tools in our words; `told` and `schemas` are for a template that describes tools."""
    schemas = [json.loads(tool) for tool in tools]
    words = f"{told}\n\n{instructions(schemas, 'hermes')}".strip()
    return {"role": "system", "content": words, "told": told, "schemas": schemas}


def tool_results(reply: str) -> list[dict[str, Any]]:
    """One message of role `tool` per result in a reply; empty where the reply is not results alone."""
    closed = until_last("\n</tool_response>", reply)
    if reply[len(closed) :].strip() or _RESULT.sub("", closed).strip():
        return []
    return [{"role": "tool", "content": found[1]} for found in _RESULT.finditer(closed)]


def without_thoughts(text: str, *, any_case: bool = False) -> str:
    """The text without its closed <think> blocks, and without what a closing tag alone ends: the prompt opened it.

    With `any_case`, tags in capitals count too and come out in lower case.
    """
    text = THINK_TAGS.sub(lambda tag: tag[0].lower(), text) if any_case else text
    *closed, rest = text.split("</think>")
    said = [part.partition("<think>")[0] if "<think>" in part else "" for part in closed]
    return "".join([*said, rest])
