"""A generated encyclopaedia of people and towns: facts that no model has seen, so that they must be looked up."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.tools.search import Passage


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words(
    "Ada Boris Carla Dmitri Elena Fritz Greta Hugo Irma Jonas Klara Leon Mona Nils Olga Pavel Rosa Stefan Thea Viktor"
)
_LAST = _words(
    "Abend Birk Castell Dorn Engel Falk Grau Halm Iven Jansen Kern Lind Moor Nord Ober Pohl Rank Stein Tamm Voss"
)
_TOWNS = _words(
    "Arlen Bremm Corva Delft Eskar Farne Golm Hestra Inval Jura Kessel Lorne Marn Nocera Orta Perl Quint Rova Sarn Tolm"
)
_COUNTRIES = ("Avaria", "Borland", "Cestia", "Dravia", "Elmark", "Foronia")
_TRADES = _words("baker carpenter doctor engineer farmer glazier lawyer painter sailor teacher")
MAX_PEOPLE = len(_FIRST) * len(_LAST)


class Person(NamedTuple):
    name: str
    town: str
    trade: str


@lru_cache(maxsize=8)
def people(count: int) -> tuple[Person, ...]:
    """The first `count` people, in an order and with facts that are the same on every machine."""
    dice = Dice("people")
    names = dice.shuffled([f"{first} {last}" for first in _FIRST for last in _LAST])
    return tuple(Person(name, dice.choice(_TOWNS), dice.choice(_TRADES)) for name in names[:count])


def country_of(town: str) -> str:
    return _COUNTRIES[_TOWNS.index(town) % len(_COUNTRIES)]


def passages(count: int) -> Sequence[Passage]:
    about = [
        Passage(name, f"{'an' if trade[0] in 'aeiou' else 'a'} {trade}, born in {town}.")
        for name, town, trade in people(count)
    ]
    return [*about, *(Passage(town, f"a town in {country_of(town)}.") for town in _TOWNS)]


def answers(kind: str) -> Sequence[str]:
    """All answers that a question of a kind can have."""
    return {"town": _TOWNS, "trade": _TRADES, "country": _COUNTRIES}[kind]
