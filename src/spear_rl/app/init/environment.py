"""my_game: find a hidden number. `ask 5` tells whether it is higher or lower, `say 5` ends the game.

An environment is a class that plays one episode and a function that lists the tasks. Change both to your own game.
"""

import random
from functools import partial

from spear_rl.rollout import Observation, StepResult, Task

SPLITS = {"train": 1000, "validation": 200, "test": 200}
WRONG = -0.2  # what a wrong answer costs


def tasks(split: str, *, highest: int = 10) -> list[Task]:
    """The tasks of a split, always the same in the same order. Options come from task.options, e.g. highest."""
    panel = []
    for number in range(SPLITS[split]):
        answer = random.Random(f"{split} {number}").randint(1, highest)  # seeded: a game must be deterministic
        panel.append(
            Task(
                id=f"my_game/{split}/{number:04d}",  # no task is in two splits
                make_env=partial(Game, answer, highest),  # picklable: no lambda
                family="low" if answer <= highest // 2 else "high",  # results are also told per family
                instructions=f"Find a number from 1 to {highest}. Say `ask N` for a hint, `say N` to answer.",
                demonstrate=partial(expert, answer, highest),
                unfinished_reward=WRONG,  # no answer costs as much as a wrong one, or silence would pay
            )
        )
    return panel


def expert(answer: int, highest: int, seed: int) -> list[str]:
    """The actions of an episode for the cold start. This expert mostly guesses: RL has something to improve."""
    rng = random.Random(f"{answer} {seed}")
    if rng.random() < 0.75:
        return [f"say {rng.randint(1, highest)}"]
    low, high, actions = 1, highest, []
    while low < high:
        middle = (low + high) // 2
        actions.append(f"ask {middle}")
        if answer == middle:
            break
        low, high = (middle + 1, high) if answer > middle else (low, middle - 1)
    return [*actions, f"say {answer}"]


class Game:
    """One episode: `reset` once, `step` until done, `close`. Text in, text out."""

    def __init__(self, answer: int, highest: int) -> None:
        self._answer, self._highest, self._is_over = answer, highest, False
        self._hints: list[str] = []

    def reset(self) -> Observation:
        return self._seen(f"a number from 1 to {self._highest}")

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("the episode is over")
        verb, _, word = action.strip().partition(" ")
        if verb not in ("ask", "say") or not (word.isascii() and word.isdecimal() and len(word) < 10):
            # A policy says anything. Give the reason in one word; the policy sees the text, and the turn is counted.
            return StepResult(
                self._seen("nothing happens"), invalid="no_action", success=False, metrics=self._metrics()
            )
        number, is_found = int(word), int(word) == self._answer
        if verb == "ask":
            self._hints.append(f"{number} : {'yes' if is_found else 'higher' if self._answer > number else 'lower'}")
            seen = self._seen(self._hints[-1])
            return StepResult(seen, used_tool=True, success=False, metrics=self._metrics())  # the bonus pays tool turns
        self._is_over = True
        seen, reward = self._seen("right" if is_found else "wrong"), 1.0 if is_found else WRONG
        return StepResult(seen, reward=reward, done=True, success=is_found, metrics=self._metrics())

    def close(self) -> None:
        """Free what the episode holds."""

    def _seen(self, text: str) -> Observation:
        return Observation(text, state_key=" ".join(["start", *sorted(self._hints)]))  # the same state, the same key

    def _metrics(self) -> dict[str, float]:
        return {"questions": float(len(self._hints))}  # evaluations report the mean
