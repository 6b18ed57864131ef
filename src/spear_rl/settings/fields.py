"""Typed settings in nested dataclasses, read from and written to TOML and the command line.

A field's annotation says what it may be (see `ranges`), the string under it what it means, with one line
`choice: meaning` for each choice of a Literal.
"""

import ast
import functools
import inspect
import json
import keyword
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from spear_rl.errors import ConfigError
from spear_rl.settings.ranges import checked, described, nearest, shown

_DEEPEST = 16
"""Levels of nested lists and tables."""
OTHER_NAMES = {
    "lr": "optim.learning_rate", "n": "rollout.group_size", "num_generations": "rollout.group_size",
    "group": "rollout.group_size", "batch": "rollout.num_tasks", "bs": "rollout.num_tasks", "beta": "algorithm.kl",
    "train_batch_size": "rollout.num_tasks", "algo": "algorithm.name", "algorithm": "algorithm.name",
    "environment": "task.env", "task": "task.env", "model_path": "engine.model", "output": "run.dir",
    "output_dir": "run.dir", "out": "run.dir", "max_steps": "run.steps", "num_steps": "run.steps",
    "total_steps": "run.steps", "gpu": "engine.device", "cuda": "engine.device", "max_tokens": "rollout.max_new_tokens",
    "grad_clip": "optim.max_grad_norm", "kl_coef": "algorithm.kl", "entropy_coef": "algorithm.entropy_bonus",
    "wandb": "run.trackers", "report_to": "run.trackers", "save_every": "run.checkpoint_every",
    "save_steps": "run.checkpoint_every", "eval_every": "eval.every", "eval_steps": "eval.every",
    "num_workers": "rollout.workers", "warmup": "optim.warmup_steps",
}  # fmt: skip
"""Names that other programs use -> our setting."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def update(section: Any, table: Mapping[str, Any], path: str = "", *, root: Any = None) -> None:
    """Write `table` into the dataclass `section`, refusing unknown keys, wrong types and what is out of range."""
    hints = _hints(type(section))
    for name, value in table.items():
        key, name = f"{path}.{name}" if path else name, attribute(name)
        if name not in hints:
            while isinstance(value, Mapping) and value:
                inner, value = next(iter(value.items()))
                key = f"{key}.{inner}"
            if "." in name and key in _all_keys(root or section):
                raise ConfigError(f'"{key}" in quotes is one name with a dot in it: write {key} without quotes')
            raise ConfigError(f"unknown setting {shown(key)[1:-1]}{meant(key, _all_keys(root or section))}")
        current = getattr(section, name)
        if is_dataclass(current):
            if not isinstance(value, Mapping):
                keys = ", ".join(_hints(type(current)))
                raise ConfigError(f"{key} is a section: write {key}.<key>=value, with one of {keys}")
            update(current, value, key, root=root or section)
        elif isinstance(current, dict):
            current.update(_plain(value, key))
        else:
            setattr(section, name, checked(value, hints[name], key, partial(choices, type(section), name)))


def attribute(name: str) -> str:
    """The field of a setting: a setting that is a word of Python, as `from`, ends with an underscore there."""
    return f"{name}_" if keyword.iskeyword(name) else name


def meant(key: str, known: Sequence[str]) -> str:
    """A question with the settings that someone who wrote `key` may have meant; nothing if none is near."""
    *path, name = key.lower().replace("-", "_").strip("_").split(".")
    if alias := OTHER_NAMES.get(name):
        return f"; did you mean {alias}?"
    if not path and (same := [k for k in known if k.split(".")[-1] == name]):
        return f"; did you mean {' or '.join(same[:3])}?"
    return nearest(key, known)


def override(config: Any, settings: Sequence[str]) -> None:
    """Write `section.key=value` settings of the command line into `config`; of two for one key the later wins."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        path, text = key.strip().split("."), text.strip()
        if not equals or not all(path):
            raise ConfigError(f"{shown(setting)} is no setting: write section.key=value, e.g. run.steps=50")
        hint = _hint_at(config, path)
        if not text and hint is not None and not _is_text(hint):
            raise ConfigError(f"{'.'.join(path)} has no value: write {'.'.join(path)}=value")
        table = literal(text, is_text=_is_text(hint))
        for part in reversed(path):
            table = {part: table}
        update(config, table)


def check_fields(section: Any, path: str = "") -> None:
    """Check every field against its annotation, as reading it does: for a config made in Python."""
    for name, hint in _hints(type(section)).items():
        own = name.removesuffix("_")
        key, value = f"{path}.{own}" if path else own, getattr(section, name)
        if is_dataclass(hint):
            if not isinstance(value, typing.cast(type, hint)):
                raise ConfigError(f"{key} is a section, a {typing.cast(type, hint).__name__}; got {shown(value)}")
            check_fields(value, key)
        elif typing.get_origin(hint) is dict:
            setattr(section, name, _plain(value, key))
        else:
            setattr(section, name, checked(value, hint, key, partial(choices, type(section), name)))


def to_toml(config: Any, *, comments: bool = False) -> str:
    """TOML that `load` reads back to the same config; with every field's description and limits if `comments`."""
    lines: list[str] = []
    for path, section in sections(config):
        lines += ["", f"[{path}]"]
        kind: type = type(section)
        for name, text in documentation(kind).items():
            value = getattr(section, name)
            if is_dataclass(value):
                continue
            if comments:
                meaning, *per_choice = text.splitlines()
                limits = described(_hints(kind)[name])
                lines.append(f"# {meaning}" + (f" ({limits})" if limits else ""))
                lines += [f"#   {line}" for line in per_choice]
            own = name.removesuffix("_")
            lines.append(f"# {own} =" if value is None else f"{own} = {toml_value(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def sections(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every section with its dotted path, outer ones first."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            inner = f"{path}.{entry.name}" if path else entry.name
            yield inner, value
            yield from sections(value, inner)


@functools.cache
def documentation(section: type) -> dict[str, str]:
    """Field -> the string under it."""
    body = typing.cast(ast.ClassDef, ast.parse(inspect.getsource(section)).body[0]).body
    texts = {entry.name: "" for entry in fields(section)}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            texts[ast.unparse(statement.target)] = inspect.cleandoc(ast.literal_eval(following.value))
    return texts


def flat(config: Any) -> dict[str, Any]:
    """Dotted key -> value, of every setting."""
    return {
        f"{path}.{entry.name.removesuffix('_')}": getattr(section, entry.name)
        for path, section in sections(config)
        for entry in fields(section)
        if not is_dataclass(getattr(section, entry.name))
    }


def choices(section: type, name: str) -> dict[str, str]:
    """Choice -> its meaning, for a field that is a Literal; else nothing."""
    hint = _hints(section)[name]
    known = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    lines = (line.partition(": ") for line in documentation(section)[name].splitlines())
    meanings = {choice.strip(): meaning for choice, _, meaning in lines}
    return {choice: meanings.get(choice, "") for choice in known}


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, attribute(part))
    return value


def literal(text: str, *, is_text: bool = False) -> Any:
    """A value as TOML reads it; what is no TOML is a text. For a field of texts only quotes are read as TOML."""
    if is_text and not text.startswith(("'", '"')):
        return text
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # a ValueError also for numbers of thousands of digits
        table = {}
    value = table.get("value", text) if len(table) == 1 else text
    if isinstance(value, date | time) or (is_text and not isinstance(value, str)):
        return text
    return {"True": True, "False": False}.get(text, value) if not is_text else value


def table_in(source: str, known: Mapping[str, str]) -> dict[str, Any]:
    """The table in one of the `known` TOML texts or in a file."""
    try:
        text = known[source] if source in known else Path(source).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: it is no UTF-8 text") from error
    except (OSError, ValueError) as error:  # a ValueError for a name that no file can have
        advice = f"{nearest(source, known)}; presets: {', '.join(known)}"
        raise ConfigError(f"{shown(source)} is neither a preset nor a file{advice}") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits
        raise ConfigError(f"{source}: not valid TOML: {error}") from error


def _hints(section: type) -> dict[str, Any]:
    return _cached_hints(section)


@functools.cache
def _cached_hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def _hint_at(config: Any, path: list[str]) -> Any:
    """The annotation of the field at a path; None if there is no such field."""
    hint: Any = type(config)
    for name in path:
        hint = _hints(typing.cast(type, hint)).get(attribute(name)) if is_dataclass(hint) else None
    return None if is_dataclass(hint) else hint


def _is_text(hint: Any) -> bool:
    base = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    return base is str or typing.get_origin(base) is Literal


def _plain(value: Any, key: str, depth: int = 0) -> Any:
    """A table, at depth 0, or another value that TOML can hold."""
    if depth == 0 and not isinstance(value, Mapping):
        raise ConfigError(f"{key} takes keys of its own: write {key}.<key>=value; got {shown(value)}")
    if depth > _DEEPEST:
        raise ConfigError(f"{shown(key)[1:-1]} has more than {_DEEPEST} levels of lists and tables in each other")
    if isinstance(value, Mapping):
        return {checked(name, str, key): _plain(entry, f"{key}.{name}", depth + 1) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, key, depth + 1) for entry in value]
    if isinstance(value, str | date | time):
        return checked(value, str, key)
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    kinds = "a text, a finite number of at most 64 bits, true or false, a list or a table"
    raise ConfigError(f"{key} takes {kinds}; got {shown(value)}")


def toml_value(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        keys = {name: name if _BARE_KEY.fullmatch(name) else toml_value(name) for name in value}
        return "{" + ", ".join(f"{keys[name]} = {toml_value(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's escapes are valid TOML; JSON does not escape DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _all_keys(root: Any) -> list[str]:
    return [f"{path}.{name.removesuffix('_')}" for path, section in sections(root) for name in _hints(type(section))]
