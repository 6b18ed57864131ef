"""Entries of a catalogue, from WebShop's own files: read in parts, and never trusted to be well-formed."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from spear_rl.errors import UserError

_CHUNK = 1 << 20
_MAX_ENTRY = 1 << 26  # characters
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Entry:
    """A product as WebShop's three files hold it."""

    item: dict[str, Any]  # from items_shuffle.json
    attributes: dict[str, Any]  # from items_ins_v2.json
    instructions: list[dict[str, Any]]  # from items_human_ins.json


class DataError(UserError):
    """WebShop's files are missing or damaged."""


class Files(NamedTuple):
    """Paths of the three files."""

    items: str
    attributes: str
    instructions: str  # empty if there is no such file: then goals can only be synthetic


def found_files(data: str = "", *, size: str = "") -> Files:
    """The files in `data` or $WEBSHOP_DATA; `size` "1000" is the small catalogue, "" the full one if it is there."""
    place = data or os.environ.get("WEBSHOP_DATA", "")
    if not place:
        raise DataError("say where WebShop's files are: the option data, or the variable WEBSHOP_DATA")
    # Absolute, since a worker process may run in another folder.
    folder = Path(os.path.abspath(os.path.expanduser(place)))
    items, attributes = (_first_file(folder, name, size) for name in ("items_shuffle", "items_ins_v2"))
    instructions = folder / "items_human_ins.json"
    return Files(str(items), str(attributes), str(instructions) if instructions.is_file() else "")


def _first_file(folder: Path, name: str, size: str) -> Path:
    wanted = [f"{name}_{size}.json"] if size else [f"{name}.json", f"{name}_1000.json"]
    for file in wanted:
        if (folder / file).is_file():
            return folder / file
    raise DataError(
        f"{folder} holds no {' and no '.join(wanted)}: fetch WebShop's data (its setup.sh does) and put it there"
    )


def read_entries(files: Files, *, num_products: int = 0) -> Iterator[Entry]:
    """The products of the files in order, the first `num_products` of them; the catalogue is never in memory."""
    attributes, instructions = _table(files.attributes), _table(files.instructions) if files.instructions else {}
    for number, item in enumerate(_streamed(files.items)):
        if num_products and number >= num_products:
            return
        if isinstance(item, dict):
            asin = str(item.get("asin"))
            own, texts = attributes.get(asin), instructions.get(asin)
            # The original shows neither: they would come from a file that it does not load.
            item = {name: value for name, value in item.items() if name not in ("average_rating", "reviews")}
            yield Entry(item, own if isinstance(own, dict) else {}, texts if isinstance(texts, list) else [])


def usable(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Without the products that WebShop skips: no asin, one of more than ten characters, or a repeated one."""
    seen: set[str] = set()
    for entry in entries:
        asin = entry.item.get("asin")
        if isinstance(asin, str) and asin and asin != "nan" and len(asin) <= 10 and asin not in seen:
            seen.add(asin)
            yield entry


def _table(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__} instead of a table by asin")
    return content


def _streamed(path: str) -> Iterator[Any]:
    """The elements of a JSON list, one by one: the full catalogue is larger than the memory of many machines."""
    decode = json.JSONDecoder().raw_decode
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_CHUNK).lstrip("\ufeff \t\r\n")
            if not text.startswith("["):
                raise ValueError("it does not begin with a list")
            at, may_end = 1, True
            while True:
                at = _after_space(text, at)
                if may_end and text.startswith("]", at):
                    return
                try:
                    value, end = decode(text, at)
                    end = _after_space(text, end)
                    # A number may continue in the next chunk until a comma or the end is seen.
                    if text[end : end + 1] not in (",", "]"):
                        raise ValueError
                except ValueError:
                    more = file.read(max(_CHUNK, len(text) - at)) if len(text) - at < _MAX_ENTRY else ""
                    if not more:
                        raise ValueError("it ends in the middle, or is no JSON") from None
                    text, at = text[at:] + more, 0
                    continue
                yield value
                may_end = text[end] == "]"
                at = end if may_end else end + 1
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
