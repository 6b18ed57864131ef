"""The six kinds of task and the sentences that state them, in both directions."""

from __future__ import annotations

import re
from typing import NamedTuple

FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

TREATMENT = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}
"""What has to be done to the object on the way, by family."""

SENTENCES: dict[str, tuple[str, ...]] = {
    "pick_and_place_simple": ("put a {thing} in {place}.", "put some {thing} on {place}."),
    "look_at_obj_in_light": ("look at {thing} under the {place}.", "examine the {thing} with the {place}."),
    "pick_clean_then_place_in_recep": ("put a clean {thing} in {place}.", "clean some {thing} and put it in {place}."),
    "pick_heat_then_place_in_recep": ("put a hot {thing} in {place}.", "heat some {thing} and put it in {place}."),
    "pick_cool_then_place_in_recep": ("put a cool {thing} in {place}.", "cool some {thing} and put it in {place}."),
    "pick_two_obj_and_place": ("put two {thing} in {place}.", "find two {thing} and put them in {place}."),
}

_READERS = [
    (family, re.compile(re.escape(sentence).replace(r"\{thing\}", r"(\w+)").replace(r"\{place\}", r"(\w+)")))
    for family, sentences in SENTENCES.items()
    for sentence in sentences
]


class Errand(NamedTuple):
    """What a task asks for: a kind of object and the kind of receptacle, or of lamp, it has to be brought to."""

    family: str
    thing: str
    place: str


def stated_errand(task: str) -> Errand:
    """The errand that a task sentence states."""
    for family, reader in _READERS:
        found = reader.fullmatch(task.strip())
        if found:
            return Errand(family, *found.groups())
    raise ValueError(f"not a task sentence of the household: {task[:200]!r}")
