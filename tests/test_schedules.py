"""Schedules against the paper's two formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.functional import as_schedule, constant, cosine

quick = settings(max_examples=60, deadline=None)
coefficients = st.floats(-5, 5)


@quick
@given(st.integers(1, 400), st.integers(0, 500))
def test_mu_fades_as_in_the_paper(decay_steps, step):
    expected = (1 + math.cos(math.pi * step / decay_steps)) / 2 if step <= decay_steps else 0.0
    assert cosine(1.0, 0.0, decay_steps)(step) == pytest.approx(expected, abs=1e-12)


@quick
@given(st.integers(1, 400), st.integers(0, 500), st.floats(0.1, 2))
def test_gamma_grows_as_in_the_paper(warm_steps, step, ceiling):
    expected = ceiling * (1 - math.cos(math.pi * step / warm_steps)) / 2 if step <= warm_steps else ceiling
    assert cosine(0.0, ceiling, warm_steps)(step) == pytest.approx(expected, abs=1e-12)


def test_the_papers_values_at_the_start_the_middle_and_the_end():
    mu, gamma = cosine(1, 0, 200), cosine(0, 1, 100)
    assert [mu(0), mu(200), mu(201), mu(10**9)] == [1, 0, 0, 0]
    assert [gamma(0), gamma(100), gamma(101)] == [0, 1, 1]
    assert mu(100) == pytest.approx(0.5)
    assert mu(50) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert gamma(25) == pytest.approx((1 - math.sqrt(0.5)) / 2)


@quick
@given(coefficients, coefficients, st.integers(1, 60))
def test_a_cosine_moves_one_way_from_start_to_end(start, end, steps):
    values = [cosine(start, end, steps)(step) for step in range(steps + 3)]
    assert values[0] == pytest.approx(start, abs=1e-12)
    assert values[steps:] == [end] * 3
    ordered = sorted(values, reverse=start > end)
    assert values == pytest.approx(ordered, abs=1e-12)


def test_a_cosine_of_no_steps_is_at_its_end():
    assert cosine(1.0, 0.25, 0)(0) == 0.25


@quick
@given(coefficients, st.integers(0, 10**6))
def test_a_constant_never_changes_and_a_number_is_one(value, step):
    assert constant(value)(step) == value
    assert as_schedule(value)(step) == value


def test_a_schedule_stays_what_it_is():
    schedule = cosine(1, 0, 3)
    assert as_schedule(schedule) is schedule
