"""Sokoban: levels generated from seeds, or Boxoban's; observed as text, as an image, or as both."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any

from spear_rl.envs.shared.generated_panels import SPLITS
from spear_rl.envs.sokoban.boxoban import SETS, boxoban_entries, boxoban_level
from spear_rl.envs.sokoban.env import Parse, SokobanEnv, Symbols, View
from spear_rl.envs.sokoban.experts import DEMONSTRATORS
from spear_rl.envs.sokoban.generator import LEVELS, PUBLISHED, Shape, generated_level
from spear_rl.envs.sokoban.panel import panel_seeds
from spear_rl.envs.sokoban.picture import png, require_pillow
from spear_rl.envs.sokoban.rules import Level
from spear_rl.envs.sokoban.text import LEGEND, PUBLISHED_LEGEND
from spear_rl.errors import OptionError
from spear_rl.rollout.env import Task
from spear_rl.settings.ranges import FilePath, OneOf, Range, has_checked_options

__all__ = ["DEMONSTRATORS", "LEVELS", "OBSERVATIONS", "PROMPTS", "SETS", "SPLITS", "SokobanEnv", "tasks"]

OBSERVATIONS = ("text", "image", "both")
GRIDS: tuple[View, ...] = ("spaced", "compact", "words")

_GAME = (
    "You play Sokoban: push every box onto a target. You walk up, down, left or right, and push a box by walking into "
    "it; boxes cannot be pulled, nor pushed into a wall or another box. "
)
_SYMBOLS = "In the room shown, the symbols mean: {}. "
_COLOURS = (
    "In the picture, brown bricks are walls, red rings are targets, yellow boxes still have to be moved, "
    "green ones are on a target, and the blue figure is you. "
)
PROMPTS = {
    "paper": (
        "First reason step by step about the room within <think> </think>. "
        "Then give exactly one move (up, down, left or right) within <action> </action>."
    ),
    "short": "Answer <action>up</action>, <action>down</action>, <action>left</action> or <action>right</action>.",
}
"""How the policy is asked to answer: with thoughts, or in one sentence without, for small models."""
_SEVERAL = " You can give up to {} moves at once, separated by ||, as in <action>right || up</action>."


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    level: Annotated[str, OneOf(LEVELS, "level")] = "easy",
    width: Annotated[int, Range(0, 40, unit="cells")] = 0,
    height: Annotated[int, Range(0, 40, unit="cells")] = 0,
    num_boxes: Annotated[int, Range(0, 12)] = 0,
    min_pushes: Annotated[int, Range(0, 100)] = 0,
    max_pushes: Annotated[int, Range(0, 100)] = 0,
    rooms: Annotated[str, OneOf(("ours", "published"), "rooms")] = "ours",
    boxoban: Annotated[str, OneOf(("", *SETS), "boxoban set")] = "",
    data: Annotated[str, FilePath(may_be_empty=True)] = "",
    observation: Annotated[str, OneOf(OBSERVATIONS, "observation")] = "text",
    grid: Annotated[View, OneOf(GRIDS, "grid")] = "spaced",
    symbols: Annotated[Symbols, OneOf(("ours", "published"), "symbols")] = "ours",
    tile: Annotated[int, Range(1, 256, unit="pixels")] = 28,
    parse: Annotated[Parse, OneOf(("strict", "substring"), "parse")] = "strict",
    moves_per_turn: Annotated[int, Range(1, 100, unit="moves")] = 1,
    prompt: Annotated[str, OneOf(PROMPTS, "prompt")] = "paper",
    expert: Annotated[str, OneOf(DEMONSTRATORS, "expert")] = "optimal",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
) -> Sequence[Task]:
    """The panel of a split, in a fixed order: of a `level`, whose size, boxes and pushes can be changed, or of a set of
    Boxoban's levels."""
    if observation != "text":
        require_pillow()
        if not 4 <= tile <= 256:
            raise OptionError(f"tile must be 4 to 256 pixels, not {tile}")
    if boxoban:
        named = [
            (entry.id, boxoban, partial(boxoban_level, entry.path, entry.number))
            for entry in boxoban_entries(boxoban, split, data=data, max_levels=max_tasks)
        ]
    else:
        shape = _shape(level, width, height, num_boxes, min_pushes, max_pushes)
        kind, is_ours = level, rooms == "ours"
        if not is_ours:
            shape, kind = _published(shape, min_pushes or max_pushes), "published"
        if shape not in (LEVELS[level], PUBLISHED):
            kind += f"-{shape.width}x{shape.height}-{shape.num_boxes}"
            kind += f"-{min(shape.pushes)}to{max(shape.pushes)}" if is_ours else ""
        named = [
            (
                f"sokoban/{kind}/{split}/{number:05d}",
                f"{shape.pushes[seed % len(shape.pushes)]:02d}_pushes" if is_ours else "published",
                partial(_generated, shape, seed),
            )
            for number, seed in enumerate(panel_seeds(shape, split)[:max_tasks])
        ]
    legend = PUBLISHED_LEGEND if symbols == "published" else LEGEND
    seen = "" if observation == "image" or grid == "words" else _SYMBOLS.format(legend)
    seen += "" if observation == "text" else _COLOURS
    asked = PROMPTS[prompt]
    if moves_per_turn > 1:
        asked = asked.replace("exactly one move", "your move") + _SEVERAL.format(moves_per_turn)
    return tuple(
        Task(
            id=name,
            make_env=partial(
                _env, make_level, observation, grid, tile, symbols=symbols, parse=parse, moves_per_turn=moves_per_turn
            ),
            family=family,
            instructions=_GAME + seen + asked,
            answer_format="<action>{action}</action>",
            demonstrate=partial(_demonstration, make_level, expert),
        )
        for name, family, make_level in named[:max_tasks]
    )


def _shape(level: str, width: int, height: int, num_boxes: int, min_pushes: int, max_pushes: int) -> Shape:
    """The shape of a level, with the values that are not 0 replaced."""
    known = LEVELS[level]
    pushes = known.pushes
    if min_pushes or max_pushes:
        low = min_pushes or min(min(pushes), max_pushes)
        pushes = tuple(range(low, (max_pushes or max(max(pushes), low)) + 1))
    width, height = width or known.width, height or width or known.height
    return Shape(width, height, num_boxes or known.num_boxes, pushes, known.floor)


def _published(shape: Shape, pushes: int) -> Shape:
    """The same size and number of boxes, for the published generator."""
    if pushes:
        raise OptionError("rooms: published rooms are taken as they come: leave out min_pushes and max_pushes")
    return replace(PUBLISHED, width=shape.width, height=shape.height, num_boxes=shape.num_boxes)


def _env(make_level: partial[Level], observation: str, grid: View, tile: int, **options: Any) -> SokobanEnv:
    picture = None if observation == "text" else partial(png, tile=tile)
    return SokobanEnv(make_level(), view="none" if observation == "image" else grid, picture=picture, **options)


def _demonstration(make_level: partial[Level], expert: str, seed: int) -> list[str]:
    return DEMONSTRATORS[expert](make_level(), seed)


@lru_cache(maxsize=4096)
def _generated(shape: Shape, seed: int) -> Level:
    return generated_level(shape, seed)
