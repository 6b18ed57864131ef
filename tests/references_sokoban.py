"""Sokoban once more, as naively as possible: a move rewrites characters in a line of the text. Imports nothing of ours.

Every direction becomes "to the right" by turning the whole text; there the player, `@` or `+`, is followed by what is
ahead of it, and a handful of two- and three-character rewritings are all the rules.
"""

from __future__ import annotations

_WALKS = {"@-": "-@", "@.": "-+", "+-": ".@", "+.": ".+"}
_BOX_LEAVES = {"$": "-", "*": "."}
_BOX_COMES = {"-": "$", ".": "*"}
_PLAYER_COMES = {"-": "@", ".": "+"}
_PLAYER_LEAVES = {"@": "-", "+": "."}


def naive_move(text: str, direction: str) -> str:
    if direction == "left":
        return _mirrored(naive_move(_mirrored(text), "right"))
    if direction == "down":
        return _transposed(naive_move(_transposed(text), "right"))
    if direction == "up":
        return _transposed(naive_move(_transposed(text), "left"))
    return "\n".join(map(_moved_right, text.split("\n")))


def naive_solved(text: str) -> bool:
    return "$" not in text


def naive_reward(before: str, after: str) -> float:
    return -0.1 + (after.count("*") - before.count("*")) + (10 if naive_solved(after) else 0)


def _moved_right(line: str) -> str:
    for walk, walked in _WALKS.items():
        if walk in line:
            return line.replace(walk, walked)
    for player, left in _PLAYER_LEAVES.items():
        for box, under in _BOX_LEAVES.items():
            for free, pushed in _BOX_COMES.items():
                push = player + box + free
                if push in line:
                    return line.replace(push, left + _PLAYER_COMES[under] + pushed)
    return line


def _mirrored(text: str) -> str:
    return "\n".join(line[::-1] for line in text.split("\n"))


def _transposed(text: str) -> str:
    return "\n".join("".join(column) for column in zip(*text.split("\n"), strict=True))
