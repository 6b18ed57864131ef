"""Who demonstrates generated problems: problem and seed in, what is said in one episode out."""

from __future__ import annotations

from collections.abc import Callable

from spear_rl.envs.shared.dice import Dice
from spear_rl.envs.tool_math.calls import call_text
from spear_rl.envs.tool_math.data.problem import Problem
from spear_rl.envs.tool_math.generated import EASY

Expert = Callable[[Problem, int], list[str]]


def with_tool(problem: Problem, seed: int) -> list[str]:
    """Calls the tool, then says what it showed."""
    return [call_text(problem.code), boxed(problem.answer)]


def by_head(problem: Problem, seed: int) -> list[str]:
    """Says a number at once: the right one where that is easy, else one of the right size, right by chance only."""
    if problem.family in EASY:
        return [boxed(problem.answer)]
    most = 10 ** len(problem.answer)
    return [boxed(str(Dice("by head", problem.text, seed).between(most // 10, most - 1)))]


def careless(problem: Problem, seed: int) -> list[str]:
    """Calls the tool in one episode of four and guesses in the others: who imitates it has the tool to discover."""
    return (with_tool if Dice("careless", problem.text, seed).chance(0.25) else by_head)(problem, seed)


def boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


DEMONSTRATORS: dict[str, Expert] = {"tool": with_tool, "careless": careless}
