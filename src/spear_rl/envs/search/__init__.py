"""Questions that a policy answers by searching a corpus: about one person, or over two passages."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from spear_rl.envs.search.world import MAX_PEOPLE, Person, answers, country_of, people
from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.shared.generated_panels import SPLITS, content_split, panel_hash
from spear_rl.envs.tools import CALLS, Problem, demonstration, panel
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import OneOf, Range, has_checked_options

QUESTIONS = {
    "town": "In which town was {name} born?",
    "trade": "What is the trade of {name}?",
    "country": "In which country was {name} born?",
}
"""Kind of question -> its text; a country takes two searches."""


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    kinds: Sequence[Annotated[str, OneOf(QUESTIONS, "kind")]] = tuple(QUESTIONS),
    num_people: Annotated[int, Range(24, MAX_PEOPLE)] = MAX_PEOPLE,
    num_results: Annotated[int, Range(1, 100)] = 3,
    calls: Annotated[str, OneOf(CALLS, "format", CALLS)] = "template",
    guesses: Annotated[float, Range(0, 1)] = 0.5,
    max_turns: Annotated[int, Range(1, 10_000, unit="turns")] = 5,
    max_tasks: Annotated[int, Range(0, 10_000_000)] | None = None,
) -> Sequence[Task]:
    """The questions of a split: about people of whom no other split asks.

    Args:
        kinds: of questions, of town, trade and country.
        num_results: passages per search.
        guesses: fraction of the demonstrations that answer at once, at random: imitation leaves room to learn.
    """
    chosen = [
        _problem(person, kind)
        for person in people(num_people)
        for kind in kinds
        if content_split(panel_hash([person.name])) == split
    ][:max_tasks]
    source = f"search:generated:{num_people},{num_results}"
    made = panel("search", split, chosen, [source], style=calls, max_turns=max_turns)
    return tuple(
        replace(task, demonstrate=partial(_demonstration, problem, calls, guesses))
        for task, problem in zip(made, chosen, strict=True)
    )


def _problem(person: Person, kind: str) -> Problem:
    answer = {"town": person.town, "trade": person.trade, "country": country_of(person.town)}[kind]
    queries = [person.name, *([person.town] if kind == "country" else [])]
    calls = [{"name": "search", "arguments": {"query": query}} for query in queries]
    return Problem(
        f"{kind}/{person.name.replace(' ', '_')}",
        QUESTIONS[kind].format(name=person.name),
        answer,
        kind,
        (*calls, f"<answer>{answer}</answer>"),
        {"answer": answer},
    )


def _demonstration(problem: Problem, style: str, guesses: float, seed: int) -> list[str]:
    dice = Dice("search", problem.id, seed)
    if dice.chance(guesses):
        return [f"<answer>{dice.choice(answers(problem.family))}</answer>"]
    return demonstration(problem, style, seed)
