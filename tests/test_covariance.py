"""Clip-Cov and KL-Cov: which tokens they hold back, and that nothing but the tokens themselves decides it."""

from __future__ import annotations

import dataclasses
import math
import random
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import references
from references import Tokens, loss_inputs, padded, reordered
from spear_rl.functional import (
    LossInputs,
    clipped_surrogate,
    high_covariance_penalty,
    keep_low_covariance,
    token_covariance,
)

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
fractions = st.sampled_from([0.0, 0.02, 0.1, 0.25, 0.5, 1.0])
bounds = st.sampled_from([(0.2, 3.0), (0.5, 40.0), (1.0, 40.0), (2.0, 60.0), (5.0, 5.5)])

tokens_of = partial(references.random_tokens, log_ratios=(-0.5, -0.15, 0.0, 0.0, 0.1, 0.21, 0.3), scale=3.0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dropped(tokens: Tokens, seed: int = 0, **options: float) -> set[tuple[int, int]]:
    """(row, column) of the tokens whose weight is 0; every other weight must be 1."""
    weights = keep_low_covariance(loss_inputs(tokens), generator=seeded(seed), **options).tolist()
    assert {w for row in weights for w in row} <= {0.0, 1.0}
    return {(b, t) for b, row in enumerate(weights) for t, w in enumerate(row) if w == 0.0}


def penalised(tokens: Tokens, **options: float) -> set[tuple[int, int]]:
    values = high_covariance_penalty(loss_inputs(tokens), **options).tolist()
    return {(b, t) for b, row in enumerate(values) for t, v in enumerate(row) if v != 0.0}


def batch(columns: list[tuple[float, float, float]]) -> Tokens:
    """One row of (logprob, old logprob, advantage)."""
    logprobs, old, advantages = ([list(values)] for values in zip(*columns, strict=True))
    blank = [[0.0] * len(columns)]
    return Tokens(logprobs, old, advantages, [[True] * len(columns)], blank, blank)


@quick
@given(seeds)
def test_the_covariance_is_what_the_formula_says_and_zero_where_masked(seed):
    tokens = tokens_of(seed)
    got = token_covariance(loss_inputs(tokens)).tolist()
    expected = references.covariances(tokens)
    for b, row in enumerate(got):
        assert row == pytest.approx([expected.get((b, t), 0.0) for t in range(len(row))], rel=1e-9, abs=1e-12)


def test_the_covariance_carries_no_gradient():
    assert not token_covariance(loss_inputs(tokens_of(3))).requires_grad


# -- Clip-Cov -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(seeds, fractions, bounds, st.sampled_from([(0.2, 0.2), (0.2, 0.28)]))
def test_the_right_number_of_the_right_tokens_is_dropped(seed, fraction, bound, clip):
    tokens, (low, high), (clip_low, clip_high) = tokens_of(seed), bound, clip
    options = {"low": low, "high": high, "clip_low": clip_low, "clip_high": clip_high}
    candidates = references.covariance_candidates(tokens, **options)
    got = dropped(tokens, seed, fraction=fraction, **options)
    assert got <= candidates
    assert len(got) == min(max(1, math.floor(fraction * len(tokens.training))), len(candidates))


def test_the_number_is_a_share_of_all_training_tokens_not_of_the_candidates():
    columns = [(-1.0 if i % 2 else -5.0, -3.0, 0.0) for i in range(80)]
    columns += [(-1.0, -1.0, 10.0) for _ in range(20)]
    candidates = references.covariance_candidates(batch(columns), low=1, high=60, clip_low=0.2, clip_high=0.28)
    assert len(candidates) >= 20
    assert len(dropped(batch(columns), fraction=0.05, low=1, high=60)) == 5


def test_at_least_one_candidate_is_dropped_however_small_the_fraction():
    columns = [(-1.0, -1.0, 10.0), (-3.0, -3.0, -10.0), (-2.0, -2.0, 0.0)]
    assert len(dropped(batch(columns), fraction=0.02, low=1, high=60)) == 1


def test_the_bounds_themselves_are_outside():
    """Two tokens with covariance exactly 1."""
    two = batch([(-1.0, -1.0, 1.0), (-3.0, -3.0, -1.0)])
    assert dropped(two, fraction=1.0, low=1.0, high=40.0) == set()
    assert dropped(two, fraction=1.0, low=0.5, high=1.0) == set()
    assert dropped(two, fraction=1.0, low=0.5, high=1.5) == {(0, 0), (0, 1)}


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "may_be_drawn"),
    [
        (math.log(1.27), 10.0, True),
        (math.log(1.29), 10.0, False),
        (math.log(0.5), 10.0, True),
        (math.log(0.81), -10.0, True),
        (math.log(0.79), -10.0, False),
        (math.log(3.0), -10.0, True),
    ],
)
def test_a_token_the_clip_has_silenced_is_never_drawn(log_ratio, advantage, may_be_drawn):
    """The token under test is far above the mean where its advantage is positive and far below where it is negative."""
    logprob = -1.0 if advantage > 0 else -9.0
    other = -10.0 - logprob
    tokens = batch([(logprob, logprob - log_ratio, advantage), (other, other, 0.0)])
    assert references.covariances(tokens)[0, 0] == pytest.approx(20)
    assert ((0, 0) in dropped(tokens, fraction=1.0, low=1.0, high=40.0)) == may_be_drawn


@quick
@given(seeds, st.sampled_from([-3.7, 0.1, 1.0, 10.3]), st.sampled_from([0.01, 1.0]))
def test_equal_advantages_have_no_covariance_and_nothing_is_dropped(seed, advantage, low):
    tokens = tokens_of(seed)
    tokens = dataclasses.replace(tokens, advantages=[[advantage] * len(row) for row in tokens.mask])
    assert token_covariance(loss_inputs(tokens)).abs().max().item() < 1e-12
    assert dropped(tokens, seed, fraction=1.0, low=low, high=1e9) == set()
    single = keep_low_covariance(
        loss_inputs(tokens, torch.float32), fraction=1.0, low=low, high=1e9, generator=seeded(seed)
    )
    assert (single == 1).all()


@quick
@given(seeds)
def test_dropped_tokens_lose_their_gradient_and_the_others_keep_theirs(seed):
    tokens = tokens_of(seed)
    out = []
    for keep in (None, partial(keep_low_covariance, fraction=0.5, low=0.2, high=40, generator=seeded(seed))):
        inputs = loss_inputs(tokens)
        [gradient] = torch.autograd.grad(clipped_surrogate(inputs, keep=keep).loss, inputs.logprobs)
        out.append(gradient)
    gone = dropped(tokens, seed, fraction=0.5, low=0.2, high=40)
    for b, t in tokens.training:
        assert out[1][b, t].item() == (0.0 if (b, t) in gone else out[0][b, t].item())


@quick
@given(seeds)
def test_dropped_tokens_still_count_in_the_reduction(seed):
    tokens = tokens_of(seed)
    gone = dropped(tokens, seed, fraction=0.5, low=0.2, high=40)
    values = references.each(tokens, references.surrogate, "logprobs", "old_logprobs", "advantages", low=0.2, high=0.28)
    expected = sum(values[b][t] for b, t in tokens.training if (b, t) not in gone) / len(tokens.training)
    keep = partial(keep_low_covariance, fraction=0.5, low=0.2, high=40, generator=seeded(seed))
    out = clipped_surrogate(loss_inputs(tokens), keep=keep)
    assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert out.metrics["covariance_clip_fraction"].item() == pytest.approx(len(gone) / len(tokens.training))


def test_every_candidate_is_as_likely_as_any_other():
    columns = [(-1.0 - 0.1 * i, -1.0 - 0.1 * i, 10.0 + i) for i in range(5)] + [(-5.0, -5.0, -9.0)] * 5
    tokens = batch(columns)
    candidates = references.covariance_candidates(tokens, low=1, high=100, clip_low=0.2, clip_high=0.28)
    assert len(candidates) == 10
    times = dict.fromkeys(candidates, 0)
    generator = seeded()
    for _ in range(1000):
        weights = keep_low_covariance(loss_inputs(tokens), fraction=0.2, low=1, high=100, generator=generator)
        for t in (weights[0] == 0).nonzero().flatten().tolist():
            times[0, t] += 1
    assert sum(times.values()) == 2000
    assert min(times.values()) > 140
    assert max(times.values()) < 260


@quick
@given(seeds)
def test_the_same_seed_draws_the_same_tokens(seed):
    tokens = tokens_of(seed)
    options = {"fraction": 0.3, "low": 0.2, "high": 40.0}
    assert dropped(tokens, seed, **options) == dropped(tokens, seed, **options)


def big(seed: int) -> Tokens:
    return tokens_of(seed, max_rows=8, max_columns=12)


@quick
@given(seeds)
def test_the_order_of_rows_does_not_change_which_tokens_are_dropped(seed):
    tokens = big(seed)
    order = random.Random(seed).sample(range(len(tokens.mask)), len(tokens.mask))
    options = {"fraction": 0.1, "low": 0.5, "high": 40.0}
    mixed = dropped(reordered(tokens, order), seed, **options)
    assert {(order[b], t) for b, t in mixed} == dropped(tokens, seed, **options)


def test_the_order_of_rows_does_not_matter_where_confident_tokens_share_a_logprob_of_zero():
    """Sure tokens are sampled with a logprob of exactly 0.0, many in one episode; their new logprobs differ."""
    sure, unsure = [[-0.01 * i] for i in range(12)], [[-6 - 0.01 * i] for i in range(12)]
    tokens = Tokens(
        logprobs=sure + unsure,
        old_logprobs=[*([[0.0]] * 12), *unsure],
        advantages=[*([[2.0]] * 12), *([[0.0]] * 12)],
        mask=[[True]] * 24,
        entropy=[[0.0]] * 24,
        ref_logprobs=[[0.0]] * 24,
    )
    order = random.Random(1).sample(range(24), 24)
    options = {"fraction": 0.1, "low": 1.0, "high": 40.0}
    mixed = dropped(reordered(tokens, order), **options)
    assert len(mixed) == 2
    assert {(order[b], t) for b, t in mixed} == dropped(tokens, **options)


@quick
@given(seeds, st.integers(0, 3), st.integers(0, 3))
def test_padding_and_what_it_holds_do_not_change_which_tokens_are_dropped(seed, left, right):
    tokens = big(seed)
    wide = padded(tokens, random.Random(seed), left=left, right=right)
    options = {"fraction": 0.1, "low": 0.5, "high": 40.0}
    got = dropped(wide, seed, **options)
    assert {(b, t - left) for b, t in got} == dropped(tokens, seed, **options)


def test_nothing_is_dropped_where_nothing_trains():
    tokens = dataclasses.replace(tokens_of(5), mask=[[False] * len(row) for row in tokens_of(5).mask])
    assert dropped(tokens, fraction=0.5, low=-1e9, high=1e9) == set()
    assert penalised(tokens, fraction=0.5, beta=1.0) == set()


# -- KL-Cov -------------------------------------------------------------------------------------------------------


def highest(tokens: Tokens, fraction: float) -> set[tuple[int, int]]:
    """The tokens that pay; a batch in which the last of them ties with the next is put aside."""
    by_covariance = references.covariances(tokens)
    ranked = sorted(by_covariance, key=by_covariance.__getitem__, reverse=True)
    count = max(1, math.floor(fraction * len(ranked)))
    if count < len(ranked):
        assume(by_covariance[ranked[count - 1]] - by_covariance[ranked[count]] > 1e-9)
    return set(ranked[:count])


@quick
@given(seeds, st.sampled_from([0.0, 0.02, 0.25, 0.5, 1.0]), st.sampled_from([1.0, 0.1]))
def test_the_tokens_of_highest_covariance_pay_for_moving_either_way(seed, fraction, beta):
    tokens = references.random_tokens(seed)
    top = highest(tokens, fraction)
    got = high_covariance_penalty(loss_inputs(tokens), fraction=fraction, beta=beta).tolist()
    for b, row in enumerate(got):
        for t, value in enumerate(row):
            moved = abs(math.log(references.ratio(tokens.logprobs[b][t], tokens.old_logprobs[b][t])))
            assert value == pytest.approx(beta * moved if (b, t) in top else 0.0, rel=1e-9, abs=1e-12)


@quick
@given(seeds)
def test_the_penalty_of_a_token_pulls_it_back_to_where_it_was_sampled(seed):
    tokens = tokens_of(seed)
    top = highest(tokens, 0.25)
    pulled, free = loss_inputs(tokens), loss_inputs(tokens)
    with_penalty = clipped_surrogate(pulled, penalty=partial(high_covariance_penalty, fraction=0.25, beta=0.7)).loss
    [got] = torch.autograd.grad(with_penalty, pulled.logprobs)
    [plain] = torch.autograd.grad(clipped_surrogate(free).loss, free.logprobs)
    for b, t in tokens.training:
        direction = math.copysign(1.0, tokens.logprobs[b][t] - tokens.old_logprobs[b][t]) if (b, t) in top else 0.0
        expected = 0.7 * direction / len(tokens.training)
        assert (got - plain)[b, t].item() == pytest.approx(expected, rel=1e-8, abs=1e-12)


@quick
@given(seeds, st.integers(0, 3), st.integers(0, 3))
def test_rows_and_padding_do_not_change_who_pays(seed, left, right):
    tokens, rng = big(seed), random.Random(seed)
    order = rng.sample(range(len(tokens.mask)), len(tokens.mask))
    mixed = padded(reordered(tokens, order), rng, left=left, right=right)
    got = penalised(mixed, fraction=0.1, beta=1.0)
    assert {(order[b], t - left) for b, t in got} == highest(tokens, 0.1)


def test_the_order_of_rows_does_not_change_the_penalty_where_covariances_are_equal():
    """One advantage everywhere makes every covariance 0; the loss may still not depend on which row comes first."""
    tokens = dataclasses.replace(big(11), advantages=[[1.0] * len(row) for row in big(11).mask])
    assert len(tokens.mask) > 2
    loss = partial(clipped_surrogate, penalty=partial(high_covariance_penalty, fraction=0.1, beta=1.0))
    straight = loss(loss_inputs(tokens)).loss.item()
    backwards = loss(loss_inputs(reordered(tokens, list(reversed(range(len(tokens.mask))))))).loss.item()
    assert backwards == pytest.approx(straight, rel=1e-9)


@quick
@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_among_replayed_tokens_of_one_advantage_order_and_padding_decide_nothing(seed, dtype):
    """Every covariance is then 0; a rounded mean would rank them by their log-probability or against it."""
    draw, size = torch.Generator().manual_seed(seed), (5, 7)
    logprobs, old = (-torch.rand(size, generator=draw, dtype=dtype) for _ in range(2))
    advantages, mask = torch.rand(1, generator=draw, dtype=dtype).expand(size), torch.rand(size, generator=draw) < 0.7
    rows, blank = torch.randperm(5, generator=draw), torch.zeros(5, 9)
    given_so = LossInputs(logprobs, old, advantages, mask)
    moved = LossInputs(*(torch.cat([x, blank.to(x.dtype)], 1)[rows] for x in (logprobs, old, advantages, mask)))
    assert not token_covariance(given_so).any()
    one, other = (high_covariance_penalty(inputs, fraction=0.2, beta=1.0) for inputs in (given_so, moved))
    assert torch.equal(one[rows], other[:, :7])
