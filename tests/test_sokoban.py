"""Sokoban: rules against a naive second implementation, solver, generator, panels, episodes and pictures."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references_sokoban import naive_move, naive_reward, naive_solved
from spear_rl.envs import ENVIRONMENTS, sokoban
from spear_rl.envs.shared import generated_panels
from spear_rl.envs.shared.generated_panels import SPLITS, content_split, panel_hash, recorded_manifest
from spear_rl.envs.sokoban import boxoban, picture
from spear_rl.envs.sokoban.experts import Expert, clumsy_moves, hasty_moves, optimal_moves, quick_moves
from spear_rl.envs.sokoban.generator import LEVELS, Shape, generated_level
from spear_rl.envs.sokoban.panel import MANIFEST, panel_seeds, rebuilt_manifest
from spear_rl.envs.sokoban.rules import DIRECTIONS, Level, Room, State, is_solved, moved
from spear_rl.envs.sokoban.solver import SearchLimitError, pushes_needed, solution
from spear_rl.envs.sokoban.text import Drawing, content_hash, described, grid_text, read_level
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.testing import check_environment, check_tasks

CORRIDOR = "######\n#@-$.#\n######"


def played(room: Room, state: State, directions: Iterable[int]) -> State:
    """The state after some moves."""
    for direction in directions:
        state, _ = moved(room, state, direction)
    return state


@st.composite
def rooms(draw: st.DrawFn) -> str:
    """Any grid at all: open edges, boxes on targets, players in corners; as many boxes as targets."""
    width, height = draw(st.integers(2, 7)), draw(st.integers(1, 6))
    cells = draw(st.lists(st.sampled_from("##----"), min_size=width * height, max_size=width * height))
    places = draw(st.permutations(range(width * height)))
    num_boxes = draw(st.integers(1, max(1, min(4, (width * height - 1) // 2))))
    boxes = set(places[:num_boxes])
    player = places[num_boxes]
    targets = set(draw(st.permutations(range(width * height)))[:num_boxes])
    for cell in boxes | targets | {player}:
        cells[cell] = "-"
    for cell in targets:
        cells[cell] = "."
    for cell in boxes:
        cells[cell] = "*" if cell in targets else "$"
    cells[player] = "+" if player in targets else "@"
    return "\n".join("".join(cells[row * width : (row + 1) * width]) for row in range(height))


@given(rooms())
def test_reading_a_level_and_drawing_it_gives_the_same_text(text: str) -> None:
    assert grid_text(read_level(text)) == text
    assert read_level(text.replace("-", " ")) == read_level(text.replace("-", "_")) == read_level(text)


@given(rooms(), st.lists(st.sampled_from(DIRECTIONS), max_size=40))
@settings(max_examples=300)
def test_every_move_in_any_room_is_that_of_the_naive_rules(text: str, directions: list[str]) -> None:
    level = read_level(text)
    env = sokoban.SokobanEnv(level)
    assert env.reset().state_key == text
    for direction in directions:
        after = naive_move(text, direction)
        result = env.step(direction)
        assert result.observation.state_key == after
        assert result.reward == pytest.approx(naive_reward(text, after), abs=1e-12)
        assert result.done == result.success == naive_solved(after)
        assert result.used_tool == (after != text)
        if result.done:
            break
        text = after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("#####\n#$-.#\n#####", "one player"),
        ("#####\n#@@$.#\n#####", "one player"),
        ("######\n#@$..#\n######", "as many boxes as targets"),
        ("######\n#@---#\n######", "as many boxes as targets"),
        ("######\n#@x$.#\n######", "'x'"),
        ("", "one player"),
    ],
)
def test_a_text_that_is_no_level_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_level(text)


def test_short_lines_end_in_floor_and_the_edge_is_a_wall() -> None:
    level = read_level("@$.\n#")
    assert (level.room.width, level.room.height) == (3, 2)
    assert solution(level) == [DIRECTIONS.index("right")]
    state, outcome = moved(level.room, level.start, DIRECTIONS.index("up"))
    assert (state, outcome) == (level.start, "wall")


def breadth_first_length(level: Level) -> int | None:
    """The fewest moves, by trying all of them."""
    queue, seen = deque([(level.start, 0)]), {level.start}
    while queue:
        state, length = queue.popleft()
        if is_solved(level.room, state):
            return length
        for direction in range(4):
            after, _ = moved(level.room, state, direction)
            if after not in seen:
                seen.add(after)
                queue.append((after, length + 1))
    return None


@given(rooms())
@settings(max_examples=300, deadline=None)
def test_the_solver_is_optimal_and_says_when_there_is_no_solution(text: str) -> None:
    level = read_level(text)
    if len(level.start.boxes) > 2:
        level = read_level(text.replace("$", "-", 1).replace(".", "-", 1)) if "$" in text and "." in text else level
    found = solution(level)
    assert (None if found is None else len(found)) == breadth_first_length(level)
    if found is not None:
        assert is_solved(level.room, played(level.room, level.start, found))
        num_pushes = sum(
            moved(level.room, played(level.room, level.start, found[:n]), d)[1] == "pushed" for n, d in enumerate(found)
        )
        assert pushes_needed(level.room, level.start.boxes) <= num_pushes
        hurried = solution(level, weight=5.0)
        assert hurried is not None
        assert is_solved(level.room, played(level.room, level.start, hurried))
        assert len(hurried) <= 5 * max(len(found), 1)


def test_a_search_that_grows_too_large_says_so() -> None:
    with pytest.raises(SearchLimitError, match="3 states"):
        solution(generated_level(LEVELS["hard"], 0), max_states=3)


def solved_by(level: Level, moves: list[str]) -> bool:
    return is_solved(level.room, played(level.room, level.start, map(DIRECTIONS.index, moves)))


@pytest.mark.parametrize("name", LEVELS)
def test_generated_levels_have_their_shape_and_need_their_pushes(name: str) -> None:
    shape = LEVELS[name]
    for seed in range(12):
        level = generated_level(shape, seed)
        room, start = level
        assert (room.width, room.height, len(start.boxes)) == (shape.width, shape.height, shape.num_boxes)
        edge = [c for c in range(room.width * room.height) if c % room.width in (0, room.width - 1)]
        edge += [*range(room.width), *range(room.width * (room.height - 1), room.width * room.height)]
        assert room.walls.issuperset(edge)
        assert pushes_needed(room, start.boxes) == shape.pushes[seed % len(shape.pushes)]
        assert not is_solved(room, start)
        assert solved_by(level, quick_moves(level))
        assert read_level(grid_text(level)) == level


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("starter", 2400), ("easy", 2400), ("medium", 500), ("hard", 120)])
def test_all_generated_levels_are_solvable(name: str, count: int) -> None:
    for split in SPLITS:
        seeds = panel_seeds(LEVELS[name], split)
        for seed in seeds[: count * len(seeds) // sum(SPLITS.values())]:
            level = generated_level(LEVELS[name], seed)
            assert solved_by(level, quick_moves(level)), f"{name}/{seed} is not solved:\n{grid_text(level)}"


@given(
    width=st.integers(6, 9),
    height=st.integers(6, 9),
    num_boxes=st.integers(1, 2),
    pushes=st.integers(1, 3),
    seed=st.integers(0, 10**9),
)
@settings(max_examples=40, deadline=None)
def test_rooms_of_any_size_can_be_generated(width: int, height: int, num_boxes: int, pushes: int, seed: int) -> None:
    shape = Shape(width, height, num_boxes, (pushes,))
    level = generated_level(shape, seed)
    assert (level.room.width, level.room.height) == (width, height)
    assert pushes_needed(level.room, level.start.boxes) == pushes
    assert solved_by(level, quick_moves(level))
    assert level == generated_level(shape, seed)


def test_a_seed_gives_the_same_level_in_another_process_whatever_its_hash_seed() -> None:
    code = (
        "from spear_rl.envs.sokoban.generator import *; from spear_rl.envs.sokoban.text import grid_text\n"
        "from spear_rl.envs.sokoban.experts import *\n"
        "levels = [generated_level(LEVELS[n], s) for n in ('easy', 'medium') for s in range(20)]\n"
        "print([(grid_text(l), optimal_moves(l), hasty_moves(l, 3)) for l in levels])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    levels = [generated_level(LEVELS[n], s) for n in ("easy", "medium") for s in range(20)]
    assert outputs.pop().strip() == str([(grid_text(x), optimal_moves(x), hasty_moves(x, 3)) for x in levels])


def test_no_level_is_in_two_splits_not_even_turned_or_mirrored() -> None:
    for name in ("starter", "easy"):
        keys = {
            split: [task.make_env().reset().state_key for task in sokoban.tasks(split, level=name)] for split in SPLITS
        }
        assert [len(keys[split]) for split in SPLITS] == list(SPLITS.values())
        contents = [content_hash(key) for split in SPLITS for key in keys[split]]
        assert len(set(contents)) == len(contents) == sum(SPLITS.values())
        for split in SPLITS:
            assert panel_hash(keys[split], "\n\n") == recorded_manifest(MANIFEST)[name]["sha256"][split]


@pytest.mark.slow
def test_the_recorded_panels_are_what_the_generator_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from spear_rl.envs.sokoban import panel

    recorded = recorded_manifest(MANIFEST)
    with monkeypatch.context() as patch:
        patch.setattr(panel, "LEVELS", {"starter": LEVELS["starter"]})
        assert rebuilt_manifest() == {"starter": recorded["starter"]}
    for name in ("easy", "medium", "hard"):  # all of them would take minutes: their first levels, and where they go
        for split in SPLITS:
            seeds = panel_seeds(LEVELS[name], split)
            texts = [grid_text(generated_level(LEVELS[name], seed)) for seed in seeds[:25]]
            assert {content_split(content_hash(text)) for text in texts} == {split}


def test_the_splits_of_a_shape_of_one_s_own_are_disjoint_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from spear_rl.envs.sokoban import panel

    monkeypatch.setattr(generated_panels, "SPLITS", {"train": 60, "validation": 12, "test": 12})
    panel._assigned_seeds.cache_clear()
    options = {"width": 5, "height": 7, "min_pushes": 2, "max_pushes": 3}
    found = {split: sokoban.tasks(split, **options) for split in SPLITS}
    panel._assigned_seeds.cache_clear()
    assert [len(found[split]) for split in SPLITS] == [60, 12, 12]
    contents = [content_hash(task.make_env().reset().state_key) for tasks in found.values() for task in tasks]
    assert len(set(contents)) == 84
    assert {task.family for task in found["train"]} == {"02_pushes", "03_pushes"}
    assert found["test"][0].id == "sokoban/easy-5x7-1-2to3/test/00000"


@given(rooms())
def test_turning_and_mirroring_change_no_content(text: str) -> None:
    rows = text.split("\n")
    mirrored, upside_down = [row[::-1] for row in rows], rows[::-1]
    diagonal = ["".join(column) for column in zip(*rows, strict=True)]
    assert {content_hash("\n".join(r)) for r in (rows, mirrored, upside_down, diagonal)} == {content_hash(text)}


@pytest.mark.parametrize("options", [{}, {"level": "medium"}, {"observation": "both", "tile": 8}, {"grid": "words"}])
def test_it_is_an_environment_like_any_other(options: dict[str, object]) -> None:
    if "observation" in options:
        pytest.importorskip("PIL")
    assert check_tasks(ENVIRONMENTS["sokoban"], options=options, num_tasks=3) == []
    task = sokoban.tasks("test", max_tasks=1, **options)[0]  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(task)).make_env().reset() == task.make_env().reset()


def test_demonstrations_of_every_expert_fit_the_environment() -> None:
    for expert in sokoban.DEMONSTRATORS:
        assert check_environment(sokoban.tasks("train", level="medium", expert=expert, max_tasks=4)) == []


@pytest.mark.parametrize(("expert", "at_least"), [(hasty_moves, 0.9), (clumsy_moves, 0.8)])
def test_experts_who_err_still_mostly_solve(expert: Expert, at_least: float) -> None:
    levels = [generated_level(LEVELS["easy"], seed) for seed in range(200)]
    episodes = [expert(level, seed) for seed, level in enumerate(levels)]
    solved = [solved_by(level, moves) for level, moves in zip(levels, episodes, strict=True)]
    assert at_least < sum(solved) / len(solved) < 1
    longer = [
        len(moves) - len(optimal_moves(level))
        for level, moves, is_won in zip(levels, episodes, solved, strict=True)
        if is_won
    ]
    assert min(longer) >= 0
    assert sum(longer) > 0


def test_an_episode_pays_and_tells_what_happens() -> None:
    env = sokoban.SokobanEnv(read_level("#######\n#@-$--#\n#--.-.#\n#----*#\n#######".replace(".-.", ".--")))
    first = env.reset()
    assert first.text.split("\n")[1] == "# @ - $ - - #"
    assert first.choices == DIRECTIONS
    said = [
        ("<think>hm</think><action>Right</action>", "You walk right.", -0.1, ""),
        ("up", "A wall is in the way: nothing moves.", -0.1, ""),
        ("<action>push it</action>", "That is no move: nothing moves.", -0.1, "inadmissible"),
        ("<action>right", "That is no move: nothing moves.", -0.1, "unclosed_tag"),
        ("I would\nrather not", "That is no move: nothing moves.", -0.1, "no_action"),
    ]
    for text, told, reward, invalid in said:
        result = env.step(text)
        assert result.observation.text.startswith(told)
        assert (result.reward, result.invalid, result.done) == (reward, invalid, False)
    keys = {env.step("up").observation.state_key for _ in range(3)}
    assert len(keys) == 1


def test_a_box_pays_on_its_target_costs_when_it_leaves_and_the_last_one_ends_it() -> None:
    env = sokoban.SokobanEnv(read_level("########\n#@$.---#\n#-$--.-#\n########"))
    env.reset()
    rewards = [env.step(d).reward for d in ("right", "right")]
    assert rewards == pytest.approx([0.9, -1.1])
    env = sokoban.SokobanEnv(read_level(CORRIDOR))
    env.reset()
    env.step("right")
    last = env.step("right")
    assert (last.reward, last.done, last.success) == (pytest.approx(10.9), True, True)
    assert "Solved!" in last.observation.text
    with pytest.raises(RuntimeError, match="reset"):
        env.step("left")
    stuck = sokoban.SokobanEnv(read_level("#####\n#@$##\n#-.-#\n#####"))
    stuck.reset()
    assert "cannot move right" in stuck.step("right").observation.text


def test_turns_that_say_nothing_readable_cost_as_much_as_a_step() -> None:
    env = sokoban.tasks("train", max_tasks=1)[0].make_env()
    env.reset()
    assert {env.step(text).reward for text in ("", "jump", "<action></action>", "x" * 10_000)} == {-0.1}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"split": "dev"}, "dev"),
        ({"level": "huge"}, "huge"),
        ({"observation": "sound"}, "sound"),
        ({"grid": "hex"}, "hex"),
        ({"prompt": "long"}, "long"),
        ({"expert": "me"}, "me"),
        ({"boxoban": "easy"}, "easy"),
        ({"width": 2}, "3 to 40"),
        ({"num_boxes": 9}, "do not fit"),
        ({"min_pushes": 5, "max_pushes": 3}, "at most max_pushes"),
        ({"observation": "image", "tile": 1}, "4 to 256"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        sokoban.tasks(**options)  # type: ignore[arg-type]


def test_a_shape_that_cannot_be_is_given_up() -> None:
    with pytest.raises(ValueError, match="lower max_pushes"):
        generated_level(Shape(4, 4, 1, (30,), floor=(1.0, 1.0)), 0)


def test_a_room_can_be_told_in_a_few_words() -> None:
    env = sokoban.SokobanEnv(read_level("######\n##---#\n#-$-.#\n#---@#\n######"), view="words")
    seen = env.reset().text
    assert seen == "walls_down_right box_up1_left2 target_up0_right2 beside_none corners_upleft"
    assert env.step("right").observation.text == seen
    assert env.step("nowhere").observation.text == seen
    after = env.step("up").observation.text
    assert after == "walls_right box_up0_left2 target_up0_right2 beside_none corners_upleft"


@given(rooms(), st.lists(st.sampled_from(DIRECTIONS), max_size=10))
def test_words_say_where_everything_is_and_what_is_in_the_way(text: str, directions: list[str]) -> None:
    level = read_level(text)
    room = level.room
    state = played(room, level.start, map(DIRECTIONS.index, directions))
    cells = dict(enumerate(Drawing(room).text(state).replace("\n", "")))

    def symbol(cell: int, right: int, down: int) -> str:
        x, y = cell % room.width + right, cell // room.width + down
        return cells[y * room.width + x] if 0 <= x < room.width and 0 <= y < room.height else "#"

    def offset(word: str) -> tuple[int, int]:
        _, rows, columns = word.split("_")
        down, right = int(rows.strip("updown")), int(columns.strip("leftrigh"))
        return (right if columns.startswith("right") else -right), (down if rows.startswith("down") else -down)

    walls, *facts = described(room, state).split(" ")
    sides = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
    corners = {"upleft": (-1, -1), "upright": (1, -1), "downleft": (-1, 1), "downright": (1, 1)}
    shut = {name for name, by in sides.items() if symbol(state.player, *by) == "#"}
    assert set(walls.split("_")[1:]) == (shut or {"none"})
    assert len(facts) == 4 * len(state.boxes)
    found = set()
    for box, target, beside, at_corners in zip(*(facts[n::4] for n in range(4)), strict=True):
        right, down = offset(box)
        cell = state.player + right + down * room.width
        found.add(cell)
        assert symbol(state.player, right, down) in "$*"
        right, down = offset(target)
        assert symbol(cell, right, down) in ".*+"
        column, row = cell % room.width, cell // room.width
        assert abs(right) + abs(down) == min(
            abs(other % room.width - column) + abs(other // room.width - row) for other in room.targets
        )
        for word, places in ((beside, sides), (at_corners, corners)):
            expected = {name for name, by in places.items() if symbol(cell, *by) in "#$*"}
            assert set(word.split("_")[1:]) == (expected or {"none"})
    assert found == state.boxes


def test_instructions_explain_what_is_shown() -> None:
    shown = {name: sokoban.tasks("train", observation=name, max_tasks=1)[0].instructions for name in ("text", "image")}
    assert "# wall" in shown["text"]
    assert "picture" in shown["image"]
    assert "# wall" not in shown["image"]
    assert "# wall" not in sokoban.tasks("train", grid="words", max_tasks=1)[0].instructions
    assert "<think>" in shown["text"]
    assert "<think>" not in sokoban.tasks("train", prompt="short", max_tasks=1)[0].instructions


# Pictures


def test_a_picture_shows_every_cell_where_it_is_and_is_always_the_same() -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    level = read_level("#####\n#@$-#\n#*.-#\n#####")
    on_target = Level(level.room, State(level.start.player, frozenset(level.room.targets)))
    for tile in (8, 28):
        drawn = image.open(io.BytesIO(picture.png(*level, tile=tile)))
        assert drawn.size == (5 * tile, 4 * tile)
        cells = {}
        text = grid_text(level).replace("\n", "")
        for cell, symbol in enumerate(text):
            x, y = cell % 5 * tile, cell // 5 * tile
            cells.setdefault(symbol, set()).add(drawn.crop((x, y, x + tile, y + tile)).tobytes())
        assert all(len(tiles) == 1 for tiles in cells.values())
        assert len({min(tiles) for tiles in cells.values()}) == len(cells) == 6
        assert picture.png(*level, tile=tile) == picture.png(*level, tile=tile)
        assert picture.png(*on_target, tile=tile) != picture.png(*level, tile=tile)


def test_observations_hold_text_a_picture_or_both() -> None:
    pytest.importorskip("PIL")
    seen = {
        name: sokoban.tasks("train", observation=name, max_tasks=1)[0].make_env().reset()
        for name in sokoban.OBSERVATIONS
    }
    assert not seen["text"].images
    assert seen["both"].text == seen["text"].text
    assert seen["both"].images == seen["image"].images
    assert seen["image"].images[0].startswith(b"\x89PNG")
    assert "#" not in seen["image"].text
    assert len({observation.state_key for observation in seen.values()}) == 1
    assert len(seen["image"].images[0]) < 4000


def test_without_pillow_pictures_are_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert sokoban.tasks("train", max_tasks=1)
    with pytest.raises(MissingExtraError, match=r"spear-rl\[vision\]"):
        sokoban.tasks("train", observation="image")


# Boxoban's files


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of Boxoban's form with levels of our own; the test set shares one level with validation."""
    texts = [grid_text(generated_level(LEVELS["easy"], seed)).replace("-", " ") for seed in range(90)]
    for folder, numbers in {
        "unfiltered/train": range(20),
        "unfiltered/valid": range(20, 30),
        "unfiltered/test": range(29, 33),
        "medium/train": range(10),
        "medium/valid": range(10, 40),
        "hard": range(90),
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        half = len(numbers) // 2
        for name, part in (("001", numbers[half:]), ("000", numbers[:half])):
            body = "\n\n".join(f"; {n}\n{texts[seed]}" for n, seed in enumerate(part))
            (tmp_path / folder / f"{name}.txt").write_text(body + "\n")
    monkeypatch.setenv("BOXOBAN_DATA", str(tmp_path))
    return tmp_path


def test_boxoban_s_sets_have_three_splits_without_a_common_level(data: Path) -> None:
    for name, sizes in {"unfiltered": [20, 9, 4], "medium": None, "hard": None}.items():
        panels = {split: sokoban.tasks(split, boxoban=name) for split in SPLITS}
        keys = [task.make_env().reset().state_key for panel in panels.values() for task in panel]
        ids = [task.id for panel in panels.values() for task in panel]
        assert len(set(keys)) == len(keys)
        assert len(set(ids)) == len(ids)
        assert all([task.id for task in panel] == sorted(task.id for task in panel) for panel in panels.values())
        if sizes:
            assert [len(panel) for panel in panels.values()] == sizes
        else:
            assert all(panels.values())
    assert sokoban.tasks("test", boxoban="unfiltered")[0].id == "boxoban/unfiltered/test/000/000"
    assert len(sokoban.tasks("train", boxoban="unfiltered", max_tasks=7)) == 7


def test_boxoban_s_levels_are_played_like_all_others(data: Path) -> None:
    tasks = sokoban.tasks("test", boxoban="unfiltered", data=str(data))
    assert check_environment(tasks) == []
    assert {task.family for task in tasks} == {"unfiltered"}


def test_missing_and_damaged_files_are_explained(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data / "hard" / "000.txt").write_text("; 0\n####\n#@.#\n####\n\n; 1\n######\n#@-$.#\n######\n")
    (data / "hard" / "001.txt").unlink()
    with pytest.raises(ConfigError, match="level 0 cannot be read"):
        boxoban.boxoban_level(str(data / "hard" / "000.txt"), 0)
    with pytest.raises(ConfigError, match="no folder"):
        sokoban.tasks("train", boxoban="hard", data=str(data / "nowhere"))
    (data / "hard" / "000.txt").unlink()
    with pytest.raises(ConfigError, match="no level files"):
        sokoban.tasks("train", boxoban="hard")
    monkeypatch.delenv("BOXOBAN_DATA")
    with pytest.raises(ConfigError, match="BOXOBAN_DATA"):
        sokoban.tasks("train", boxoban="hard")


# The reference replay


def replayed(level: Level, moves: list[str]) -> None:
    """Our rules and the naive ones, side by side, at every step."""
    drawing, state, text = Drawing(level.room), level.start, grid_text(level)
    for number, move in enumerate(moves):
        state, _ = moved(level.room, state, DIRECTIONS.index(move))
        text = naive_move(text, move)
        assert drawing.text(state) == text, f"move {number} of {moves} in\n{grid_text(level)}"
        assert is_solved(level.room, state) == naive_solved(text)


def wandering(seed: object, length: int = 60) -> list[str]:
    rng = random.Random(str(seed))
    return [rng.choice(DIRECTIONS) for _ in range(length)]


@pytest.mark.parametrize(("name", "count"), [("easy", 200), ("medium", 100), ("hard", 15)])
def test_generated_levels_replay_as_by_the_naive_rules(name: str, count: int) -> None:
    for seed in range(count):
        level = generated_level(LEVELS[name], seed)
        plan = quick_moves(level)
        replayed(level, plan)
        assert naive_solved(after_naive(grid_text(level), plan))
        replayed(level, wandering(seed))


def after_naive(text: str, moves: list[str]) -> str:
    for move in moves:
        text = naive_move(text, move)
    return text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("unfiltered", 400), ("medium", 60), ("hard", 0)])
def test_real_boxoban_levels_replay_as_by_the_naive_rules(name: str, count: int) -> None:
    """With the published files in $BOXOBAN_DATA."""
    import os

    if not os.environ.get("BOXOBAN_DATA"):
        pytest.skip("set BOXOBAN_DATA to the folder of boxoban-levels")
    for split in SPLITS:
        for number, task in enumerate(sokoban.tasks(split, boxoban=name, max_tasks=200)):
            level = read_level(task.make_env().reset().state_key)
            replayed(level, wandering(task.id))
            if number < count // 3:
                plan = quick_moves(level)
                replayed(level, plan)
                assert naive_solved(after_naive(grid_text(level), plan))


@pytest.mark.slow
def test_the_splits_of_the_real_unfiltered_levels_are_disjoint() -> None:
    """The published validation and test sets have one level in common; ours do not."""
    import os

    if not os.environ.get("BOXOBAN_DATA"):
        pytest.skip("set BOXOBAN_DATA to the folder of boxoban-levels")
    found = {
        split: {
            hashlib.sha256(boxoban._levels_in(entry.path)[entry.number].encode()).digest()
            for entry in boxoban.boxoban_entries("unfiltered", split, max_levels=100_000)
        }
        for split in SPLITS
    }
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["test"]
    assert not found["validation"] & found["test"]


def test_a_level_does_not_change_under_play() -> None:
    level = generated_level(LEVELS["easy"], 7)
    before = grid_text(level)
    env = sokoban.SokobanEnv(level)
    env.reset()
    for move in wandering(7, 15):
        if env.step(move).done:
            break
    assert grid_text(level) == before
    assert replace(level.room, walls=level.room.walls) == level.room


# Training


@pytest.mark.slow
def test_the_tiny_preset_learns_from_its_teacher_to_solve_rooms_it_has_not_seen(spear, tmp_path: Path) -> None:
    code, text = spear(
        "train", "sokoban-tiny", f"run.dir={tmp_path / 'run'}", "task.options.expert=optimal", "sft.episodes=1000",
        "run.steps=2", "rollout.num_tasks=4", "eval.tasks=100",
    )  # fmt: skip
    assert code == 0, text
    before, after = (json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines())
    assert (before["step"], after["step"]) == (0, 2)
    assert min(before["low"], after["low"]) > 0.2  # random moves solve one room in twelve
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/episodes"] for row in rows] == [32.0, 32.0]
    assert rows[-1]["replay/trajectories"] > 0
