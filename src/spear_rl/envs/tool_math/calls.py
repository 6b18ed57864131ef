"""The tool in Hermes form: its schema and instructions, the calls in a policy's text, and the responses."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spear_rl.rollout.env import INADMISSIBLE

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

_FORMAT = f"""# Tools

These functions can be called. Their signatures, in JSON, stand within <tools></tools>:
<tools>
{json.dumps(SCHEMA)}
</tools>

To call one, write its name and its arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}
</tool_call>
What it gives back follows within <tool_response></tool_response>."""

PROMPTS = {
    "paper": (
        "You solve mathematical problems. Reason step by step, and run Python code whenever it helps: to compute, to "
        "check a guess, to search. You see what your code prints and may call the tool again. When you are sure, stop "
        f"calling it and put your final answer within \\boxed{{}}.\n\n{_FORMAT}"
    ),
    "short": (
        f'Solve the problem. To run Python, write <tool_call>{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}'
        "</tool_call>. Then give the answer as \\boxed{...}."
    ),
}
"""Instructions with the tool's schema, as large models know it, or in two sentences, for a small one."""

FORMATS = {
    "hermes": "JSON in <tool_call></tool_call>",
    "code": "Python in <code></code> as well",
    "fenced": "```python blocks as well",
    "json": "the JSON without tags as well",
    "all": "all four",
}
"""Which texts are calls of the tool."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL = f'{_OPEN}{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}{_CLOSE}'
_EXPECTED = f"Write {_CALL}."
_MARKS = {
    "hermes": _OPEN,
    "code": "<code>",
    "fenced": r"(?<!`)```(?i:python|py)\d?[ \t]*\r?\n",
    "json": rf'\{{\s*"name"\s*:\s*"{TOOL}"',
}
_OPENING = {
    name: re.compile("|".join(_MARKS.values() if name == "all" else {_MARKS["hermes"], _MARKS[name]}))
    for name in FORMATS
}
_FENCE = re.compile(r"```[ \t]*(\w*)[ \t]*\r?\n")
_ALSO = {"hermes": "", "code": "Python in <code></code>", "fenced": "a ```python block", "json": "the JSON alone"}
_ALSO["all"] = f"{_ALSO['code']}, or {_ALSO['fenced']}"
_json = json.JSONDecoder(strict=False)  # policies break lines inside strings
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the code to run, or what is wrong with it."""

    code: str = ""
    invalid: str = ""
    """The kind of mistake; `inadmissible` if the call is well-formed."""
    complaint: str = ""
    """The mistake in one sentence, for the policy."""


def instructions(prompt: str, formats: str) -> str:
    return PROMPTS[prompt] + (f"\nA call may also be {_ALSO[formats]}." if _ALSO[formats] else "")


def reminder(formats: str) -> str:
    """The reply to a turn with neither a call nor an answer."""
    also = f" or {_ALSO[formats]}" if _ALSO[formats] else ""
    return (
        "There is neither a tool call nor a \\boxed{} answer in this turn. "
        f"To call the tool, write {_CALL}{also}. To give your final answer, write \\boxed{{...}}."
    )


def tool_calls(text: str, *, at_most: int = 64, formats: str = "hermes") -> list[Call]:
    """The first `at_most` calls of a turn, in order; a broken one has a complaint.

    '<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(2)"}}</tool_call>' -> [Call("print(2)")]
    '<tool_call>{"name": "search", "arguments": {}}</tool_call>'                             -> inadmissible
    '<tool_call>print(2)</tool_call>'                                                        -> bad_json
    '<tool_call>{"name": "code_interpreter"'                                                 -> unclosed_tag
    '<code>print(2)</code>', with the format `code`                                          -> [Call("print(2)")]
    '{"name": "code_interpreter", "arguments": {"code": "print(2)"}}', with the format `json` -> [Call("print(2)")]
    """
    calls: list[Call] = []
    found = _OPENING[formats].search(text)
    while found and len(calls) < at_most:
        if found.group() == _OPEN:
            call, end = _call_at(text, found.end())
        elif found.group().startswith("{"):
            if text[: found.start()].rstrip().endswith(_OPEN):  # of a call that was found broken
                found = _OPENING[formats].search(text, found.end())
                continue
            call, end = _json_at(text, found.start())
        else:
            call, end = _code_at(text, found.end(), "```" if found.group().startswith("`") else "</code>")
        calls.append(call)
        found = _OPENING[formats].search(text, end)
    return calls


def call_text(code: str) -> str:
    return f"{_OPEN}{json.dumps({'name': TOOL, 'arguments': {'code': code}}, separators=(',', ':'))}{_CLOSE}"


def tool_response(*replies: str) -> str:
    return "\n".join(f"<tool_response>\n{reply}\n</tool_response>" for reply in replies)


def _code_at(text: str, start: int, closing: str) -> tuple[Call, int]:
    close = text.find(closing, start)
    if close < 0:
        return Call("", "unclosed_tag", f"Error: the code has no closing {closing}."), len(text)
    return _checked_code(text[start:close]), close + len(closing)


def _json_at(text: str, start: int) -> tuple[Call, int]:
    """(the call whose JSON begins at `start`, without tags, where to continue)."""
    try:
        value, end = _json.raw_decode(text, start)
        return _checked_call(value), end
    except (ValueError, RecursionError):
        return Call("", "bad_json", f"Error: the tool call is not valid JSON. {_EXPECTED}"), start + 1


def _call_at(text: str, start: int) -> tuple[Call, int]:
    """(the call whose opening tag ends at `start`, where to continue)."""
    fence = _FENCE.match(text, _skip_space(text, start))
    if fence and (end := text.find("```", fence.end())) >= 0:
        close = _skip_space(text, end + 3)
        if text.startswith(_CLOSE, close):
            return _fenced_call(fence[1], text[fence.end() : end]), close + len(_CLOSE)
    try:
        # From the start, not up to the closing tag: code may contain one.
        value, end = _json.raw_decode(text, _skip_space(text, start))
        close = _skip_space(text, end)
        if text.startswith(_CLOSE, close):
            return _checked_call(value), close + len(_CLOSE)
        problem = "something follows the JSON object"
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be read"
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close < 0 or 0 <= following < close:
        return Call("", "unclosed_tag", f"Error: the tool call has no closing {_CLOSE}. {_EXPECTED}"), max(
            following, start
        )
    complaint = f"Error: the tool call is not valid JSON ({problem}). {_EXPECTED}"
    return Call("", "bad_json", complaint), close + len(_CLOSE)


def _checked_call(value: object) -> Call:
    if not isinstance(value, Mapping):
        return Call("", "bad_call", f"Error: a tool call is a JSON object. {_EXPECTED}")
    name = value.get("name")
    if name != TOOL:
        shown = f"is no tool {str(name)[:60]!r}" if isinstance(name, str) else 'is no "name" in the call'
        return Call("", INADMISSIBLE, f"Error: there {shown}; the only tool is {TOOL}. {_EXPECTED}")
    code = _code_in(value.get("arguments"))
    if code is None:
        return Call("", INADMISSIBLE, f'Error: "arguments" must hold "code", the Python code as a string. {_EXPECTED}')
    return _checked_code(code)


def _fenced_call(language: str, content: str) -> Call:
    """A call that is written as a block in fences: JSON or the code itself."""
    if language.lower() != "json" and not content.lstrip().startswith("{"):
        return _checked_code(content)
    try:
        return _checked_call(_json.decode(content))
    except (ValueError, RecursionError):
        return Call("", "bad_json", f"Error: the tool call is not valid JSON. {_EXPECTED}")


def _checked_code(code: str) -> Call:
    code = _unfenced(code)
    if all(not line.strip() or line.lstrip().startswith("#") for line in code.splitlines()):
        return Call("", INADMISSIBLE, f"Error: there is no code to run. {_EXPECTED}")
    try:
        code.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a character, which no file or pipe takes
        return Call("", INADMISSIBLE, 'Error: "code" is not valid Unicode text.')
    return Call(code)


def _unfenced(code: str) -> str:
    """The code without a Markdown fence around it."""
    fence = _FENCE.match(text := code.strip())
    return text[fence.end() :].removesuffix("```") if fence else code


def _code_in(arguments: object) -> str | None:
    """The code; `arguments` may also be a string, of JSON or of the code itself."""
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


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start
