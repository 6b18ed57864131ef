"""Work counted from below, for floors: what nobody can leave out, however it is done. No torch, no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutWork:
    """Episodes as growing conversations, in groups with the same first prompt."""

    computed: int
    """Tokens that go through the layers; a group's first prompt once, an episode's last token never."""
    sampled: int
    attended: int
    """Keys seen by these tokens, summed."""
    keys_read: int
    """Keys read from memory in all decoding steps; those of a group's first prompt once for its living siblings."""
    steps: int
    """Decoding steps of the longest episode: the weights are read at least as often."""


def rollout_work(groups: Iterable[tuple[int, Sequence[Sequence[tuple[int, int]]]]]) -> RolloutWork:
    """Of (length of the first prompt, episodes as (answer, observation) lengths per turn)."""
    computed = sampled = attended = keys_read = steps = 0
    for opening, episodes in groups:
        computed, attended = computed + opening, attended + opening * (opening + 1) // 2
        decoding = []
        for turns in episodes:
            length, count = opening, 0
            for number, (answer, observation) in enumerate(turns):
                is_last = number == len(turns) - 1
                new = answer - 1 if is_last else answer + observation
                computed, attended = computed + new, attended + new * length + new * (new + 1) // 2
                keys_read += sum(length + place - opening for place in range(1, answer))
                length, sampled, count = length + answer + observation, sampled + answer, count + answer
            decoding.append(count - len(turns))  # an answer's first token comes with its prompt
        keys_read, steps = keys_read + opening * max(decoding, default=0), max(steps, *decoding)
    return RolloutWork(computed, sampled, attended, keys_read, steps)


@dataclass(frozen=True)
class RowWork:
    """Rows to train on."""

    tokens: int
    attended: int
    """Keys seen by these tokens, summed."""
    trained: int


def row_work(rows: Iterable[Sequence[int]], trained: int, *, share: bool) -> RowWork:
    """Of token ids; with `share`, tokens of a common beginning count once."""
    tokens = attended = 0
    before: Sequence[int] = ()
    for row in sorted(map(list, rows)) if share else rows:
        common = 0
        if share:
            limit = min(len(row), len(before))
            common = next((at for at in range(limit) if row[at] != before[at]), limit)
            before = row
        tokens += len(row) - common
        attended += len(row) * (len(row) + 1) // 2 - common * (common + 1) // 2
    return RowWork(tokens, attended, trained)
