"""The replay buffer and the reward history against lists kept by hand."""

from __future__ import annotations

import copy
import math
import random
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from spear_rl.replay import ReplayBuffer, RewardHistory, Stored

quick = settings(max_examples=60, deadline=None)

additions = st.lists(st.lists(references.rewards, max_size=5), max_size=8)
"""Rewards of the episodes added at step 0, 1, 2, ..."""


def filled(capacity: int, max_age: int, rewards: list[list[float]]) -> ReplayBuffer[str]:
    buffer: ReplayBuffer[str] = ReplayBuffer(capacity, max_age)
    for step, added in enumerate(rewards):
        buffer.add(((f"{step}.{n}", reward) for n, reward in enumerate(added)), step)
    return buffer


def listed(rewards: list[list[float]]) -> list[Stored[str]]:
    return [Stored(f"{s}.{n}", r, s) for s, added in enumerate(rewards) for n, r in enumerate(added)]


@quick
@given(st.integers(1, 12), additions)
def test_the_buffer_keeps_the_latest_in_order(capacity, rewards):
    buffer = filled(capacity, 100, rewards)
    assert list(buffer.items) == listed(rewards)[-capacity:]
    assert len(buffer) == min(capacity, sum(map(len, rewards)))


@quick
@given(st.integers(0, 6), additions, st.integers(0, 12))
def test_nothing_older_than_the_limit_survives_and_nothing_younger_is_lost(max_age, rewards, now):
    buffer = filled(1000, max_age, rewards)
    buffer.drop_stale(now)
    assert list(buffer.items) == [s for s in listed(rewards) if not now - s.step > max_age]


def test_an_episode_of_exactly_the_age_limit_stays():
    buffer = filled(10, 5, [[1.0]])
    buffer.drop_stale(5)
    assert len(buffer) == 1
    buffer.drop_stale(6)
    assert len(buffer) == 0


@quick
@given(additions, st.integers(0, 20), st.integers(0, 1000), references.rewards)
def test_a_draw_has_no_episode_twice_and_only_those_asked_for(rewards, count, seed, least):
    buffer = filled(1000, 100, rewards)
    drawn = buffer.sample(count, random.Random(seed), where=lambda stored: stored.reward >= least)
    eligible = [s for s in listed(rewards) if s.reward >= least]
    assert len(drawn) == min(count, len(eligible))
    assert len({s.item for s in drawn}) == len(drawn)
    assert all(s in eligible for s in drawn)
    assert list(buffer.items) == listed(rewards)


def test_every_episode_is_as_likely_to_be_drawn():
    buffer, rng = filled(100, 100, [[0.0] * 10]), random.Random(0)
    times = dict.fromkeys((s.item for s in buffer.items), 0)
    for _ in range(1000):
        for stored in buffer.sample(3, rng):
            times[stored.item] += 1
    assert sum(times.values()) == 3000
    assert min(times.values()) > 240
    assert max(times.values()) < 360


def test_a_cleared_buffer_is_empty_and_can_be_filled_again():
    buffer = filled(4, 5, [[1.0, 2.0]])
    buffer.clear()
    assert len(buffer) == 0
    assert buffer.sample(3, random.Random(0)) == []
    buffer.add([("new", 3.0)], 7)
    assert list(buffer.items) == [Stored("new", 3.0, 7)]


@quick
@given(st.integers(1, 12), additions, st.integers(0, 1000))
def test_a_restored_buffer_draws_and_forgets_like_the_first(capacity, rewards, seed):
    first, second = filled(capacity, 3, rewards), filled(capacity, 3, [[9.0, 9.0]])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.items == first.items
    for buffer in (first, second):
        buffer.add([("later", 1.0)], len(rewards))
        buffer.drop_stale(len(rewards) + 1)
    assert second.items == first.items
    assert second.sample(4, random.Random(seed)) == first.sample(4, random.Random(seed))


def test_a_saved_buffer_does_not_change_with_the_live_one():
    buffer = filled(4, 5, [[1.0]])
    saved = buffer.state_dict()
    buffer.add([("late", 2.0)], 1)
    buffer.load_state_dict(saved)
    assert list(buffer.items) == [Stored("0.0", 1.0, 0)]


def test_a_buffer_holds_no_more_than_its_capacity_whatever_it_is_given_or_restored_from():
    saved = filled(4, 5, [[1.0, 2.0, 3.0]])
    restored = ReplayBuffer[str](2, 5)
    restored.load_state_dict(saved.state_dict())
    assert list(restored.items) == list(saved.items)[1:]
    assert list(ReplayBuffer(2, 5, items=list(saved.items)).items) == list(saved.items)[1:]


def test_scalars_of_tensors_are_kept_as_plain_numbers():
    buffer, history = ReplayBuffer[str](2, 5), RewardHistory(4)
    buffer.add([("won", torch.tensor(1.0)), ("lost", 0)], 0)
    history.add(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.5]))
    assert [type(stored.reward) for stored in buffer.items] == [float, float]
    assert {type(number) for number in (*history.means, *history.stds)} == {float}
    assert history.median() == 2.0


# -- reward history -----------------------------------------------------------------------------------------------

means = st.lists(references.rewards, min_size=1, max_size=15)


@quick
@given(means, st.floats(0, 100))
def test_a_percentile_is_linear_between_ranks(values, percent):
    history = RewardHistory(100)
    history.add(values)
    assert history.percentile(percent) == pytest.approx(references.percentile(values, percent), rel=1e-9, abs=1e-9)


@quick
@given(means)
def test_the_baseline_of_the_paper_is_the_median(values):
    history = RewardHistory(100)
    history.add(values)
    assert history.median() == pytest.approx(statistics.median(values), rel=1e-12, abs=1e-12)
    assert history.percentile(0) == min(values)
    assert history.percentile(100) == max(values)


def test_percentiles_on_numbers_worked_out_by_hand():
    history = RewardHistory(10)
    history.add([4.0, 0.0, 1.0])
    assert [history.percentile(p) for p in (0, 25, 50, 75, 100)] == [0.0, 0.5, 1.0, 2.5, 4.0]


@quick
@given(st.lists(means, min_size=1, max_size=5), st.integers(1, 10), st.floats(0, 100))
def test_only_the_latest_means_count(batches, size, percent):
    history = RewardHistory(size)
    for batch in batches:
        history.add(iter(batch))
    window = [value for batch in batches for value in batch][-size:]
    assert list(history.means) == window
    assert len(history) == len(window)
    assert history.percentile(percent) == pytest.approx(references.percentile(window, percent), rel=1e-9, abs=1e-9)


@quick
@given(means, st.randoms(use_true_random=False), st.floats(0, 100))
def test_the_order_of_means_inside_the_window_does_not_matter(values, rng, percent):
    straight, mixed = RewardHistory(100), RewardHistory(100)
    straight.add(values)
    mixed.add(rng.sample(values, len(values)))
    assert mixed.percentile(percent) == straight.percentile(percent)


def test_a_percentile_of_nothing_says_so():
    with pytest.raises(ValueError, match="empty"):
        RewardHistory(3).median()


@pytest.mark.parametrize("percent", [-1, 100.5, math.nan])
def test_a_percent_that_is_none_is_refused(percent):
    history = RewardHistory(3)
    history.add([0.0, 1.0])
    with pytest.raises(ValueError, match="from 0 to 100"):
        history.percentile(percent)


@quick
@given(means, means)
def test_a_restored_history_goes_on_like_the_first(before, after):
    first, second = RewardHistory(8), RewardHistory(8)
    first.add(before)
    second.add([123.0])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for history in (first, second):
        history.add(after)
    assert second.means == first.means


def test_a_saved_history_does_not_change_with_the_live_one():
    history = RewardHistory(8)
    history.add([1.0])
    saved = history.state_dict()
    history.add([2.0])
    history.load_state_dict(saved)
    assert list(history.means) == [1.0]
