"""The transformers engine: what it learns never depends on how a batch is cut, and it samples what it scores."""

from __future__ import annotations

import copy
import random
from dataclasses import fields
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_batch
from spear_rl.engines.base import Batch, NonFiniteLossError, Term
from spear_rl.engines.generation.padded import StopStrings
from spear_rl.engines.hf import token_scores
from spear_rl.functional import (
    LossOutput,
    clipped_surrogate,
    fixed_length_mean,
    high_covariance_penalty,
    keep_low_covariance,
    sequence_mean,
)
from spear_rl.rollout import ChatRenderer, Sampling
from spear_rl.types import ShortPrompt

# (options of the loss, whether it draws at random)
LOSSES = {
    "token mean": {},
    "sequence mean": {"reduce": sequence_mean, "entropy_bonus": 0.1},
    "fixed length": {"reduce": partial(fixed_length_mean, length=20), "dual_clip": 10.0},
    "entropy bonus": {"entropy_bonus": 0.1},
    "rows held back": {"max_second_moment": 1.5, "entropy_bonus": 0.1},
    "kl-cov": {"penalty": partial(high_covariance_penalty, fraction=0.2, beta=1.0)},
    "clip-cov": {},
}


def loss_called(name: str):
    if name != "clip-cov":
        return partial(clipped_surrogate, **LOSSES[name])
    generator = torch.Generator().manual_seed(3)
    keep = partial(keep_low_covariance, fraction=0.1, low=0.0, high=1e9, generator=generator)
    return partial(clipped_surrogate, keep=keep)


def result_of(engine, batch: Batch, loss) -> tuple[dict[str, float], list[torch.Tensor]]:
    metrics = engine.update([Term("policy", batch, loss, 0.7)])
    return metrics, [p.grad.clone() for p in engine.model.parameters()]


def assert_same(got, expected) -> None:
    for name, value in expected[0].items():
        assert got[0][name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
    for mine, theirs in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-5)


def widened(batch: Batch, extra: int) -> Batch:
    return Batch(*(torch.nn.functional.pad(getattr(batch, f.name), (0, extra)) for f in fields(batch)))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_depends_on_micro_batches_padding_or_row_order(make_engine_once, name, seed):
    rng = random.Random(seed)
    batch = random_batch(rng, rows=rng.randint(2, 8), vocabulary=250)
    one_piece = result_of(make_engine_once(micro_batch_tokens=10**9), batch, loss_called(name))
    order = torch.tensor(rng.sample(range(len(batch)), len(batch)))
    variants = {
        "a row a time": (make_engine_once(micro_batch_tokens=1), batch),
        "computed twice": (make_engine_once(micro_batch_tokens=40, max_kept_tokens=0), batch),
        "padded": (make_engine_once(micro_batch_tokens=10**9), widened(batch, 7)),
        "shuffled": (make_engine_once(micro_batch_tokens=60), batch.rows(order)),
    }
    for engine, variant in variants.values():
        assert_same(result_of(engine, variant, loss_called(name)), one_piece)


@pytest.fixture(scope="session")
def make_engine_once(tokenizer):
    """As make_engine, for hypothesis, which wants fixtures of a wider scope."""
    from spear_rl.engines.hf import HFEngine
    from spear_rl.engines.models.tiny import tiny_model

    def make(**options):
        options = {"learning_rate": 1e-3, "max_grad_norm": 1e9} | options
        return HFEngine(tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, **options)

    return make


def test_masked_tokens_move_nothing(make_engine):
    batch = random_batch(random.Random(0), rows=4, vocabulary=250)
    other = Batch(
        batch.input_ids,
        batch.attention,
        batch.mask,
        torch.where(batch.mask, batch.old_logprobs, 7.0),
        torch.where(batch.mask, batch.advantages, 1e6),
    )
    _, expected = result_of(make_engine(), batch, clipped_surrogate)
    _, got = result_of(make_engine(), other, clipped_surrogate)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_two_terms_give_the_weighted_sum_of_their_gradients(make_engine):
    first, second = (random_batch(random.Random(seed), rows=3, vocabulary=250) for seed in (1, 2))
    both, one, two = (make_engine(max_grad_norm=1e9) for _ in range(3))
    both.update([Term("policy", first, clipped_surrogate), Term("replay", second, clipped_surrogate, 0.3)])
    one.update([Term("policy", first, clipped_surrogate)])
    two.update([Term("replay", second, clipped_surrogate)])
    for p, a, b in zip(both.model.parameters(), one.model.parameters(), two.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, a.grad + 0.3 * b.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_that_is_not_finite_changes_no_weight(make_engine):
    engine = make_engine()
    before = [p.clone() for p in engine.model.parameters()]
    batch = random_batch(random.Random(0), rows=2, vocabulary=250)

    def broken(inputs):
        return LossOutput(inputs.logprobs.sum() * float("nan"), {})

    with pytest.raises(NonFiniteLossError, match="policy loss is nan"):
        engine.update([Term("policy", batch, broken)])
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), before, strict=True))


def test_rows_padded_on_the_left_are_refused(make_engine):
    batch = random_batch(random.Random(0), rows=3, vocabulary=250, extra=3)
    flipped = Batch(*(getattr(batch, f.name).flip(1) for f in fields(batch)))
    with pytest.raises(ValueError, match="padded on the right"):
        make_engine().update([Term("policy", flipped, clipped_surrogate)])


def test_the_short_way_to_logits_and_the_whole_model_agree(make_engine):
    engine = make_engine()
    batch = random_batch(random.Random(4), rows=4, vocabulary=250)
    (rows,) = engine._micro_batches(batch)
    short, whole = (token_scores(engine.model, rows, plain_head=is_plain) for is_plain in (True, False))
    for mine, theirs in zip(short, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_logits_in_pieces_are_the_same_logits(make_engine, monkeypatch):
    engine = make_engine(max_grad_norm=1e9)
    batch = random_batch(random.Random(5), rows=5, vocabulary=250)
    expected = result_of(engine, batch, partial(clipped_surrogate, entropy_bonus=0.1))
    monkeypatch.setattr("spear_rl.engines.hf.MAX_LOGITS", 1000)
    assert_same(
        result_of(make_engine(max_grad_norm=1e9), batch, partial(clipped_surrogate, entropy_bonus=0.1)), expected
    )


def test_sampled_log_probabilities_match_the_training_forward_over_growing_conversations(make_engine, tokenizer):
    engine, renderer = make_engine(sampling=Sampling(max_new_tokens=5)), ChatRenderer(tokenizer)
    prompts = [
        renderer.prompt([{"role": "user", "content": text}]) for text in ["red code ?", "red code ?", "look 7 8"]
    ]
    for turn in range(4):
        for prompt, completion in zip(prompts, completions := engine.generate(prompts), strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            mask = torch.zeros_like(ids, dtype=torch.bool)
            mask[0, len(prompt) :] = True
            nothing = torch.zeros(ids.shape)
            rows = Batch(ids, torch.ones_like(mask), mask, nothing, nothing)
            scored, entropies = (values[0, len(prompt) :] for values in engine.scored(rows))
            torch.testing.assert_close(scored, torch.tensor(completion.logprobs), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(entropies, torch.tensor(completion.entropies), rtol=1e-4, atol=1e-4)
        replies = ["right", "wrong " * (turn + 1), ""]
        prompts = [renderer.extended(p, c.token_ids, r) for p, c, r in zip(prompts, completions, replies, strict=False)]
        if turn == 1:
            prompts = prompts[::-2]  # some episodes end, and the order changes


def test_a_conversation_costs_only_its_new_tokens(make_engine, tokenizer, monkeypatch):
    engine, renderer = make_engine(), ChatRenderer(tokenizer)
    prompts = [renderer.prompt([{"role": "user", "content": "red code 1 2 3 4 5 6 7"}])] * 6
    widths = []
    original = engine._native._decoder._feed

    def counted(memory, ids, real):
        widths.append(tuple(ids.shape))
        return original(memory, ids, real)

    monkeypatch.setattr(engine._native._decoder, "_feed", counted)
    completions = engine.generate(prompts)
    assert widths[0] == (1, len(prompts[0])), "siblings share one prefill"
    longer = [renderer.extended(p, c.token_ids, "wrong") for p, c in zip(prompts, completions, strict=True)]
    widths.clear()
    engine.generate(longer)
    assert widths[0][0] == 6
    assert widths[0][1] < len(longer[0]) / 2
    engine.sync()
    widths.clear()
    engine.generate(longer)
    assert widths[0][1] == max(map(len, longer)), "new weights make the old cache worthless"


def test_sampling_follows_the_exact_distribution(make_engine):
    engine = make_engine(sampling=Sampling(max_new_tokens=1, temperature=0.8))
    prompt, draws = [5, 9, 12], 20_000
    with torch.no_grad():
        exact = (engine.model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
    counts = torch.zeros_like(exact)
    for completion in engine.generate([prompt] * draws):
        counts[completion.token_ids[0]] += 1
        assert completion.logprobs[0] == pytest.approx(float(exact[completion.token_ids[0]].log()), abs=1e-4)
    likely = exact * draws >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([exact[likely], exact[~likely].sum()[None]]) * draws
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_top_p_never_leaves_the_nucleus(make_engine):
    engine = make_engine(sampling=Sampling(max_new_tokens=1, top_p=0.3))
    with torch.no_grad():
        exact = engine.model(torch.tensor([[5, 9]])).logits[0, -1].softmax(-1)
    ordered, order = exact.sort(descending=True)
    nucleus = set(order[: int((ordered.cumsum(0) < 0.3).sum()) + 1].tolist())
    assert {c.token_ids[0] for c in engine.generate([[5, 9]] * 500)} <= nucleus


def test_a_prompt_with_a_limit_of_its_own_gets_the_first_tokens_of_what_it_would_have_got(make_engine):
    """And says that it was cut; one that ends by itself within its limit does not."""
    engine = make_engine(sampling=Sampling(max_new_tokens=8, temperature=0.0), end_ids=[])
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
    whole = engine.generate(prompts)
    limited = [ShortPrompt(p, (), most) for p, most in zip(prompts, (3, 20, 1), strict=True)]
    for number, (cut, full, most) in enumerate(zip(engine.generate(limited), whole, (3, 8, 1), strict=True)):
        assert cut.token_ids == full.token_ids[:most], number
        assert cut.logprobs == pytest.approx(full.logprobs[:most], abs=1e-5)
        assert cut.truncated
    first = whole[0].token_ids[0]
    ending = make_engine(sampling=Sampling(max_new_tokens=8, temperature=0.0), end_ids=[first])
    [completion] = ending.generate([ShortPrompt(prompts[0], (), 1)])
    assert (completion.token_ids, completion.truncated) == ([first], False)


def test_temperature_zero_takes_the_likeliest_token(make_engine):
    engine = make_engine(sampling=Sampling(max_new_tokens=1, temperature=0.0))
    with torch.no_grad():
        best = int(engine.model(torch.tensor([[5, 9]])).logits[0, -1].argmax())
    assert engine.generate([[5, 9]])[0].token_ids == [best]


def test_a_stop_string_ends_a_completion(make_engine, tokenizer):
    free = make_engine(sampling=Sampling(max_new_tokens=12)).generate([[5, 9]])[0]
    word = tokenizer.decode(free.token_ids[:3])
    stopped = make_engine(sampling=Sampling(max_new_tokens=12, stop=(word,))).generate([[5, 9]])[0]
    assert tokenizer.decode(stopped.token_ids).endswith(word)
    assert not stopped.truncated


def test_evaluating_leaves_the_training_stream_as_it_was(make_engine):
    disturbed, left_alone = make_engine(), make_engine()
    disturbed.evaluation_generator(Sampling(max_new_tokens=8, temperature=0.4), seed=5).generate([[5, 9, 3]] * 3)
    assert disturbed.generate([[5, 9]] * 4) == left_alone.generate([[5, 9]] * 4)


def test_a_restored_engine_goes_on_as_if_never_stopped(make_engine):
    batch = random_batch(random.Random(1), rows=3, vocabulary=250)
    first, second = make_engine(), make_engine(seed=99)
    first.update([Term("policy", batch, clipped_surrogate)])
    first.generate([[5, 9]])
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for engine in (first, second):
        engine.update([Term("policy", batch, clipped_surrogate)])
        engine.sync()
    assert first.generate([[5, 9]] * 4) == second.generate([[5, 9]] * 4)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_kl_to_the_reference_starts_at_zero_and_pulls_back(make_engine):
    engine = make_engine(learning_rate=1e-2)
    engine.set_reference()
    batch = random_batch(random.Random(2), rows=4, vocabulary=250)
    loss = partial(clipped_surrogate, kl_coefficient=0.5)
    metrics = [engine.update([Term("policy", batch, loss)]) for _ in range(3)]
    assert metrics[0]["policy/reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["policy/reference_kl"] > 0


@given(seed=st.integers(0, 10**6), length=st.integers(1, 90))
def test_a_stop_string_of_any_length_ends_a_completion_at_its_last_token(tokenizer, seed, length):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab <>/1\n") for _ in range(120))
    begin = rng.randrange(len(text) - length)
    stop = text[begin : begin + length]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stops = StopStrings(tokenizer, [stop, "never"])
    ended = next(n for n in range(1, len(ids) + 1) if stops.end(ids[:n]))
    assert ended == next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
