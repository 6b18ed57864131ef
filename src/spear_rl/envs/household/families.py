"""The six task families of ALFWorld: the sentences that state a task, and its goal in PDDL."""

import re
from functools import lru_cache
from typing import NamedTuple

from spear_rl.envs.household.rules.game import TREATMENTS, Treatment
from spear_rl.envs.household.rules.pddl import Formula, read_formula

SENTENCES: dict[str, tuple[str, ...]] = {
    "pick_and_place_simple": ("put a {thing} in {place}.", "put some {thing} on {place}."),
    "look_at_obj_in_light": ("look at {thing} under the {place}.", "examine the {thing} with the {place}."),
    "pick_clean_then_place_in_recep": ("put a clean {thing} in {place}.", "clean some {thing} and put it in {place}."),
    "pick_heat_then_place_in_recep": ("put a hot {thing} in {place}.", "heat some {thing} and put it in {place}."),
    "pick_cool_then_place_in_recep": ("put a cool {thing} in {place}.", "cool some {thing} and put it in {place}."),
    "pick_two_obj_and_place": ("put two {thing} in {place}.", "find two {thing} and put them in {place}."),
}
FAMILIES = tuple(SENTENCES)
TREATMENT_OF = {f"pick_{verb}_then_place_in_recep": treatment for verb, treatment in TREATMENTS.items()}
"""What has to be done to the object before it is placed, by family."""

_PATTERNS = [
    (family, re.compile(re.escape(sentence).replace(r"\{thing\}", r"(\w+)").replace(r"\{place\}", r"(\w+)")))
    for family, sentences in SENTENCES.items()
    for sentence in sentences
]
_PLACED = """
(exists (?r - receptacle) (exists (?o - object) (and
    (objecttype ?o {thing}type) (receptacletype ?r {place}type) (inreceptacle ?o ?r) {more})))"""
_SECOND = "(exists (?o2 - object) (and (not (= ?o ?o2)) (objecttype ?o2 {thing}type) (inreceptacle ?o2 ?r)))"
_IN_LIGHT = """
(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and
        (objecttype ?ot {place}type) (toggleable ?ot) (istoggled ?ot)
        (receptacleatlocation ?r ?l) (atlocation ?a ?l) (inreceptacle ?ot ?r)))
    (exists (?o - object ?a - agent) (and (objecttype ?o {thing}type) (holds ?a ?o))))"""


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


def type_of(name: str) -> str:
    """The type of a displayed object or receptacle: "mug 1" is a mug."""
    return name.rsplit(" ", 1)[0]


@lru_cache(maxsize=4096)
def goal_formula(task: TaskSpec) -> Formula:
    family, thing, place = task
    if family == "look_at_obj_in_light":
        return read_formula(_IN_LIGHT.format(thing=thing, place=place))
    more = _SECOND.format(thing=thing) if family == "pick_two_obj_and_place" else ""
    if task.treatment:
        more = f"({task.treatment.trait} ?o) ({task.treatment.gains} ?o)"
    return read_formula(_PLACED.format(thing=thing, place=place, more=more))
