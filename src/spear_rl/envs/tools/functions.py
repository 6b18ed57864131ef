"""Typed Python functions as tools: their schema in OpenAI's format, checked arguments, and results as short texts."""

import contextlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spear_rl.errors import OptionError
from spear_rl.io.escaping import in_words

_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    """What a policy can call by name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""
    run: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def tool_of(function: Callable[..., Any]) -> Tool:
    """The tool that a typed function is; OptionError where its schema cannot be told."""
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise OptionError(f"tools: {function!r} has no name: write it as a function")
    try:
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise OptionError(f"tools: the signature of {name} cannot be read ({in_words(error)})") from error
    described = _argument_texts(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise OptionError(f"tools: {name} takes {parameter}: name every parameter, as in `def {name}(text: str)`")
        if parameter.name not in hints:
            raise OptionError(
                f"tools: the parameter {parameter.name} of {name} has no type: write {parameter.name}: str"
            )
        kind = _schema(hints[parameter.name], f"the parameter {parameter.name} of {name}")
        text = described.get(parameter.name)
        properties[parameter.name] = {**kind, "description": text} if text else kind
        required += [parameter.name] if parameter.default is parameter.empty else []
    text = (inspect.getdoc(function) or "").split("\n\n")[0]
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(name, " ".join(text.split()), schema, function)


def _schema(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [argument for argument in arguments if argument is not type(None)]
        if len(kinds) == 1:
            return _schema(kinds[0], what)
    if origin is Literal and all(isinstance(argument, str) for argument in arguments):
        return {"type": "string", "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0], what)}
    if (origin or hint) in _TYPES:
        return {"type": _TYPES[origin or hint]}
    raise OptionError(f"tools: {what} is {hint}; a tool takes str, int, float, bool, list, dict or Literal of texts")


def _argument_texts(doc: str) -> dict[str, str]:
    """Parameter -> its line in the `Args:` of a docstring."""
    _, found, rest = doc.partition("Args:\n")
    lines = [line.strip().partition(":") for line in rest.splitlines()] if found else []
    return {name.split(" ")[0]: text.strip() for name, colon, text in lines if colon and text.strip()}


def argument_fault(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, for the policy; empty if nothing is."""
    properties = tool.parameters.get("properties", {})
    for name in tool.parameters.get("required", ()):
        if name not in arguments:
            return f"{tool.name} needs the argument {name}"
    for name, value in arguments.items():
        if name not in properties:
            return f"{tool.name} has no argument {name[:60]!r}; it has: {', '.join(properties) or 'none'}"
        kind = properties[name].get("type")
        known = _PYTHON.get(kind) if isinstance(kind, str) else None
        if known and (not isinstance(value, known) or (isinstance(value, bool) and kind != "boolean")):
            return f"the argument {name} of {tool.name} must be of type {kind}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return f"the argument {name} of {tool.name} must be one of: {', '.join(map(str, properties[name]['enum']))}"
    return ""


def from_words(tool: Tool, arguments: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that a format writes as bare words, as JSON values where the schema asks for other types."""
    properties, values = tool.parameters.get("properties", {}), dict[str, Any]()
    for name, word in arguments.items():
        values[name] = word
        if properties.get(name, {}).get("type") != "string":
            with contextlib.suppress(ValueError, RecursionError):
                values[name] = json.loads(word)
    return values


def as_text(value: Any, most: int) -> str:
    """A tool's result as text of about `most` characters at most."""
    if isinstance(value, bytes):
        value = value[: 4 * most].decode("utf-8", "replace")
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    text: str = value
    if len(text) <= most:
        return text
    return f"{text[:most]}\n(cut: the result has {len(text):,} characters, of which {most:,} are shown)"
