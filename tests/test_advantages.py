"""Advantage estimators against plain loops, on tensors and on groups of episodes."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from spear_rl.algorithms import GiGPO, dr_bot, dr_grpo, gigpo, grpo, rloo
from spear_rl.functional import discounted_returns, group_relative, leave_one_out, recalibrate
from spear_rl.functional import gigpo as gigpo_estimator
from spear_rl.types import Group

quick = settings(max_examples=40, deadline=None)

labelled = st.lists(st.tuples(references.rewards, st.sampled_from([-7, -1, 0, 3, 10**12])), min_size=1, max_size=12)


def tensors(pairs: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([v for v, _ in pairs], dtype=torch.float64), torch.tensor([g for _, g in pairs])


def close(expected: object) -> object:
    return pytest.approx(expected, rel=1e-7, abs=2e-8)


def estimates(values: torch.Tensor, groups: torch.Tensor) -> list[list[float]]:
    """All three estimators side by side."""
    return [
        group_relative(values, groups).tolist(),
        group_relative(values, groups, divide_by_std=True).tolist(),
        leave_one_out(values, groups).tolist(),
    ]


def nested(expected: list[list[float]]) -> list[object]:
    return [close(row) for row in expected]


@quick
@given(labelled, st.booleans())
def test_group_relative_is_what_the_formula_says(pairs, divide_by_std):
    got = group_relative(*tensors(pairs), divide_by_std=divide_by_std).tolist()
    values, labels = zip(*pairs, strict=True)
    assert got == close(references.group_relative(values, labels, divide_by_std=divide_by_std))


@quick
@given(labelled)
def test_leave_one_out_is_what_the_formula_says(pairs):
    values, labels = zip(*pairs, strict=True)
    assert leave_one_out(*tensors(pairs)).tolist() == close(references.leave_one_out(values, labels))


@quick
@given(st.integers(1, 60), st.integers(1, 30), st.sampled_from([0.1, 0.7, 1 / 3, -2.2]))
def test_who_earned_just_the_mean_of_its_group_is_neither_better_nor_worse(least, step, unit):
    """Of three evenly spaced rewards: rounding gave the middle one a tiny advantage, and replay would store it."""
    values = torch.tensor([unit * n for n in (least, least + step, least + 2 * step)], dtype=torch.float64)
    for estimate in estimates(values, torch.zeros(3, dtype=torch.long)):
        assert estimate[1] == 0.0
        assert estimate[0] < 0 < estimate[2] or unit < 0


def test_grpo_on_numbers_worked_out_by_hand():
    values = torch.tensor([1.0, 0.0, 0.0, -1.0, 5.0], dtype=torch.float64)
    groups = torch.tensor([4, 4, 4, 4, 9])
    assert group_relative(values, groups).tolist() == [1, 0, 0, -1, 0]
    std = (2 / 3) ** 0.5
    assert group_relative(values, groups, divide_by_std=True).tolist() == pytest.approx(
        [1 / (std + 1e-6), 0, 0, -1 / (std + 1e-6), 0], rel=1e-12
    )
    assert leave_one_out(values, groups).tolist() == pytest.approx([4 / 3, 0, 0, -4 / 3, 0], rel=1e-12)


@quick
@given(references.rewards, st.integers(-(10**15), 10**15))
def test_a_group_of_one_gets_zero(value, label):
    for row in estimates(torch.tensor([value]), torch.tensor([label])):
        assert row == [0.0]


@quick
@given(st.floats(-1e6, 1e6), st.integers(2, 40), st.sampled_from([torch.float32, torch.float64]))
def test_a_flat_group_gets_exactly_zero(value, size, dtype):
    values = torch.full((size + 2,), value, dtype=dtype)
    values[-1] += 1.0
    for row in estimates(values, torch.tensor([0] * size + [1] * 2)):
        assert row[:size] == [0.0] * size


@quick
@given(labelled, st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_matter(pairs, rng):
    order = list(range(len(pairs)))
    rng.shuffle(order)
    straight = estimates(*tensors(pairs))
    shuffled = estimates(*tensors([pairs[i] for i in order]))
    assert shuffled == nested([[row[i] for i in order] for row in straight])


@quick
@given(labelled, st.randoms(use_true_random=False))
def test_the_names_of_groups_do_not_matter(pairs, rng):
    names = dict(zip({g for _, g in pairs}, rng.sample(range(-50, 50), 5), strict=False))
    renamed = estimates(*tensors([(v, names[g]) for v, g in pairs]))
    assert renamed == nested(estimates(*tensors(pairs)))


@quick
@given(labelled, st.floats(-1000, 1000))
def test_a_constant_added_to_every_reward_changes_nothing(pairs, shift):
    shifted = estimates(*tensors([(v + shift, g) for v, g in pairs]))
    for got, expected in zip(shifted, estimates(*tensors(pairs)), strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


@quick
@given(labelled)
def test_advantages_of_a_group_sum_to_zero(pairs):
    for row in estimates(*tensors(pairs)):
        for label in {g for _, g in pairs}:
            assert sum(a for a, (_, g) in zip(row, pairs, strict=True) if g == label) == pytest.approx(0, abs=1e-6)


@quick
@given(labelled, st.sampled_from([torch.float32, torch.float64]))
def test_advantages_have_the_dtype_of_the_rewards(pairs, dtype):
    values, groups = tensors(pairs)
    assert group_relative(values.to(dtype), groups, divide_by_std=True).dtype == dtype
    assert leave_one_out(values.to(dtype), groups).dtype == dtype


def test_whole_number_rewards_are_not_rounded():
    values, groups = torch.tensor([1, 0, 0]), torch.tensor([0, 0, 0])
    assert group_relative(values, groups).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert leave_one_out(values, groups).tolist() == pytest.approx([1, -1 / 2, -1 / 2])
    assert discounted_returns(torch.tensor([0, 0, 1]), discount=0.5).tolist() == [0.25, 0.5, 1.0]
    assert discounted_returns(torch.tensor([False, True]), discount=0.5).tolist() == [0.5, 1.0]


@quick
@given(st.lists(references.rewards, max_size=8), st.floats(0, 1))
def test_discounted_returns_are_sums_of_later_rewards(rewards, discount):
    got = discounted_returns(torch.tensor(rewards, dtype=torch.float64), discount=discount).tolist()
    assert got == close(references.returns_to_go(rewards, discount))


def test_discounted_returns_on_numbers_worked_out_by_hand():
    assert discounted_returns(torch.tensor([1.0, 0.0, 4.0]), discount=0.5).tolist() == [2.0, 2.0, 4.0]


@quick
@given(st.lists(references.rewards, min_size=1, max_size=8), references.rewards)
def test_recalibration_subtracts_the_baseline_only(rewards, baseline):
    got = recalibrate(torch.tensor(rewards, dtype=torch.float64), baseline).tolist()
    assert got == [reward - baseline for reward in rewards]


@quick
@given(references.groups, st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_gigpo_estimator_is_what_the_formula_says(groups, divide_by_std, step_weight, episode_weight):
    """Tensors are made here with arbitrary labels, so that only the estimator is under test."""
    scores, labels = references.scores(groups)
    names: dict[tuple[int, str], int] = {}
    returns, states, owners, n = [], [], [], 0
    for number, group in enumerate(groups):
        for t in group.trajectories:
            returns += references.returns_to_go([u.reward + u.shaping for u in t.turns], 0.9)
            for u in t.turns:
                key = (number, u.state_key) if u.state_key else (-1, str(len(states)))
                states.append(names.setdefault(key, 5 - 3 * len(names)))
                owners.append(n)
            n += 1
    got = gigpo_estimator(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor([7 - 5 * label for label in labels]),
        torch.tensor(returns, dtype=torch.float64),
        torch.tensor(states),
        torch.tensor(owners),
        step_weight=step_weight,
        episode_weight=episode_weight,
        divide_by_std=divide_by_std,
    ).tolist()
    expected = references.gigpo(
        groups, discount=0.9, step_weight=step_weight, episode_weight=episode_weight, divide_by_std=divide_by_std
    )
    assert got == close([a for row in expected for a in row])


# -- groups of episodes -------------------------------------------------------------------------------------------


def spread_over_turns(groups: list[Group], per_episode: list[float]) -> list[list[float]]:
    episodes = [t for group in groups for t in group.trajectories]
    return [[a] * len(t.turns) for a, t in zip(per_episode, episodes, strict=True)]


@quick
@given(references.groups)
def test_grpo_compares_the_scores_of_siblings(groups):
    expected = references.group_relative(*references.scores(groups), divide_by_std=True)
    assert grpo().advantages(groups) == nested(spread_over_turns(groups, expected))


@quick
@given(references.groups)
def test_dr_grpo_does_not_divide(groups):
    expected = spread_over_turns(groups, references.group_relative(*references.scores(groups), divide_by_std=False))
    assert dr_grpo().advantages(groups) == nested(expected)
    assert dr_bot(grpo()).advantages(groups) == nested(expected)


@quick
@given(references.groups)
def test_rloo_leaves_the_episode_itself_out(groups):
    expected = spread_over_turns(groups, references.leave_one_out(*references.scores(groups)))
    assert rloo().advantages(groups) == nested(expected)
    assert dr_bot(rloo()).advantages(groups) == nested(expected)


@quick
@given(references.groups, st.booleans(), st.sampled_from([0.95, 0.5, 1.0]), st.sampled_from([1.0, 0.3]))
def test_gigpo_also_compares_turns_from_the_same_state(groups, divide_by_std, discount, step_weight):
    algorithm = gigpo(gamma=discount, step_weight=step_weight, divide_by_std=divide_by_std)
    expected = references.gigpo(groups, discount=discount, step_weight=step_weight, divide_by_std=divide_by_std)
    assert algorithm.advantages(groups) == nested(expected)


@quick
@given(references.groups)
def test_gigpo_has_the_papers_settings_by_default(groups):
    expected = references.gigpo(groups, discount=0.95, step_weight=1.0, divide_by_std=True)
    assert gigpo().advantages(groups) == nested(expected)
    expected = references.gigpo(groups, discount=0.95, step_weight=1.0, divide_by_std=False)
    assert dr_bot(gigpo()).advantages(groups) == nested(expected)


def test_gigpo_on_numbers_worked_out_by_hand():
    """Two episodes meet in the hall: one returns 0.5 * 4 = 2 from there, the other 1; the kitchen is seen once."""
    long = references.episode(references.turn(0, state="hall"), references.turn(4, state="kitchen"))
    short = references.episode(references.turn(1, state="hall"))
    algorithm = gigpo(gamma=0.5, divide_by_std=False)
    assert algorithm.advantages([references.group(long, short)]) == [[1.5 + 0.5, 1.5], [-1.5 - 0.5]]


def test_the_episode_mean_is_over_trajectories_not_over_turns():
    long, short = references.episode(0, 0, 0, 0, 0), references.episode(1)
    for algorithm in (dr_grpo(), gigpo(divide_by_std=False)):
        assert algorithm.advantages([references.group(long, short)]) == [[-0.5] * 5, [0.5]]


def test_an_empty_state_key_equals_no_other():
    same = references.group(references.episode(1, 0), references.episode(0, 0))
    assert GiGPO(divide_by_std=False)([same]) == [[0.5, 0.5], [-0.5, -0.5]]


def test_equal_states_of_different_groups_are_not_compared():
    first = references.group(references.episode(references.turn(3, state="hall")))
    second = references.group(references.episode(references.turn(1, state="hall")))
    assert gigpo().advantages([first, second]) == [[0.0], [0.0]]


def test_a_bonus_counts_in_the_episode_part_only():
    paid = references.episode(references.turn(0, state="hall"), bonus=1.0)
    unpaid = references.episode(references.turn(0, state="hall"))
    assert gigpo(divide_by_std=False).advantages([references.group(paid, unpaid)]) == [[0.5], [-0.5]]


def test_equal_rewards_in_another_order_make_a_flat_group():
    """As in Sokoban, a tenth lost a move and one won for a box: 0.7 in all, whenever the box came."""
    early, late = references.episode(1.0, -0.1, -0.1, -0.1), references.episode(-0.1, -0.1, -0.1, 1.0)
    for algorithm in (grpo(), dr_grpo(), rloo(), gigpo()):
        assert algorithm.advantages([references.group(early, late)]) == [[0.0] * 4, [0.0] * 4]


@quick
@given(references.groups, st.floats(-50, 50))
def test_a_higher_reward_for_everyone_changes_no_episode_advantage(groups, shift):
    """Added to each episode's bonus, so that episodes of any length move by the same amount."""
    moved = [
        dataclasses.replace(g, trajectories=[dataclasses.replace(t, bonus=t.bonus + shift) for t in g.trajectories])
        for g in groups
    ]
    for algorithm in (grpo(), dr_grpo(), rloo(), gigpo()):
        for got, expected in zip(algorithm.advantages(moved), algorithm.advantages(groups), strict=True):
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)


@quick
@given(references.groups, st.randoms(use_true_random=False))
def test_the_order_of_groups_or_siblings_does_not_matter(groups, rng: random.Random):
    tagged = [(i, j) for i, g in enumerate(groups) for j in range(len(g.trajectories))]
    outer = rng.sample(range(len(groups)), len(groups))
    inner = {i: rng.sample(range(len(groups[i].trajectories)), len(groups[i].trajectories)) for i in outer}
    mixed = [dataclasses.replace(groups[i], trajectories=[groups[i].trajectories[j] for j in inner[i]]) for i in outer]
    for algorithm in (grpo(), dr_grpo(), rloo(), gigpo()):
        straight = dict(zip(tagged, algorithm.advantages(groups), strict=True))
        got = algorithm.advantages(mixed)
        assert got == nested([straight[i, j] for i in outer for j in inner[i]])


@pytest.mark.parametrize("make", [grpo, dr_grpo, rloo, gigpo])
def test_a_step_without_episodes_has_no_advantages(make):
    """All episodes of a step may be lost to the machinery."""
    assert make().advantages([]) == []
    assert make().advantages([Group("lost", [], num_failed=4)]) == []


@pytest.mark.parametrize("make", [grpo, dr_grpo, rloo, gigpo])
def test_a_lost_group_leaves_the_others_alone(make):
    lost, whole = Group("lost", [], num_failed=4), references.group(1.0, 0.0)
    assert make().advantages([lost, whole, lost]) == make().advantages([whole])


@pytest.mark.parametrize("make", [grpo, dr_grpo, rloo, gigpo])
def test_an_episode_without_turns_gets_no_number_yet_counts_as_a_sibling(make):
    [empty, full] = make().advantages([references.group(references.episode(), references.episode(1.0))])
    assert empty == []
    assert full == make().advantages([references.group(0.0, 1.0)])[1]


@pytest.mark.parametrize("make", [grpo, dr_grpo, rloo, gigpo])
def test_episodes_without_any_turn_get_no_numbers(make):
    assert make().advantages([references.group(references.episode(), references.episode())]) == [[], []]
