"""The shortest way to solve a level: A* over pushes, counting moves. Squares from which no box gets home are dead."""

from __future__ import annotations

import heapq
from collections import deque
from functools import lru_cache

from spear_rl.envs.sokoban.rules import OPPOSITE, WALL, Level, Room, State

MAX_STATES = 2_000_000
NEVER = 1 << 20
"""More pushes than any level takes."""


class SearchLimitError(RuntimeError):
    """A level took more states to search than allowed."""


def solution(level: Level, *, weight: float = 1.0, max_states: int = MAX_STATES) -> list[int] | None:
    """The directions of a shortest solution; none if there is no solution at all.

    Args:
        weight: above 1, distances to go count so many times over: much faster on hard levels, and the solution has at
            most so many times the moves of a shortest one.
    """
    return _Search(level.room, weight, max_states).path(level.start)


def pushes_needed(room: Room, boxes: frozenset[int]) -> int:
    """At least so many pushes bring every box to a target of its own; NEVER or more if that cannot be."""
    return _matched(push_distances(room), tuple(sorted(boxes)))


@lru_cache(maxsize=256)
def push_distances(room: Room) -> tuple[tuple[int, ...], ...]:
    """For every target and cell: how many pushes bring a box from the cell to the target in an otherwise empty room."""
    return tuple(_distances_to(room, target) for target in sorted(room.targets))


def _distances_to(room: Room, target: int) -> tuple[int, ...]:
    distances = [NEVER] * (room.width * room.height)
    distances[target] = 0
    queue = deque([target])
    while queue:
        cell = queue.popleft()
        for direction in range(4):
            # Played backwards: the box is pulled to `before`, and who pulls it needs room beyond that.
            before = room.beside[cell][direction]
            if before != WALL and distances[before] == NEVER and room.beside[before][direction] != WALL:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return tuple(distances)


def _matched(distances: tuple[tuple[int, ...], ...], boxes: tuple[int, ...]) -> int:
    """The cheapest way to give every box a target of its own."""
    if len(boxes) == 1:
        return distances[0][boxes[0]]
    cheapest = {0: 0}
    for box in boxes:
        wider: dict[int, int] = {}
        for taken, cost in cheapest.items():
            for number, to_target in enumerate(distances):
                if not taken >> number & 1:
                    total = cost + to_target[box]
                    key = taken | 1 << number
                    if total < NEVER and total < wider.get(key, NEVER):
                        wider[key] = total
        cheapest = wider
    return min(cheapest.values(), default=NEVER)


class _Search:
    """One search. A state is (player, boxes), the boxes as bits."""

    def __init__(self, room: Room, weight: float, max_states: int) -> None:
        self._room, self._beside = room, room.beside
        self._weight, self._max_states = weight, max_states
        self._distances = push_distances(room)
        self._targets = sum(1 << cell for cell in room.targets)
        self._to_go: dict[int, int] = {}

    def path(self, start: State) -> list[int] | None:
        first = (start.player, sum(1 << cell for cell in start.boxes))
        costs = {first: 0}
        came_from: dict[tuple[int, int], tuple[tuple[int, int], int, int]] = {}
        done: set[tuple[int, int]] = set()
        queue = [(self._weight * self._least(first[1]), 0, first)]
        if queue[0][0] >= NEVER:
            return None
        while queue:
            _, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            if not state[1] & ~self._targets:
                return self._spelled_out(came_from, state)
            if len(done) > self._max_states:
                raise SearchLimitError(f"the level was not solved within {self._max_states} states")
            cost = costs[state]
            for following, length, stand, direction in self._pushes(*state):
                total = cost + length
                if following not in done and total < costs.get(following, NEVER):
                    to_go = self._least(following[1])
                    if to_go < NEVER:
                        costs[following] = total
                        came_from[following] = (state, stand, direction)
                        # Of equals the one that has come further; then by the state itself, to be the same everywhere.
                        heapq.heappush(queue, (total + self._weight * to_go, -total, following))
        return None

    def _pushes(self, player: int, boxes: int) -> list[tuple[tuple[int, int], int, int, int]]:
        """(state after the push, moves it takes, where one stands before it, direction) of every possible push."""
        beside, found = self._beside, []
        distance = {player: 0}
        queue = deque([player])
        while queue:
            cell = queue.popleft()
            moves = distance[cell] + 1
            for direction, ahead in enumerate(beside[cell]):
                if ahead == WALL:
                    continue
                if not boxes >> ahead & 1:
                    if ahead not in distance:
                        distance[ahead] = moves
                        queue.append(ahead)
                    continue
                behind = beside[ahead][direction]
                if behind != WALL and not boxes >> behind & 1:
                    pushed = boxes ^ (1 << ahead) ^ (1 << behind)
                    if not self._is_frozen(behind, pushed):
                        found.append(((ahead, pushed), moves, cell, direction))
        return found

    def _is_frozen(self, box: int, boxes: int) -> bool:
        """Whether the box stands in a square of four that can never move again, with a box in it off its target."""
        for vertical in (0, 1):
            for horizontal in (2, 3):
                corner = self._corner(box, vertical, horizontal)
                if all(cell == WALL or boxes >> cell & 1 for cell in corner):
                    held = sum(1 << cell for cell in corner if cell != WALL) | 1 << box
                    if held & ~self._targets:
                        return True
        return False

    def _corner(self, box: int, vertical: int, horizontal: int) -> tuple[int, int, int]:
        above, aside = self._beside[box][vertical], self._beside[box][horizontal]
        # The diagonal cell is reached by way of either neighbour; where both are wall it does not matter.
        diagonal = self._beside[above][horizontal] if above != WALL else WALL
        if above == WALL and aside != WALL:
            diagonal = self._beside[aside][vertical]
        return above, aside, diagonal

    def _least(self, boxes: int) -> int:
        known = self._to_go.get(boxes)
        if known is None:
            cells, rest = [], boxes
            while rest:
                cells.append((rest & -rest).bit_length() - 1)
                rest &= rest - 1
            known = self._to_go[boxes] = _matched(self._distances, tuple(cells))
        return known

    def _spelled_out(
        self, came_from: dict[tuple[int, int], tuple[tuple[int, int], int, int]], state: tuple[int, int]
    ) -> list[int]:
        parts: list[list[int]] = []
        while state in came_from:
            state, stand, direction = came_from[state]
            parts.append([*self._walk(state, stand), direction])
        return [direction for part in reversed(parts) for direction in part]

    def _walk(self, state: tuple[int, int], goal: int) -> list[int]:
        """A shortest walk of the player that pushes nothing."""
        start, boxes = state
        way: dict[int, int] = {start: WALL}
        queue = deque([start])
        while goal not in way:
            cell = queue.popleft()
            for direction, ahead in enumerate(self._beside[cell]):
                if ahead != WALL and not boxes >> ahead & 1 and ahead not in way:
                    way[ahead] = direction
                    queue.append(ahead)
        steps = []
        while goal != start:
            steps.append(way[goal])
            goal = self._beside[goal][OPPOSITE[way[goal]]]
        return steps[::-1]
