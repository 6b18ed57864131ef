"""Whether a grounded goal holds, as one function of a world: nested closures, the quickest that Python has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from spear_rl.envs.household.rules.goal import Ground

if TYPE_CHECKING:
    from spear_rl.envs.household.rules.world import World

Test: TypeAlias = "Callable[[World], bool]"


def goal_test(ground: Ground) -> Test:
    """Whether a grounded goal holds, as a function of the world."""
    if isinstance(ground, bool):
        return lambda world: ground
    kind, *rest = ground
    return _TESTS[kind](*rest)


def _every(*parts: Ground) -> Test:
    tests = tuple(map(goal_test, parts))

    def every(world: World) -> bool:
        for test in tests:  # noqa: SIM110 - a generator would double the time of a step
            if not test(world):
                return False
        return True

    return every


def _some(*parts: Ground) -> Test:
    tests = tuple(map(goal_test, parts))

    def some(world: World) -> bool:
        for test in tests:  # noqa: SIM110 - a generator would double the time of a step
            if test(world):
                return True
        return False

    return some


def _not(part: Ground) -> Test:
    test = goal_test(part)
    return lambda world: not test(world)


def _flag(predicate: str, entity: int) -> Test:
    return lambda world: entity in world.flags[predicate]


def _busy() -> Test:
    return lambda world: world.held >= 0


def _opened(receptacle: int) -> Test:
    return lambda world: receptacle in world.opened


def _here(place: int) -> Test:
    return lambda world: world.here == place


def _held(entity: int) -> Test:
    return lambda world: world.held == entity


def _inside(entity: int, *receptacles: int) -> Test:
    if len(receptacles) == 1:
        (receptacle,) = receptacles
        return lambda world: entity in world.contents[receptacle]

    def inside(world: World) -> bool:
        contents = world.contents
        for receptacle in receptacles:  # noqa: SIM110 - as above
            if entity in contents[receptacle]:
                return True
        return False

    return inside


def _lying(entity: int, place: int) -> Test:
    return lambda world: entity in world.lying[place]


_TESTS: dict[str, Callable[..., Test]] = {
    "all": _every,
    "any": _some,
    "not": _not,
    "flag": _flag,
    "busy": _busy,
    "opened": _opened,
    "here": _here,
    "held": _held,
    "inside": _inside,
    "lying": _lying,
}
