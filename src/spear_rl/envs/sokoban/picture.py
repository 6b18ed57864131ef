"""States as images for vision-language models, one tile per cell. Pillow is imported only when an image is drawn."""

import io
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from spear_rl.envs.sokoban.rules import Room, State
from spear_rl.errors import MissingExtraError

_FLOOR, _WALL, _MORTAR, _TARGET = (236, 232, 220), (110, 74, 58), (78, 50, 40), (206, 52, 52)
_BOX, _HOME, _EDGE, _PLAYER, _FACE = (222, 160, 58), (96, 170, 78), (92, 62, 26), (44, 98, 190), (250, 222, 190)


def require_pillow() -> None:
    if find_spec("PIL") is None:
        raise MissingExtraError("task.options.observation: pictures need Pillow: pip install 'spear-rl[vision]'")


@lru_cache(maxsize=4096)  # siblings visit the same states, and their trajectories then share one image
def png(room: Room, state: State, *, tile: int = 28) -> bytes:
    """The state as a PNG file with `tile` pixels per cell."""
    picture = _empty_room(room, tile).copy()
    for box in sorted(state.boxes):
        _paste(picture, room, box, _tile("home" if box in room.targets else "box", tile))
    player = "player_on_target" if state.player in room.targets else "player"
    _paste(picture, room, state.player, _tile(player, tile))
    file = io.BytesIO()
    picture.save(file, format="PNG", compress_level=6)
    return file.getvalue()


@lru_cache(maxsize=64)
def _empty_room(room: Room, tile: int) -> Any:
    from PIL import Image

    picture = Image.new("RGB", (room.width * tile, room.height * tile))
    for cell in range(room.width * room.height):
        kind = "wall" if cell in room.walls else "target" if cell in room.targets else "floor"
        _paste(picture, room, cell, _tile(kind, tile))
    return picture


def _paste(picture: Any, room: Room, cell: int, tile: Any) -> None:
    picture.paste(tile, (cell % room.width * tile.width, cell // room.width * tile.height))


@lru_cache(maxsize=64)
def _tile(kind: str, size: int) -> Any:
    from PIL import Image, ImageDraw

    tile = Image.new("RGB", (size, size), _WALL if kind == "wall" else _FLOOR)
    draw = ImageDraw.Draw(tile)

    def box(left: float, top: float, right: float, bottom: float) -> list[int]:
        """Corners in fractions of the tile."""
        return [int(left * size), int(top * size), int(right * size) - 1, int(bottom * size) - 1]

    if kind == "wall":
        thick = max(size // 12, 1)
        for row in range(3):
            draw.rectangle([0, row * size // 3, size - 1, row * size // 3 + thick - 1], fill=_MORTAR)
            x = size // 4 if row % 2 else 3 * size // 4
            draw.rectangle([x, row * size // 3, x + thick - 1, (row + 1) * size // 3], fill=_MORTAR)
    if kind in ("target", "player_on_target"):
        draw.ellipse(box(0.08, 0.08, 0.92, 0.92), fill=_TARGET)
        draw.ellipse(box(0.24, 0.24, 0.76, 0.76), fill=_FLOOR)
    if kind == "target":
        draw.ellipse(box(0.38, 0.38, 0.62, 0.62), fill=_TARGET)
    if kind in ("box", "home"):
        draw.rectangle(box(0.1, 0.1, 0.9, 0.9), fill=_EDGE)
        draw.rectangle(box(0.18, 0.18, 0.82, 0.82), fill=_BOX if kind == "box" else _HOME)
        draw.rectangle(box(0.18, 0.45, 0.82, 0.55), fill=_EDGE)
    if kind in ("player", "player_on_target"):
        draw.rectangle(box(0.3, 0.5, 0.7, 0.88), fill=_PLAYER)
        draw.ellipse(box(0.32, 0.14, 0.68, 0.5), fill=_FACE)
    return tile
