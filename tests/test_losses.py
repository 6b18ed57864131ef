"""Policy losses and their gradients against plain loops, token by token."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from references import Tokens, loss_inputs, padded, reordered
from spear_rl.functional import (
    LossInputs,
    clipped_surrogate,
    fixed_length_mean,
    reference_kl,
    sequence_mean,
    token_mean,
)

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)

NUMBERS = ("logprobs", "old_logprobs", "advantages", "entropy", "ref_logprobs")
every_term = {"entropy_bonus": 0.3, "kl_coefficient": 0.7}


def gradients(loss: Callable[..., object], inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the loss, for logprobs and for entropy."""
    out = torch.autograd.grad(loss(inputs).loss, (inputs.logprobs, inputs.entropy), materialize_grads=True)
    return out[0], out[1]


def expected_loss(tokens: Tokens, *, low: float, high: float, dual: float | None, length: int | None) -> float:
    names = ("logprobs", "old_logprobs", "advantages")
    values = references.each(tokens, references.surrogate, *names, low=low, high=high, dual=dual)
    if length is None:
        return references.token_mean(values, tokens)
    return references.fixed_length_mean(values, tokens, length)


# -- reductions ---------------------------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(1, 2000))
def test_reductions_are_what_their_names_say(seed, length):
    tokens = references.random_tokens(seed)
    values, mask = torch.tensor(tokens.entropy, dtype=torch.float64), torch.tensor(tokens.mask)
    assert token_mean(values, mask).item() == pytest.approx(references.token_mean(tokens.entropy, tokens), rel=1e-12)
    assert fixed_length_mean(values, mask, length=length).item() == pytest.approx(
        references.fixed_length_mean(tokens.entropy, tokens, length), rel=1e-12
    )


def test_reductions_on_numbers_worked_out_by_hand():
    values = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, -math.inf]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert token_mean(values, mask).item() == 3.0
    assert fixed_length_mean(values, mask, length=9).item() == 0.5


def test_reductions_of_nothing_are_zero():
    values, mask = torch.tensor([[math.nan, 2.0]]), torch.tensor([[False, False]])
    assert token_mean(values, mask).item() == 0.0
    assert fixed_length_mean(values, mask, length=4).item() == 0.0


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean, partial(fixed_length_mean, length=4)])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_a_batch_without_rows_or_tokens_has_loss_zero(reduce, shape):
    values = torch.zeros(shape, requires_grad=True)
    inputs = LossInputs(values, values.detach(), values.detach(), torch.zeros(shape, dtype=torch.bool))
    assert clipped_surrogate(inputs, reduce=reduce).loss.item() == 0.0


@quick
@given(seeds)
def test_a_mask_of_numbers_reduces_like_one_of_booleans(seed):
    tokens = references.random_tokens(seed)
    values, mask = torch.tensor(tokens.entropy, dtype=torch.float64), torch.tensor(tokens.mask)
    assert token_mean(values, mask.double()).item() == pytest.approx(token_mean(values, mask).item(), rel=1e-12)
    assert fixed_length_mean(values, mask.double(), length=7).item() == pytest.approx(
        fixed_length_mean(values, mask, length=7).item(), rel=1e-12
    )


def test_a_longer_row_weighs_more_in_a_fixed_length_mean_and_its_tokens_weigh_the_same():
    values = torch.ones(2, 4, requires_grad=True)
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    [gradient] = torch.autograd.grad(fixed_length_mean(values, mask, length=8), values)
    assert gradient.tolist() == [[1 / 16] * 4, [1 / 16, 0, 0, 0]]


# -- the surrogate ------------------------------------------------------------------------------------------------


@quick
@given(seeds, st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 0.4)]), st.sampled_from([None, 3.0, 10.0]), st.booleans())
def test_the_loss_is_what_the_formula_says(seed, clip, dual, is_fixed_length):
    tokens, (low, high), length = references.random_tokens(seed), clip, 11 if is_fixed_length else None
    reduce = partial(fixed_length_mean, length=length) if length else token_mean
    out = clipped_surrogate(loss_inputs(tokens), clip_low=low, clip_high=high, dual_clip=dual, reduce=reduce)
    expected = expected_loss(tokens, low=low, high=high, dual=dual, length=length)
    assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@quick
@given(seeds, st.sampled_from([None, 10.0]))
def test_the_gradient_is_the_slope_of_the_formula(seed, dual):
    """Central differences of the plain formula, token by token; no token sits on a kink."""
    tokens, h = references.random_tokens(seed), 1e-5
    loss = partial(clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    got, _ = gradients(loss, loss_inputs(tokens))
    token_loss = partial(references.surrogate, low=0.2, high=0.28, dual=dual)
    for b, row in enumerate(tokens.mask):
        for t, on in enumerate(row):
            if not on:
                assert got[b, t].item() == 0.0
                continue
            here = tokens.logprobs[b][t], tokens.old_logprobs[b][t], tokens.advantages[b][t]
            rise = token_loss(here[0] + h, *here[1:]) - token_loss(here[0] - h, *here[1:])
            slope = rise / (2 * h) / len(tokens.training)
            assert got[b, t].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


@quick
@given(seeds)
def test_the_gradient_of_a_token_is_minus_ratio_times_advantage_unless_clipped(seed):
    tokens = references.random_tokens(seed)
    got, _ = gradients(partial(clipped_surrogate, clip_low=0.2, clip_high=0.28), loss_inputs(tokens))
    for b, t in tokens.training:
        logprob, old, advantage = tokens.logprobs[b][t], tokens.old_logprobs[b][t], tokens.advantages[b][t]
        is_silent = references.is_clipped(logprob, old, advantage, low=0.2, high=0.28) or abs(logprob - old) > 20
        expected = 0.0 if is_silent else -math.exp(logprob - old) * advantage / len(tokens.training)
        assert got[b, t].item() == pytest.approx(expected, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual", "loss", "slope"),
    [
        (0.0, 2.0, None, -2.0, -2.0),
        (math.log(1.25), 2.0, None, -2.5, -2.5),  # inside clip-higher, outside a symmetric clip
        (math.log(1.5), 2.0, None, -2.56, 0.0),
        (math.log(0.5), 2.0, None, -1.0, -1.0),  # the clip never stops a step back
        (math.log(0.5), -2.0, None, 1.6, 0.0),
        (math.log(0.9), -2.0, None, 1.8, 1.8),
        (math.log(50.0), -2.0, None, 100.0, 100.0),
        (math.log(50.0), -2.0, 10.0, 20.0, 0.0),
        (math.log(5.0), -2.0, 10.0, 10.0, 10.0),
        (math.log(50.0), 2.0, 10.0, -2.56, 0.0),
        (30.0, -1.0, None, math.exp(20), 0.0),
        (-30.0, 1.0, None, -math.exp(-20), 0.0),
        (math.log(3.0), 0.0, 10.0, 0.0, 0.0),
    ],
)
def test_one_token_worked_out_by_hand(log_ratio, advantage, dual, loss, slope):
    token = Tokens([[log_ratio - 1]], [[-1.0]], [[advantage]], [[True]], [[0.0]], [[0.0]])
    inputs = loss_inputs(token)
    out = clipped_surrogate(inputs, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    assert out.loss.item() == pytest.approx(loss, rel=1e-12)
    [gradient] = torch.autograd.grad(out.loss, inputs.logprobs)
    assert gradient.item() == pytest.approx(slope, rel=1e-12)


def test_clip_higher_is_the_default():
    token = Tokens([[math.log(1.25)]], [[0.0]], [[1.0]], [[True]], [[0.0]], [[0.0]])
    assert clipped_surrogate(loss_inputs(token)).loss.item() == pytest.approx(-1.25)
    assert clipped_surrogate(loss_inputs(token), clip_high=0.2).loss.item() == pytest.approx(-1.2)


@quick
@given(seeds)
def test_entropy_and_reference_terms_are_added_with_the_same_reduction(seed):
    tokens = references.random_tokens(seed, log_ratios=(-0.3, 0.0, 0.1, 1.0))
    entropy, kl = tokens.entropy, references.each(tokens, references.kl_estimate, "logprobs", "ref_logprobs")
    for length in (None, 13):
        reduce = partial(fixed_length_mean, length=length) if length else token_mean
        plain = partial(references.fixed_length_mean, length=length) if length else references.token_mean
        out = clipped_surrogate(loss_inputs(tokens), reduce=reduce, **every_term)
        surrogate = expected_loss(tokens, low=0.2, high=0.28, dual=None, length=length)
        expected = surrogate - 0.3 * plain(entropy, tokens) + 0.7 * plain(kl, tokens)
        assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@quick
@given(seeds)
def test_gradients_of_the_entropy_and_reference_terms_are_their_slopes(seed):
    tokens = references.random_tokens(seed, log_ratios=(-0.3, 0.0, 0.1, 1.0))
    n = len(tokens.training)
    without, _ = gradients(clipped_surrogate, loss_inputs(tokens))
    with_both, by_entropy = gradients(partial(clipped_surrogate, **every_term), loss_inputs(tokens))
    for b, row in enumerate(tokens.mask):
        for t, on in enumerate(row):
            d = tokens.ref_logprobs[b][t] - tokens.logprobs[b][t]
            added = (with_both - without)[b, t].item()
            assert added == pytest.approx(0.7 * (1 - math.exp(d)) / n if on else 0.0, rel=1e-8, abs=1e-12)
            assert by_entropy[b, t].item() == pytest.approx(-0.3 / n if on else 0.0, rel=1e-12)


@quick
@given(seeds)
def test_the_reference_kl_is_never_negative_and_zero_for_equal_policies(seed):
    inputs = loss_inputs(references.random_tokens(seed))
    assert (reference_kl(inputs) >= 0).all()
    same = dataclasses.replace(inputs, ref_logprobs=inputs.logprobs.detach())
    assert (reference_kl(same) == 0).all()


def test_a_term_without_its_tensor_says_what_is_missing():
    inputs = dataclasses.replace(loss_inputs(references.random_tokens(0)), entropy=None, ref_logprobs=None)
    with pytest.raises(ValueError, match="entropy"):
        clipped_surrogate(inputs, entropy_bonus=0.1)
    with pytest.raises(ValueError, match="ref_logprobs"):
        clipped_surrogate(inputs, kl_coefficient=0.1)


@quick
@given(seeds)
def test_weights_silence_tokens_that_still_count_in_the_reduction(seed):
    tokens, rng = references.random_tokens(seed), random.Random(seed)
    weights = [[float(rng.random() < 0.5) for _ in row] for row in tokens.mask]
    values = references.each(tokens, references.surrogate, "logprobs", "old_logprobs", "advantages", low=0.2, high=0.28)
    kept = [[w * v for w, v in zip(*rows, strict=True)] for rows in zip(weights, values, strict=True)]
    loss = partial(clipped_surrogate, keep=lambda _: torch.tensor(weights, dtype=torch.float64))
    out = loss(loss_inputs(tokens))
    assert out.loss.item() == pytest.approx(references.token_mean(kept, tokens), rel=1e-10, abs=1e-12)
    dropped = [[1 - w for w in row] for row in weights]
    assert out.metrics["covariance_clip_fraction"].item() == pytest.approx(references.token_mean(dropped, tokens))
    got, _ = gradients(loss, loss_inputs(tokens))
    everything, _ = gradients(clipped_surrogate, loss_inputs(tokens))
    assert torch.equal(got, everything * torch.tensor(weights, dtype=torch.float64))


@quick
@given(seeds)
def test_a_penalty_is_added_to_each_token_and_no_weight_scales_it(seed):
    tokens = references.random_tokens(seed)
    n = len(tokens.training)
    nothing_kept = partial(clipped_surrogate, keep=lambda inputs: torch.zeros_like(inputs.logprobs))
    out = nothing_kept(loss_inputs(tokens), penalty=lambda inputs: 2.0 * inputs.logprobs)
    expected = sum(2.0 * tokens.logprobs[b][t] for b, t in tokens.training) / n
    assert out.loss.item() == pytest.approx(expected, rel=1e-10)


@quick
@given(seeds)
def test_metrics_are_means_over_training_tokens(seed):
    tokens = references.random_tokens(seed, log_ratios=(-3.0, -0.3, 0.0, 0.1, 0.3, 1.0, 2.5))
    metrics = clipped_surrogate(loss_inputs(tokens), clip_low=0.2, clip_high=0.28).metrics
    both = ("logprobs", "old_logprobs")

    def gap(logprob: float, old: float) -> float:
        return math.exp(logprob - old) - 1 - (logprob - old)

    expected = {
        "clip_fraction": references.each(tokens, references.is_clipped, *both, "advantages", low=0.2, high=0.28),
        "approx_kl": references.each(tokens, gap, *both),
        "ratio": references.each(tokens, references.ratio, *both),
        "second_moment": references.each(tokens, lambda *pair: references.ratio(*pair) ** 2, *both),
        "entropy": tokens.entropy,
        "reference_kl": references.each(tokens, references.kl_estimate, "logprobs", "ref_logprobs"),
    }
    assert metrics.keys() == expected.keys()
    for name, values in expected.items():
        assert metrics[name].item() == pytest.approx(references.token_mean(values, tokens), rel=1e-9, abs=1e-12)
        assert not metrics[name].requires_grad


# -- what must not matter -----------------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(0, 3), st.integers(0, 3))
def test_padding_and_what_it_holds_do_not_matter(seed, left, right):
    tokens = references.random_tokens(seed)
    wide = padded(tokens, random.Random(seed), left=left, right=right)
    for options in ({}, {"dual_clip": 10.0, "reduce": partial(fixed_length_mean, length=9)}):
        loss = partial(clipped_surrogate, **every_term, **options)
        narrow_out, wide_out = loss(loss_inputs(tokens)), loss(loss_inputs(wide))
        assert wide_out.loss.item() == pytest.approx(narrow_out.loss.item(), rel=1e-12)
        for name, value in narrow_out.metrics.items():
            assert wide_out.metrics[name].item() == pytest.approx(value.item(), rel=1e-12)
        columns = slice(left, left + len(tokens.mask[0]))
        for got, expected in zip(gradients(loss, loss_inputs(wide)), gradients(loss, loss_inputs(tokens)), strict=True):
            assert torch.allclose(got[:, columns], expected, rtol=1e-12, atol=0)


@quick
@given(seeds)
def test_a_masked_token_has_exactly_no_gradient(seed):
    tokens = padded(references.random_tokens(seed), random.Random(seed), left=1, right=2)
    for reduce in (token_mean, partial(fixed_length_mean, length=9)):
        loss = partial(clipped_surrogate, dual_clip=10.0, reduce=reduce, **every_term)
        for gradient in gradients(loss, loss_inputs(tokens)):
            assert (gradient[~torch.tensor(tokens.mask)] == 0).all()
            assert gradient.isfinite().all()


@quick
@given(seeds)
def test_a_mini_batch_in_which_nothing_trains_has_loss_zero_and_no_gradient(seed):
    tokens = references.random_tokens(seed)
    tokens = dataclasses.replace(tokens, mask=[[False] * len(row) for row in tokens.mask])
    inputs = loss_inputs(padded(tokens, random.Random(seed), left=0, right=1))
    loss = partial(clipped_surrogate, **every_term)
    assert loss(inputs).loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients(loss, inputs))


@quick
@given(seeds)
def test_the_order_of_rows_does_not_matter(seed):
    tokens = references.random_tokens(seed)
    order = random.Random(seed).sample(range(len(tokens.mask)), len(tokens.mask))
    mixed = reordered(tokens, order)
    for reduce in (token_mean, partial(fixed_length_mean, length=9)):
        loss = partial(clipped_surrogate, reduce=reduce, **every_term)
        assert loss(loss_inputs(mixed)).loss.item() == pytest.approx(loss(loss_inputs(tokens)).loss.item(), rel=1e-10)
        for got, expected in zip(
            gradients(loss, loss_inputs(mixed)), gradients(loss, loss_inputs(tokens)), strict=True
        ):
            assert torch.allclose(got, expected[order], rtol=1e-12, atol=0)


@quick
@given(seeds)
def test_a_mask_of_numbers_trains_like_one_of_booleans(seed):
    inputs = loss_inputs(references.random_tokens(seed))
    numbers = dataclasses.replace(inputs, mask=inputs.mask.double())
    loss = partial(clipped_surrogate, dual_clip=10.0, **every_term)
    assert loss(numbers).loss.item() == pytest.approx(loss(inputs).loss.item(), rel=1e-12)


def test_the_loss_in_single_precision_is_finite_at_any_log_ratio():
    logprobs = torch.tensor([[-500.0, 0.0, -1.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs, torch.tensor([[0.0, -500.0, -1.0]]), torch.tensor([[5.0, -5.0, 1.0]]), torch.ones(1, 3).bool()
    )
    loss = clipped_surrogate(inputs).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, logprobs)[0].isfinite().all()


@quick
@given(seeds, st.sampled_from([torch.float16, torch.bfloat16]), st.sampled_from([token_mean, sequence_mean]))
def test_half_precision_numbers_are_computed_with_in_single_precision(seed, dtype, reduce):
    tokens = loss_inputs(references.random_tokens(seed))
    half = {name: getattr(tokens, name).detach().to(dtype) for name in NUMBERS}
    every = {**every_term, "dual_clip": 3.0, "max_second_moment": 2.0, "reduce": reduce}
    (loss, slope), (exact, exact_slope) = (
        (out.loss.detach(), torch.autograd.grad(out.loss, logprobs)[0].double())
        for numbers in (half, {name: values.float() for name, values in half.items()})
        for logprobs in [numbers["logprobs"].clone().requires_grad_()]
        for out in [clipped_surrogate(LossInputs(**(numbers | {"logprobs": logprobs}), mask=tokens.mask), **every)]
    )
    assert float(loss) == pytest.approx(float(exact), rel=1e-6)
    exact_slope = exact_slope.to(dtype).double()  # which float16 may not hold
    size = exact_slope[exact_slope.isfinite()].abs().max() if exact_slope.isfinite().any() else 0.0
    torch.testing.assert_close(slope, exact_slope, rtol=0.03, atol=0.03 * float(size) + 1e-6)


def test_the_largest_ratio_is_finite_in_half_precision():
    old, advantages = torch.tensor([[-30.0, -1.0, -30.0]]).half(), torch.tensor([[1.0, -1.0, 0.0]]).half()
    logprobs = torch.tensor([[-1.0, -30.0, -1.0]]).half().requires_grad_()
    out = clipped_surrogate(LossInputs(logprobs, old, advantages, torch.ones(1, 3, dtype=torch.bool)))
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx((-1.28 + 0.8) / 3, abs=1e-6)
    assert all(math.isfinite(value) for value in [*logprobs.grad[0].tolist(), *map(float, out.metrics.values())])
