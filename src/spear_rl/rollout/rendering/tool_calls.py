"""How model families write tool calls: the instructions that ask for a format, and the calls in an answer.

hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>       Qwen, Hermes, SmolLM3
xml       <tool_call><function=add><parameter=a>1</parameter></function></tool_call>     Qwen3-Coder
llama     {"name": "add", "parameters": {"a": 1}}                             Llama 3
mistral   [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]                Mistral
pythonic  add(a=1)                                                            Llama 4, LFM2; short, for tiny models
"""

import ast
import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMATS = {
    "hermes": "JSON in <tool_call></tool_call>, as Qwen",
    "xml": "<function=NAME><parameter=NAME>, as Qwen3-Coder",
    "llama": "a JSON object with name and parameters, as Llama 3",
    "mistral": "a JSON list after [TOOL_CALLS], as Mistral",
    "pythonic": "name(argument=value), as Llama 4",
}

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]{1,256})>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>(.*?)</parameter>", re.DOTALL)
_NAMED = re.compile(r"(\w++)(?:\s*+\[ARGS\])?\s*+(?=\{)")
_MARKS = re.compile(r"<\|python_tag\|>|<\|tool_call_(?:start|end)\|>|<\|python_(?:start|end)\|>|\[TOOL_CALLS\]")
_json = json.JSONDecoder(strict=False)  # policies break lines inside strings


@dataclass(frozen=True, slots=True)
class Call:
    """One call, or what is wrong with it."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    invalid: str = ""
    """The kind of mistake in one word; empty if there is none."""


def written(name: str, arguments: Mapping[str, Any], style: str) -> str:
    """A call in a format."""
    if style == "xml":
        inner = "".join(f"<parameter={key}>{_word(value)}</parameter>" for key, value in arguments.items())
        return f"<tool_call><function={name}>{inner}</function></tool_call>"
    if style == "llama":
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    if style == "mistral":
        return f"[TOOL_CALLS][{call}]"
    if style == "pythonic":
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    return f"<tool_call>\n{call}\n</tool_call>"


def instructions(schemas: Sequence[Mapping[str, Any]], style: str) -> str:
    """The tools, by their schemas in OpenAI's format, and how to call them."""
    described = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    example = written("NAME", {"ARGUMENT": "VALUE"}, style)
    return (
        f"# Tools\n\nThese functions can be called. Their signatures, in JSON, stand within <tools></tools>:\n"
        f"<tools>\n{described}\n</tools>\n\nTo call one, write: {example}\n"
        "What it gives back follows."
    )


Parameters = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> JSON schema of its arguments."""


def calls_in(text: str, tools: Parameters) -> list[Call]:
    """The calls of an answer, in whichever format they are written; empty if it calls nothing.

    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' -> [Call("add", {"a": 1})]
    'add(a=1)'                                                      -> [Call("add", {"a": 1})]
    '<tool_call>add</tool_call>'                                    -> bad_json
    'the sum add(a=1) is 2'                                         -> []
    """
    if "<tool_call>" in text:
        return [call for block in _BLOCK.finditer(text) for call in _block(block[1], block[2], tools)]
    if found := [
        call for function in _FUNCTION.finditer(until_last("</function>", text)) for call in _xml(function, tools)
    ]:
        return found
    is_marked, bare = bool(_MARKS.search(text)), _MARKS.sub(" ", text).strip()
    found = list(_objects(bare)) or list(_python(bare, tools))
    if not found and is_marked:
        return [Call(fault="the call cannot be read", invalid="bad_json")]
    return found


def split_calls(text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]], bool]:
    """An answer's text without its calls, the calls, and whether some could not be read; these stay in the text.

    'Hm. [TOOL_CALLS][{"name": "f", "arguments": {}}]' -> ("Hm.", [{"name": "f", "arguments": {}}], False)

    Calls without a mark or tag count only where the whole text is calls of known tools: it may as well be an answer.
    """
    tools = {schema["function"]["name"]: _typed_parameters(schema["function"]) for schema in schemas}
    calls: list[dict[str, Any]] = []

    def taken(found: list[Call]) -> bool:
        own = [(call.name, _plain(call.arguments)) for call in found if not call.fault and call.name]
        is_read = len(own) == len(found) and all(arguments is not None for _, arguments in own)
        calls.extend({"name": name, "arguments": arguments} for name, arguments in own if is_read)
        return is_read

    if "<tool_call>" in text:
        rest = _BLOCK.sub(lambda block: "" if taken(list(_block(block[1], block[2], tools))) else block[0], text)
        return rest.strip(), calls, "<tool_call>" in rest
    marks = (_MARKS.search(text), _FUNCTION.search(until_last("</function>", text)))
    begin = min((mark.start() for mark in marks if mark), default=None)
    found = calls_in(text[begin:], tools)
    if begin is None and not all(call.name in tools for call in found):
        return text, [], False
    if not found or not taken(found):
        return text, [], bool(found)
    return text[:begin].strip() if begin else "", calls, False


def _typed_parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a tool as a stranger describes it, of which anything may be missing."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    known = properties if isinstance(properties, Mapping) else {}
    return {"properties": {name: own for name, own in known.items() if isinstance(own, Mapping)}}


def _plain(arguments: Mapping[str, Any]) -> Any:
    """The arguments as JSON has them; None if it cannot, as sets and bytes of a Python call."""
    try:
        return json.loads(json.dumps(dict(arguments)))
    except (TypeError, ValueError, RecursionError):
        return None


def _block(content: str, closing: str, tools: Parameters) -> Iterator[Call]:
    if functions := list(_FUNCTION.finditer(until_last("</function>", content))):
        for function in functions:
            yield from _xml(function, tools)
    elif closing != "</tool_call>":
        yield Call(fault="the tool call has no closing </tool_call>", invalid="unclosed_tag")
    else:
        try:
            yield _object(_json.decode(content.strip()))
        except (ValueError, RecursionError):
            python = list(_python(content.strip(), tools))
            yield from python or [Call(fault="the tool call is not valid JSON", invalid="bad_json")]


def until_last(closing: str, text: str) -> str:
    """The text up to the last closing tag: an opening tag after it would be searched to the end of the text, each."""
    return text[: text.rfind(closing) + len(closing)] if closing in text else ""


def _xml(function: re.Match[str], tools: Parameters) -> Iterator[Call]:
    words = {
        found[1].strip(): found[2].strip("\n") for found in _PARAMETER.finditer(until_last("</parameter>", function[2]))
    }
    name = function[1].strip()
    yield Call(name, _from_words(tools[name], words) if name in tools else words)


def _from_words(parameters: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """Bare words as JSON values where the schema asks for other types than text."""
    properties, values = parameters.get("properties", {}), dict[str, Any](words)
    for name, word in words.items():
        if properties.get(name, {}).get("type") != "string":
            with contextlib.suppress(ValueError, RecursionError):
                values[name] = json.loads(word)
    return values


def _object(value: Any) -> Call:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return Call(fault='a call is a JSON object with "name" and "arguments"', invalid="bad_call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = _json.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return Call(fault='"arguments" must be a JSON object', invalid="bad_call")
    return Call(value["name"], arguments)


def _objects(text: str) -> Iterator[Call]:
    """Calls of Llama and Mistral: objects, a list of them, or NAME{arguments}; only where the whole text is calls."""
    found: list[Call] = []
    while text:
        named = _NAMED.match(text)
        try:
            value, end = _json.raw_decode(text, named.end() if named else 0)
        except (ValueError, RecursionError):
            return
        if named:
            found.append(_object({"name": named[1], "arguments": value}))
        elif isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            found += [_object(entry) for entry in value]
        elif isinstance(value, Mapping) and "name" in value:
            found.append(_object(value))
        else:
            return
        text = text[end:].lstrip("; \n")
    yield from found


def _python(text: str, tools: Parameters) -> Iterator[Call]:
    """Calls as Python writes them; only where the whole text is calls of known tools."""
    if not re.match(r"\[?\s*\w+\(", text) or len(text) > 100_000:
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in what a policy writes
            body = ast.parse(text, mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else [body]
        for node in nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in tools):
                return
        calls = []
        for node in nodes:
            assert isinstance(node, ast.Call)
            assert isinstance(node.func, ast.Name)
            names = list(tools[node.func.id].get("properties", {}))
            given = dict(zip(names, (ast.literal_eval(value) for value in node.args), strict=False))
            given |= {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
            calls.append(Call(node.func.id, given))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return
    yield from calls


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
