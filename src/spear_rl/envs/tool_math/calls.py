"""Tool calls in a policy's text, in Hermes form. Knows which tool there is, not what it does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spear_rl.rollout.env import INADMISSIBLE
from spear_rl.rollout.layouts import without_thoughts as without_thoughts

TOOL = "code_interpreter"
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Runs Python code and returns what it prints. Variables stay for later calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
        },
    },
}

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_json = json.JSONDecoder(strict=False)  # policies break lines inside of strings
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the code to run, or why there is none."""

    code: str = ""
    invalid: str = ""
    """In one word; `inadmissible` where the call itself was well-formed."""
    complaint: str = ""
    """The same for the policy, in one sentence."""


def tool_calls(text: str, *, at_most: int = 64) -> list[Call]:
    """The first `at_most` calls of a turn, in order; a broken one is a call with a complaint.

    '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(2)"}}</tool_call>' -> [Call("print(2)")]
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>'                             -> inadmissible
    '<tool_call>print(2)</tool_call>'                                                        -> bad_json
    '<tool_call>{"name": "code_interpreter"'                                                 -> unclosed_tag
    """
    calls: list[Call] = []
    position = text.find(_OPEN)
    while position >= 0 and len(calls) < at_most:
        call, end = _call_at(text, position + len(_OPEN))
        calls.append(call)
        position = text.find(_OPEN, end)
    return calls


def call_text(code: str) -> str:
    """How a policy calls the tool."""
    return f"{_OPEN}{json.dumps({'name': TOOL, 'arguments': {'code': code}}, separators=(',', ':'))}{_CLOSE}"


def _call_at(text: str, start: int) -> tuple[Call, int]:
    """The call whose opening tag ends at `start`, and where to go on."""
    begin = _space_end(text, start)
    try:
        # From the start and not up to the closing tag: code may well contain one.
        value, end = _json.raw_decode(text, begin)
        close = _space_end(text, end)
        if text.startswith(_CLOSE, close):
            return _call_of(value), close + len(_CLOSE)
        problem = "something follows the JSON object"
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close < 0 or 0 <= following < close:
        complaint = f"Error: the tool call has no closing {_CLOSE}."
        return Call(invalid="unclosed_tag", complaint=complaint), max(following, start)
    complaint = f"Error: the tool call is not valid JSON ({problem}). {_expected()}"
    return Call(invalid="bad_json", complaint=complaint), close + len(_CLOSE)


def _call_of(value: object) -> Call:
    if not isinstance(value, Mapping):
        return Call(invalid="bad_call", complaint=f"Error: a tool call is a JSON object. {_expected()}")
    name = value.get("name")
    if name != TOOL:
        shown = f"is no tool {str(name)[:60]!r}" if isinstance(name, str) else 'is no "name" in the call'
        return Call(invalid=INADMISSIBLE, complaint=f"Error: there {shown}; the only tool is {TOOL}.")
    code = _code_in(value.get("arguments"))
    if code is None:
        complaint = f'Error: "arguments" must hold "code", the Python code as a string. {_expected()}'
        return Call(invalid=INADMISSIBLE, complaint=complaint)
    if not _is_text(code):
        return Call(invalid=INADMISSIBLE, complaint='Error: "code" is not valid Unicode text.')
    return Call(code)


def _code_in(arguments: object) -> str | None:
    """The code, also where the arguments are themselves written as a string: of JSON, or plainly the code."""
    if isinstance(arguments, str):
        try:
            inner = _json.decode(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(inner, Mapping):
            return arguments
        arguments = inner
    code = arguments.get("code") if isinstance(arguments, Mapping) else None
    return code if isinstance(code, str) else None


def _is_text(code: str) -> bool:
    """JSON can spell half a character, which no file or pipe takes."""
    try:
        code.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _expected() -> str:
    return f'Write {_OPEN}{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}{_CLOSE}.'


def _space_end(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start
