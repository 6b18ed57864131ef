"""HGPO, GraphGPO and G2PO against plain loops over all pairs of turns, and what they promise."""

from __future__ import annotations

import dataclasses
import random
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import references
import references_step_credit as plain
from references_step_credit import walk
from spear_rl.algorithms import G2PO, HGPO, GiGPO, GraphGPO, dr_bot, g2po, graphgpo, hgpo, spear
from spear_rl.functional import distances_to_success, nested_contexts
from spear_rl.functional.step_credit import FAILURE, SUCCESS, UNKNOWN
from spear_rl.types import Group, Stop

quick = settings(max_examples=60, deadline=None)
weights = st.sampled_from([0.0, 0.3, 1.0])
MAKERS = [hgpo, graphgpo, g2po]
RECORDS = [HGPO(), GraphGPO(), G2PO()]


def close(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-6, abs=2e-6) for row in rows]


# -- the formulas -------------------------------------------------------------------------------------------------


@quick
@given(plain.groups, st.integers(0, 4), st.sampled_from([0.0, 1.0, 2.5]), st.booleans(), weights, weights)
def test_hgpo_is_what_the_formula_says(groups, depth, power, divide, step_weight, episode_weight):
    record = HGPO(
        depth=depth,
        depth_power=power,
        discount=0.9,
        step_weight=step_weight,
        episode_weight=episode_weight,
        divide_by_std=divide,
    )
    steps = plain.hgpo_steps(groups, depth=depth, depth_power=power, discount=0.9, divide_by_std=divide)
    parts = {"step_weight": step_weight, "episode_weight": episode_weight, "divide_by_std": divide}
    assert record(groups) == close(plain.by_episode(groups, steps, **parts))


@quick
@given(plain.groups, st.sampled_from([0.1, 0.5, 0.0, 1.0]), st.booleans(), weights, weights)
def test_graphgpo_is_what_the_formula_says(groups, discount, divide, step_weight, episode_weight):
    parts = {"step_weight": step_weight, "episode_weight": episode_weight, "divide_by_std": divide}
    steps = plain.graphgpo_steps(groups, distance_discount=discount, divide_by_std=divide)
    assert GraphGPO(distance_discount=discount, **parts)(groups) == close(plain.by_episode(groups, steps, **parts))


@quick
@given(plain.groups, st.sampled_from([0.95, 0.5, 1.0]), st.booleans(), weights, weights)
def test_g2po_is_what_the_formula_says(groups, discount, divide, step_weight, episode_weight):
    parts = {"step_weight": step_weight, "episode_weight": episode_weight, "divide_by_std": divide}
    steps = plain.g2po_steps(groups, discount=discount, divide_by_std=divide)
    assert G2PO(discount=discount, **parts)(groups) == close(plain.by_episode(groups, steps, **parts))


@quick
@given(plain.groups)
def test_they_have_the_papers_settings_by_default(groups):
    steps = plain.hgpo_steps(groups, depth=2, depth_power=1.0, discount=0.95, divide_by_std=True)
    expected = plain.by_episode(groups, steps, step_weight=1.0, episode_weight=1.0, divide_by_std=True)
    assert hgpo().advantages(groups) == close(expected)
    steps = plain.graphgpo_steps(groups, distance_discount=0.1, divide_by_std=True)
    expected = plain.by_episode(groups, steps, step_weight=1.0, episode_weight=1.0, divide_by_std=True)
    assert graphgpo().advantages(groups) == close(expected)
    steps = plain.g2po_steps(groups, discount=0.95, divide_by_std=False)
    expected = plain.by_episode(groups, steps, step_weight=1.0, episode_weight=1.0, divide_by_std=False)
    assert dr_bot(g2po()).advantages(groups) == close(expected)


# -- HGPO ---------------------------------------------------------------------------------------------------------


@quick
@given(plain.groups, st.booleans(), weights, weights, st.sampled_from([0.0, 1.0, 3.0]))
def test_hgpo_without_past_states_is_gigpo_bit_for_bit(groups, divide, step_weight, episode_weight, power):
    parts = {"step_weight": step_weight, "episode_weight": episode_weight, "divide_by_std": divide}
    assert HGPO(depth=0, depth_power=power, **parts)(groups) == GiGPO(**parts)(groups)


@quick
@given(st.lists(st.lists(st.integers(-3, 3), max_size=7), max_size=5), st.integers(0, 4))
def test_a_deeper_context_splits_groups_and_never_joins_them(paths, depth):
    states = torch.tensor([s for path in paths for s in path], dtype=torch.long)
    owners = torch.tensor([n for n, path in enumerate(paths) for _ in path], dtype=torch.long)
    levels = [level.tolist() for level in nested_contexts(states, owners, depth=depth)]
    assert len(levels) == depth + 1
    for shallow, deep in pairwise(levels):
        assert len(set(zip(deep, shallow, strict=True))) == len(set(deep))


def test_hgpo_on_numbers_worked_out_by_hand():
    """Three come to c, two of them through b: all three are compared at depth 0, those two once more at depth 1."""
    group = references.group(walk("bc", won=True), walk("bc"), walk("ac"))
    rows = HGPO(depth=1, discount=1.0, episode_weight=0.0, divide_by_std=False)([group])
    first, second, third = (row[-1] for row in rows)
    assert first == pytest.approx((1 * 2 / 3 + 2 * 1 / 2) / 3)
    assert second == pytest.approx((1 * -1 / 3 + 2 * -1 / 2) / 3)
    assert third == pytest.approx(-1 / 3), "alone at depth 1, so depth 0 has the whole weight"


def test_a_depth_at_which_a_turn_is_alone_or_its_group_flat_takes_no_weight():
    group = references.group(walk("xab", won=True), walk("yab"), walk("zab"))
    shallow, deep = HGPO(depth=1)([group]), HGPO(depth=50)([group])
    assert shallow == deep
    assert shallow[0][2] > 0


# -- graphs -------------------------------------------------------------------------------------------------------


def steps_of(*episodes, **settings) -> list[list[float]]:
    return GraphGPO(episode_weight=0.0, divide_by_std=False, **settings)([references.group(*episodes)])


def test_graphgpo_on_numbers_worked_out_by_hand():
    """From b one wins and one loses. Going a -> b is progress in the lost episode too; a -> c leads nowhere."""
    rows = steps_of(walk("ab", won=True, reward=10.0), walk("ab"), walk("ac"), distance_discount=0.5)
    ahead, astray = 10.0, 10.0 * 0.5 ** (3 - 2 + 1)  # c has no path: one turn farther than a, which is 2 away
    mean = (2 * ahead + astray) / 3
    won, lost = 10.0, 10.0 * 0.5 ** (3 - 1 + 1)
    assert rows[0] == pytest.approx([ahead - mean, (won - lost) / 2])
    assert rows[1] == pytest.approx([ahead - mean, (lost - won) / 2])
    assert rows[2] == pytest.approx([astray - mean, 0.0])


def test_a_good_turn_of_a_lost_episode_gains_and_a_detour_of_a_win_loses():
    for make in (graphgpo, g2po):
        record = dataclasses.replace(make().advantages, episode_weight=0.0)
        rows = record([references.group(walk("ab", won=True), walk("abx"), walk("ay"), walk("ay"))])
        assert rows[1][0] > 0 > rows[2][0]
    detour = steps_of(walk("aab", won=True), walk("ab", won=True))
    assert detour[0][0] < 0 < detour[0][1] == detour[1][0]


def test_going_round_in_a_circle_is_no_progress():
    round_trip, straight = steps_of(walk("abcab", won=True), walk("ab", won=True))
    assert round_trip[1] < 0 < round_trip[4] == straight[1]
    assert round_trip[0] == round_trip[3] == straight[0] == 0.0, "all three go on to b"


@quick
@given(st.lists(st.text("abc.", max_size=6), max_size=6), st.booleans())
def test_a_group_without_a_success_has_no_graph_credit(paths, divide):
    group = references.group(*(walk(path) for path in paths))
    for row, path in zip(GraphGPO(divide_by_std=divide)([group]), paths, strict=True):
        assert row == [0.0] * len(path)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("won", [True, False])
def test_equal_episodes_have_no_advantage_where_they_are_compared(record, won):
    """G2PO also compares the turns of one episode with each other, and only there equal episodes differ."""
    group = references.group(*[walk("abc", won=won) for _ in range(4)])
    rows = (dataclasses.replace(record, step_weight=0.0) if isinstance(record, G2PO) else record)([group])
    assert rows == [[0.0] * 3] * 4


def test_a_turn_at_which_an_episode_was_cut_off_gets_no_graph_credit_and_spoils_none():
    whole = [walk("ab", won=True), walk("aa")]
    cut = walk("a", stop=Stop.MAX_TURNS)
    assert steps_of(*whole, cut) == [*steps_of(*whole), [0.0]]


def test_one_episode_alone_learns_only_where_it_came_back():
    assert steps_of(walk("abc", won=True)) == [[0.0, 0.0, 0.0]]
    [again] = steps_of(walk("aab", won=True))
    assert again[0] < 0 < again[1]
    assert hgpo().advantages([references.group(walk("abc", won=True))]) == [[0.0, 0.0, 0.0]]


@quick
@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from([SUCCESS, FAILURE, UNKNOWN, 0, 1, 2, 3, 4, 5, 6]))))
def test_distances_are_those_of_the_shortest_paths(edges):
    found = distances_to_success(torch.tensor([a for a, _ in edges]), torch.tensor([b for _, b in edges]))
    assert found[SUCCESS] == 0
    for node in range(7):
        onward = [found[b] + 1 for a, b in edges if a == node and b in found]
        assert found.get(node) == (min(onward) if onward else None)
    assert not {FAILURE, UNKNOWN} & set(found)


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_without_division_graph_credit_is_in_units_of_the_tasks_reward(scale):
    rows = steps_of(walk("a", won=True, reward=scale), walk("a", reward=0.0), distance_discount=0.0)
    assert rows == [[0.5 * scale], [-0.5 * scale]]


def test_a_success_that_pays_nothing_still_gives_a_direction():
    won, lost = steps_of(walk("a", won=True, reward=-3.0), walk("a", reward=-5.0))
    assert won[0] > 0 > lost[0]


# -- what all promise ---------------------------------------------------------------------------------------------


@quick
@given(plain.groups, st.randoms(use_true_random=False))
def test_the_order_of_groups_and_siblings_does_not_matter(groups, rng: random.Random):
    tagged = [(i, j) for i, g in enumerate(groups) for j in range(len(g.trajectories))]
    outer = rng.sample(range(len(groups)), len(groups))
    inner = {i: rng.sample(range(len(groups[i].trajectories)), len(groups[i].trajectories)) for i in outer}
    mixed = [dataclasses.replace(groups[i], trajectories=[groups[i].trajectories[j] for j in inner[i]]) for i in outer]
    for record in RECORDS:
        straight = dict(zip(tagged, record(groups), strict=True))
        assert record(mixed) == close([straight[i, j] for i in outer for j in inner[i]])
        assert record(groups) == record(groups)


@pytest.mark.parametrize("make", MAKERS)
def test_equal_states_of_different_groups_are_not_compared(make):
    alone = [references.group(walk("ab", won=True)), references.group(walk("ab"))]
    record = dataclasses.replace(make().advantages, episode_weight=0.0)
    assert record(alone) == record(alone[:1]) + record(alone[1:])


@pytest.mark.parametrize("make", MAKERS)
def test_a_step_without_episodes_or_turns_has_no_advantages(make):
    record = make().advantages
    assert record([]) == record([Group("lost", [], num_failed=4)]) == []
    assert record([references.group(walk(""), walk(""))]) == [[], []]
    assert [len(row) for row in record([references.group(walk(""), walk("ab", won=True))])] == [0, 2]


@pytest.mark.parametrize("record", RECORDS)
def test_unknown_states_leave_the_episode_part(record):
    rows = record([references.group(walk(".", won=True), walk("."))])
    episode = references.group_relative([1.0, 0.0], [0, 0], divide_by_std=True)
    if isinstance(record, G2PO):  # its second part compares all turns of the group, known or not
        assert rows[0][0] > 0 > rows[1][0]
    else:
        assert rows == close([[a] for a in episode])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_self_imitation_over_them_stores_wins_and_can_keep_their_step_part(make, wrapped):
    base = dr_bot(make()) if wrapped else make()
    played = [references.group(walk("ab", won=True), walk("ab"), walk("ac"), walk("ac"))]
    for keep_step_part in (False, True):
        imitation = spear(base, imitation=1.0, fraction=1e6, keep_step_part=keep_step_part).imitation
        imitation.observe(played)
        imitation.keep(played, base.advantages(played), 0)
        [stored] = imitation.buffer.items
        assert stored.reward == 1.0
        step = dataclasses.replace(base.advantages, episode_weight=0.0)(played)[0]
        assert stored.item.step_parts == (step if keep_step_part else [0.0, 0.0])
        [drawn] = imitation.draw(1, random.Random(0), num_played=4).turn_advantages
        assert drawn[1] - drawn[0] == pytest.approx(step[1] - step[0] if keep_step_part else 0.0)
    assert spear(base, bonus=None, imitation=None) is base


@pytest.mark.parametrize("make", MAKERS)
def test_a_base_that_learns_from_its_step_part_alone_still_stores_wins(make):
    base = dataclasses.replace(make(), advantages=dataclasses.replace(make().advantages, episode_weight=0.0))
    imitation, played = spear(base, imitation=1.0).imitation, [references.group(walk("a", won=True), walk("b"))]
    imitation.keep(played, base.advantages(played), 0)
    assert [stored.reward for stored in imitation.buffer.items] == [1.0]


@pytest.mark.parametrize("record", RECORDS)
def test_a_step_of_the_papers_size_takes_a_fraction_of_a_second(record):
    """16 tasks, 8 episodes, 50 turns; the bound is wide because the machine may be busy."""
    rng = random.Random(0)
    played = [
        references.group(*(walk("".join(rng.choices("abcdefghijkl", k=50)), won=rng.random() < 0.3) for _ in range(8)))
        for _ in range(16)
    ]
    record(played[:1])
    start = time.process_time()
    record(played)
    assert time.process_time() - start < 1.0
