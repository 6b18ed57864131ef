"""How wrappers change a base: by `dataclasses.replace`, or one sentence why they cannot."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from spear_rl.algorithms.base import Algorithm
from spear_rl.errors import ConfigError


class AlgorithmError(ConfigError, ValueError):
    """A wrapper that does not go with its base."""


class SettingError(AlgorithmError):
    """A setting that an algorithm has no place for."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name, self.sentence = name, sentence


def field_names(part: Any) -> set[str]:
    """The fields of a record; a plain function has none."""
    return {f.name for f in fields(part)} if is_dataclass(part) and not isinstance(part, type) else set()


def label(part: Any) -> str:
    """A record's kind, or where a function is: package.module:function."""
    if is_dataclass(part) or not hasattr(part, "__qualname__"):
        return type(part).__name__
    return f"{part.__module__}:{part.__qualname__}"


def changed(base: Algorithm, part: str, wrapper: str, instead: str, **values: Any) -> Any:
    """A part of `base` with other settings, or one sentence why `wrapper` cannot wrap it."""
    old = getattr(base, part)
    if missing := [name for name in values if name not in field_names(old)]:
        raise AlgorithmError(
            f"{wrapper} sets {', '.join(missing)} of the {part}, which {label(old)} does not have: "
            f"pass a record with such fields, e.g. {instead}"
        )
    return replace(old, **values)


def with_settings(base: Algorithm, **settings: Any) -> Algorithm:
    """`base` with each setting written into the record that has a field of that name: itself or a part."""
    for name, value in settings.items():
        owner = next(
            (p for p in ("", "advantages", "loss", "critic") if name in field_names(getattr(base, p) if p else base)),
            None,
        )
        if owner is None:
            parts = f"neither its advantages ({label(base.advantages)}) nor its loss ({label(base.loss)})"
            raise SettingError(name, f"{parts} can be set so")
        try:
            base = replace(
                base, **({owner: replace(getattr(base, owner), **{name: value})} if owner else {name: value})
            )
        except ValueError as error:
            raise SettingError(name, str(error)) from error
    return base
