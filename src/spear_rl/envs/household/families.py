"""The six task families of ALFWorld and the sentences that state a task."""

from __future__ import annotations

import re
from typing import NamedTuple

from spear_rl.envs.household.rules.game import TREATMENTS, Treatment

SENTENCES: dict[str, tuple[str, ...]] = {
    "pick_and_place_simple": ("put a {thing} in {place}.", "put some {thing} on {place}."),
    "look_at_obj_in_light": ("look at {thing} under the {place}.", "examine the {thing} with the {place}."),
    "pick_clean_then_place_in_recep": ("put a clean {thing} in {place}.", "clean some {thing} and put it in {place}."),
    "pick_heat_then_place_in_recep": ("put a hot {thing} in {place}.", "heat some {thing} and put it in {place}."),
    "pick_cool_then_place_in_recep": ("put a cool {thing} in {place}.", "cool some {thing} and put it in {place}."),
    "pick_two_obj_and_place": ("put two {thing} in {place}.", "find two {thing} and put them in {place}."),
}
FAMILIES = tuple(SENTENCES)
TREATMENT_OF = {
    "pick_clean_then_place_in_recep": TREATMENTS["clean"],
    "pick_heat_then_place_in_recep": TREATMENTS["heat"],
    "pick_cool_then_place_in_recep": TREATMENTS["cool"],
}
"""What has to be done to the object before it is placed, by family."""

_PATTERNS = [
    (family, re.compile(re.escape(sentence).replace(r"\{thing\}", r"(\w+)").replace(r"\{place\}", r"(\w+)")))
    for family, sentences in SENTENCES.items()
    for sentence in sentences
]


class TaskSpec(NamedTuple):
    """What a task asks for: a type of object, and the type of receptacle (or lamp) to bring it to."""

    family: str
    thing: str
    place: str

    @property
    def treatment(self) -> Treatment | None:
        return TREATMENT_OF.get(self.family)


def parsed_task(sentence: str) -> TaskSpec:
    """The task that a sentence states."""
    for family, pattern in _PATTERNS:
        found = pattern.fullmatch(sentence.strip())
        if found:
            return TaskSpec(family, *found.groups())
    raise ValueError(f"not a task sentence of the household: {sentence[:200]!r}")
