"""The environments' own views: what is drawn is what was the case, and text that is not understood draws nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.envs import ENVIRONMENTS, SCENES
from spear_rl.envs.household.plan import UNSEEN
from spear_rl.envs.shared.scenes import Board, Plan, Script, Seen, WebPage
from spear_rl.envs.sokoban.text import read_level
from spear_rl.envs.tool_math.calls import call_text, tool_response

NUMBERS = range(4)


def played(env, choose, most: int) -> list[tuple[Seen, object]]:
    """An episode as it is recorded, and something that `choose` notes of the environment at every turn."""
    observation, found = env.reset(), []
    for _ in range(most):
        action, note = choose(observation)
        if action is None:
            break
        result = env.step(action)
        found.append((Seen(observation.text, observation.state_key, action, result.action or ""), note))
        observation = result.observation
        if result.done:
            break
    found.append((Seen(observation.text), choose(observation)[1]))
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_the_plan_of_a_household_is_what_the_agent_has_seen_of_it(number):
    rng, env = random.Random(number), ENVIRONMENTS["household"]("train")[number].make_env()

    def choose(observation):
        world = env._episode
        inside = {
            world.game.receptacle_names[r]: sorted(world.game.object_names[o] for o in world.contents[r])
            for r in range(len(world.game.receptacle_names))
        }
        held = world.game.object_names[world.held] if world.held >= 0 else ""
        wanted = [c for c in observation.choices if c.startswith(("go", "open", "take", "move", "close", "clean"))]
        return rng.choice(wanted or list(observation.choices)), (inside, held)

    recorded = played(env, choose, 60)
    plans = SCENES["household"]([seen for seen, _ in recorded])
    assert len(plans) == len(recorded)
    for plan, (_, (inside, held)) in zip(plans, recorded, strict=True):
        assert isinstance(plan, Plan)
        assert {place.name for place in plan.places} == set(inside)
        assert plan.carried.partition(" (")[0] == held
        assert sum(place.is_here for place in plan.places) <= 1
        for place in plan.places:
            if place.things:
                assert sorted(thing.partition(" (")[0] for thing in place.things) == inside[place.name]
            if place.state == UNSEEN:
                assert not place.things
    assert any(place.things for place in plans[-1].places)


@pytest.mark.parametrize("recorded_keys", [True, False], ids=["parquet", "json lines"])
@pytest.mark.parametrize("number", NUMBERS)
def test_the_board_of_sokoban_is_the_room_after_every_move(number, recorded_keys):
    rng, env = random.Random(number), ENVIRONMENTS["sokoban"]("train")[number].make_env()
    recorded = played(env, lambda o: (rng.choice(o.choices), o.state_key), 20)
    seen = [turn if recorded_keys else turn._replace(state_key="", action="") for turn, _ in recorded]
    boards = SCENES["sokoban"](seen)
    for board, (_, grid) in zip(boards, recorded, strict=True):
        assert isinstance(board, Board)
        level = read_level(grid)
        flat = [cell for row in board.rows for cell in row]
        assert (len(board.rows[0]), len(board.rows)) == (level.room.width, level.room.height)
        assert {n for n, cell in enumerate(flat) if cell == "wall"} == level.room.walls
        assert {n for n, cell in enumerate(flat) if cell in ("box", "home")} == level.start.boxes
        assert [n for n, cell in enumerate(flat) if cell in ("player", "player_home")] == [level.start.player]
        assert {n for n, cell in enumerate(flat) if cell in ("target", "home", "player_home")} == level.room.targets


@pytest.mark.parametrize("view", ["text", "rich", "short"])
def test_a_page_of_the_shop_has_its_products_buttons_and_choices(view):
    task = ENVIRONMENTS["webshop"]("train", view=view)[0]
    actions = iter([*task.demonstrate(0)])
    recorded = played(task.make_env(), lambda o: (next(actions, None), o.choices), 15)
    pages = SCENES["webshop"]([seen for seen, _ in recorded])
    for page, (_, choices) in zip(pages, recorded, strict=True):
        assert isinstance(page, WebPage)
        products = {text.lower()[:10] for text, role in page.elements if role == "product"}
        assert products == {c[6:-1] for c in choices if c.startswith("click[b0")} or not choices  # the receipt
    if view != "short":
        assert any(role == "chosen" for page in pages for _, role in page.elements)
        assert all(any(role == "button" for _, role in page.elements) for page in pages[:-1])


def test_math_is_code_with_what_it_printed():
    turns = [
        Seen("What is 2 * 3?", text=f"Let me see. {call_text('print(2 * 3)')} and {call_text('x = 1')}"),
        Seen(tool_response("6", "(nothing)"), text="<tool_call>broken</tool_call>" + call_text("print(7)")),
        Seen(tool_response("Error", "7"), text=r"\boxed{6}"),
        Seen("Right."),
    ]
    assert SCENES["tool_math"](turns) == [
        Script((("print(2 * 3)", "6"), ("x = 1", "(nothing)"))),
        Script((("print(7)", "7"),)),
        None,
        None,
    ]


texts = st.one_of(
    st.text(max_size=200),
    st.sampled_from(
        ["#", "#@$.\n###", "((((", "('item', 'x', 1, 'B0', [('a',)])", "<tool_call>" * 99, "[button] [button_]"]
    ),
    st.sampled_from(["On the a 1, you see ", "You pick up the b 2 from the c 3.", "The x 1 is open. In it, you see ."]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(Seen, texts, texts, texts, texts), max_size=4))
def test_any_text_gives_a_scene_or_none_per_turn(turns):
    for made in SCENES.values():
        assert len(made(turns)) == len(turns)


@pytest.mark.parametrize("piece", ["(", "[", "#\n", " [SEP] B0AAAAAAAA", "<tool_call>{", "a 1, ", "```python\n", "\n"])
def test_a_megabyte_of_text_takes_no_time(piece):
    text = "Looking quickly around you, you see " + piece * (1_000_000 // len(piece))
    for made in SCENES.values():
        made([Seen(text, piece * 500_000, text, text), Seen(text)])
