"""Typed settings in nested dataclasses, from and to TOML and the command line. Knows nothing of what they mean."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal

from spear_rl.errors import ConfigError


def update(section: Any, table: Mapping[str, Any], path: str = "", *, root: Any = None) -> None:
    """Write `table` into the dataclass `section`, refusing unknown keys and wrong types."""
    hints = typing.get_type_hints(type(section))
    for name, value in table.items():
        key = f"{path}.{name}" if path else name
        if name not in hints:
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                key = f"{key}.{inner}"
            raise ConfigError(f"unknown setting {key}{nearest(key, _all_keys(root or section))}")
        current = getattr(section, name)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{key} is a section: write {key}.<key>=value, with one of {', '.join(_names(current))}"
                )
            update(current, value, key, root=root or section)
        elif isinstance(current, dict):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{key} takes keys of its own: write {key}.<key>=value")
            current.update(value)
        else:
            setattr(section, name, _typed(value, hints[name], key))


def to_toml(config: Any, *, comments: bool = False) -> str:
    """TOML that `load` reads back to the same config; with every field's description if asked."""
    lines: list[str] = []
    for path, section in sections(config):
        lines += ["", f"[{path}]"]
        for name, text in documentation(type(section)).items():
            value = getattr(section, name)
            if is_dataclass(value):
                continue
            if comments:
                lines.append(f"# {text}")
            if isinstance(value, dict):
                inner = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items())
                lines.append(f"{name} = {{{inner}}}")
            else:
                lines.append(f"# {name} =" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def sections(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every section with its dotted path, outer ones first."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            inner = f"{path}.{entry.name}" if path else entry.name
            yield inner, value
            yield from sections(value, inner)


def documentation(section: type) -> dict[str, str]:
    """Field -> the string under it."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
    texts = {entry.name: "" for entry in fields(section)}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[ast.unparse(statement.target)] = ast.literal_eval(following.value)
    return texts


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def literal(text: str) -> Any:
    """A value as TOML would read it; anything else is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, text)


def nearest(word: str, known: Any) -> str:
    """A question with the most similar known word, or nothing."""
    close = difflib.get_close_matches(word, list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _typed(value: Any, hint: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value == "none":
            return None
        return _typed(value, next(a for a in arguments if a is not type(None)), key)
    if origin is Literal:
        if value not in arguments:
            near = nearest(str(value), arguments)
            raise ConfigError(f"{key} cannot be {value!r}{near}; it is one of: {', '.join(map(str, arguments))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ConfigError(f'{key} takes a list, e.g. {key}=["a"]; got {value!r}')
        return [_typed(v, arguments[0], key) for v in value]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
        raise ConfigError(f"{key} takes {wanted}; got {value!r}")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{k if k.isidentifier() and k.isascii() else _toml(k)} = {_toml(v)}" for k, v in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"a setting cannot be {value!r}: it is not valid Unicode text")
    # JSON leaves DEL as it is, TOML forbids it.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _names(section: Any) -> list[str]:
    return [entry.name for entry in fields(section)]


def _all_keys(root: Any) -> list[str]:
    return [f"{path}.{name}" for path, section in sections(root) for name in _names(section)]
