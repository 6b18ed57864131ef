"""Solves a level with the fewest moves: A* over pushes, without states in which a box can never reach a target."""

import heapq
from collections import deque
from functools import lru_cache
from typing import TypeAlias

from spear_rl.envs.sokoban.rules import OPPOSITE, WALL, Level, Room, State

MAX_STATES = 2_000_000
NEVER = 1 << 20
"""More pushes than any level takes."""

Node: TypeAlias = tuple[int, int]
"""(player, boxes), the boxes as bits."""


class SearchLimitError(RuntimeError):
    """A level took more states to search than allowed."""


def solution(level: Level, *, weight: float = 1.0, max_states: int = MAX_STATES) -> list[int] | None:
    """The directions of a shortest solution; None if there is no solution.

    A `weight` above 1 (weighted A*) is much faster on hard levels and gives at most `weight` times as many moves.
    """
    return _Search(level.room, weight, max_states).path(level.start)


def pushes_needed(room: Room, boxes: frozenset[int]) -> int:
    """A lower bound of the pushes that bring every box to a target of its own; NEVER or more if that is impossible."""
    return _assignment_cost(push_distances(room), tuple(sorted(boxes)))


@lru_cache(maxsize=256)
def push_distances(room: Room) -> tuple[tuple[int, ...], ...]:
    """For every target and cell: the pushes that bring a box from the cell to the target in an otherwise empty room."""
    return tuple(_distances_to(room, target) for target in sorted(room.targets))


def _distances_to(room: Room, target: int) -> tuple[int, ...]:
    distances = [NEVER] * (room.width * room.height)
    distances[target] = 0
    queue = deque([target])
    while queue:
        cell = queue.popleft()
        for direction in range(4):
            # Played backwards: the box is pulled to `before`, and the player needs the cell beyond it.
            before = room.beside[cell][direction]
            if before != WALL and distances[before] == NEVER and room.beside[before][direction] != WALL:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return tuple(distances)


def _assignment_cost(distances: tuple[tuple[int, ...], ...], boxes: tuple[int, ...]) -> int:
    """The cost of the cheapest assignment of boxes to targets."""
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
    def __init__(self, room: Room, weight: float, max_states: int) -> None:
        self._beside, self._weight, self._max_states = room.beside, weight, max_states
        self._distances = push_distances(room)
        self._targets = sum(1 << cell for cell in room.targets)
        self._bounds: dict[int, int] = {}
        self._came_from: dict[Node, tuple[Node, int, int]] = {}
        """Node -> (node before the push, cell of the player before the push, direction)."""

    def path(self, start: State) -> list[int] | None:
        first = (start.player, sum(1 << cell for cell in start.boxes))
        costs = {first: 0}
        done: set[Node] = set()
        queue = [(self._weight * self._bound(first[1]), 0, first)]
        if queue[0][0] >= NEVER:
            return None
        while queue:
            _, _, node = heapq.heappop(queue)
            if node in done:
                continue
            done.add(node)
            if not node[1] & ~self._targets:
                return self._moves_to(node)
            if len(done) > self._max_states:
                raise SearchLimitError(f"the level was not solved within {self._max_states} states")
            cost = costs[node]
            for following, length, stand, direction in self._pushes(*node):
                total = cost + length
                if following not in done and total < costs.get(following, NEVER):
                    bound = self._bound(following[1])
                    if bound < NEVER:
                        costs[following] = total
                        self._came_from[following] = (node, stand, direction)
                        # Ties go to the larger cost so far, then to the smaller node: the same on every machine.
                        heapq.heappush(queue, (total + self._weight * bound, -total, following))
        return None

    def _pushes(self, player: int, boxes: int) -> list[tuple[Node, int, int, int]]:
        """(node after the push, moves it takes, cell of the player before it, direction) of every possible push."""
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
        """Whether the box is in a block of 2 x 2 cells that can never move again and has a box off its target."""
        beside = self._beside
        for vertical in (0, 1):
            for horizontal in (2, 3):
                above, aside = beside[box][vertical], beside[box][horizontal]
                # The diagonal cell is reached through either neighbour; if both are walls it does not matter.
                diagonal = beside[above][horizontal] if above != WALL else WALL
                if above == WALL and aside != WALL:
                    diagonal = beside[aside][vertical]
                corner = (above, aside, diagonal)
                if all(cell == WALL or boxes >> cell & 1 for cell in corner):
                    held = sum(1 << cell for cell in corner if cell != WALL) | 1 << box
                    if held & ~self._targets:
                        return True
        return False

    def _bound(self, boxes: int) -> int:
        known = self._bounds.get(boxes)
        if known is None:
            cells, rest = [], boxes
            while rest:
                cells.append((rest & -rest).bit_length() - 1)
                rest &= rest - 1
            known = self._bounds[boxes] = _assignment_cost(self._distances, tuple(cells))
        return known

    def _moves_to(self, node: Node) -> list[int]:
        moves: list[int] = []
        while node in self._came_from:
            node, stand, direction = self._came_from[node]
            moves = [*self._walk(node, stand), direction, *moves]
        return moves

    def _walk(self, node: Node, goal: int) -> list[int]:
        """A shortest walk of the player that pushes nothing."""
        start, boxes = node
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
