"""Messages and tool calls of the OpenAI chat format: read, checked, and told apart. Knows no tokens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spear_rl.rollout.rendering.renderer import Message
from spear_rl.rollout.rendering.tool_calls import instructions, written

ROLES = ("system", "user", "assistant", "tool")


class MalformedError(ValueError):
    """A conversation is not in the OpenAI chat format; its text says why in one sentence."""


def checked_messages(value: object) -> list[Message]:
    """The messages of a request as chat templates read them: `role`, `content`, and `tool_calls` of an assistant."""
    if not isinstance(value, list) or not value:
        raise MalformedError("messages must be a list with at least one message")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise MalformedError(f"{where} is no object with role and content")
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        raise MalformedError(f"{where}.role must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _text(value.get("content"), f"{where}.content")}
    if role == "assistant" and value.get("tool_calls"):
        message["tool_calls"] = _calls(value["tool_calls"], f"{where}.tool_calls")
    if role == "tool":
        message |= {name: str(value[name]) for name in ("tool_call_id", "name") if value.get(name)}
    return message


def _text(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise MalformedError(f"{where} has a part that is no text: this endpoint takes text only")
        value = "\n".join(str(part) for part in parts)
    if not isinstance(value, str):
        raise MalformedError(f"{where} must be a text or a list of text parts")
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    calls = []
    for call in value if isinstance(value, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedError(f"{where} must be a list of calls, each with a function and its name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = {"arguments": arguments}
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        if isinstance(call, Mapping) and call.get("id"):
            calls[-1]["id"] = str(call["id"])
    return calls


def checked_tools(value: object) -> list[dict[str, Any]]:
    """The tools of a request; empty if it has none."""
    if value is None:
        return []
    tools: list[Any] = value if isinstance(value, list) else [None]
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedError("tools must be a list of objects, each with a function and its name")
    return [dict(tool) for tool in tools]


def digests(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """One per message: equal if the tools and all messages up to this one are.

    Ids of tool calls, how their arguments are written as JSON, and white space around a text make no difference:
    frameworks change them.
    """
    out, last = [], json.dumps(list(tools), sort_keys=True)
    for message in messages:
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
        own = json.dumps([last, message["role"], message["content"].strip(), calls], sort_keys=True)
        last = hashlib.blake2b(own.encode(), digest_size=16).hexdigest()
        out.append(last)
    return out


def said(message: Message) -> str:
    """All that a policy writes for a message: its text and its tool calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [written(function["name"], function["arguments"], "hermes") for function in functions]
    return "\n".join(filter(None, [message["content"], *calls]))


def transcript(messages: Sequence[Message]) -> str:
    """A line per message: its role and what it says."""
    return "\n".join(f"{message['role']}: {said(message)}" for message in messages)


def without_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation in plain messages, for a chat template that knows neither tools nor their results."""
    out: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"})
        else:
            out.append({"role": message["role"], "content": said(message)})
    if tools:
        header = instructions(tools, "hermes")
        if out[0]["role"] == "system":
            out[0] = {"role": "system", "content": f"{out[0]['content']}\n\n{header}"}
        else:
            out.insert(0, {"role": "system", "content": header})
    return out
