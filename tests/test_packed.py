"""The engine's fast way, on the CPU: rows end to end, streamed generation, half precision with float32 masters."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Categorical
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import random_batch
from spear_rl.engines.base import NonFiniteLossError, Term
from spear_rl.engines.generation.continuous import SlotDecoder
from spear_rl.engines.generation.kv_slots import Slots
from spear_rl.engines.generation.padded import nucleus, sampled
from spear_rl.engines.generation.sampling import chosen, uniforms
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import UserError
from spear_rl.functional import clipped_surrogate
from spear_rl.rollout import ChatRenderer, Sampling
from spear_rl.types import ShortPrompt

VOCABULARY = 250


def small_llama(tokenizer) -> LlamaForCausalLM:
    """Grouped key-value heads, unlike the tiny models from scratch."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {"tiny": lambda tokenizer: tiny_model("tiny-xs", tokenizer, seed=0), "grouped": small_llama}


@pytest.fixture(scope="session", params=MODELS)
def make(request, tokenizer):
    """Engines that start from the same weights."""

    def engine(**options) -> HFEngine:
        options = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "sampling": Sampling(max_new_tokens=6)} | options
        return HFEngine(MODELS[request.param](tokenizer), tokenizer, **options)

    return engine


def gradients(engine: HFEngine, batch) -> tuple[dict[str, float], list[torch.Tensor]]:
    metrics = engine.update([Term("policy", batch, clipped_surrogate)])
    return metrics, [p.grad.clone() for p in engine.model.parameters()]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_packed_rows_train_as_padded_ones_do_however_they_are_cut(make, seed):
    rng = random.Random(seed)
    batch = random_batch(rng, rows=rng.randint(2, 8), vocabulary=VOCABULARY)
    expected, theirs = gradients(make(packed=False), batch)
    for options in ({}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 40, "max_kept_tokens": 0}):
        metrics, mine = gradients(make(packed=True, **options), batch)
        assert metrics == pytest.approx(expected, rel=2e-4, abs=1e-6)
        for a, b in zip(mine, theirs, strict=True):
            # Sums in another order: an entry near 0 differs by the rounding of the large ones.
            torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5 + 1e-4 * float(b.abs().max()))


def test_checkpointed_layers_give_the_same_gradients(make):
    batch = random_batch(random.Random(0), rows=5, vocabulary=VOCABULARY)
    expected, theirs = gradients(make(packed=True), batch)
    metrics, mine = gradients(make(packed=True, checkpointing=True), batch)
    assert metrics == pytest.approx(expected, rel=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def forward_scores(engine: HFEngine, prompt: list[int], written: list[int], temperature: float) -> torch.Tensor:
    ids = torch.tensor([*prompt, *written])[None]
    with torch.no_grad():
        scores = (engine.model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    return scores[len(prompt) - 1 : -1]


def forward_logprobs(engine: HFEngine, prompt: list[int], written: list[int], temperature: float = 1.0) -> torch.Tensor:
    return forward_scores(engine, prompt, written, temperature)[range(len(written)), written]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), num_slots=st.integers(1, 12))
def test_streamed_log_probabilities_are_those_of_a_plain_forward(make, seed, num_slots):
    rng = random.Random(seed)
    engine = make(packed=True, num_slots=num_slots, sampling=Sampling(max_new_tokens=9, temperature=0.7), seed=seed)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(10)]
    prompts += [prompts[0], prompts[3][:1] or prompts[3]]
    for prompt, completion in zip(prompts, engine.generate(prompts), strict=True):
        expected = forward_logprobs(engine, prompt, completion.token_ids, 0.7)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-3, atol=1e-4)
        entropies = Categorical(logits=forward_scores(engine, prompt, completion.token_ids, 0.7)).entropy()
        torch.testing.assert_close(torch.tensor(completion.entropies), entropies, rtol=1e-3, atol=1e-4)
        assert completion.truncated == (completion.token_ids[-1] != engine.tokenizer.eos_token_id)


def played(engine: HFEngine, tokenizer, rng: random.Random, *, keys: int, turns: int) -> dict:
    """Growing conversations whose answers come back in a random order, and prompts that share only a beginning."""
    renderer, stream = ChatRenderer(tokenizer), engine.stream()
    said: dict = {}
    left = dict.fromkeys(range(keys), turns)
    prompts = {key: renderer.prompt([{"role": "user", "content": f"red code {key % 3}"}]) for key in range(keys)}
    waiting = list(prompts)
    while waiting or len(stream):
        rng.shuffle(waiting)
        for key in waiting[: rng.randint(0 if len(stream) else 1, len(waiting))]:
            waiting.remove(key)
            stream.add(key, prompts[key])
        for key, completion in stream.finished():
            said.setdefault(key, []).append((prompts[key], completion))
            left[key] -= 1
            if left[key]:
                reply = f"blue code {key % 5}"
                whole = renderer.extended(prompts[key], completion.token_ids, reply)
                # Every third conversation starts over with a prompt that shares only its beginning with the last one.
                prompts[key] = (
                    whole if key % 3 else [*prompts[key][:3], *renderer.prompt([{"role": "user", "content": reply}])]
                )
                waiting.append(key)
    return said


def test_what_is_written_does_not_depend_on_the_order_in_which_prompts_come(make, tokenizer):
    first = played(make(packed=True, num_slots=16), tokenizer, random.Random(1), keys=12, turns=4)
    for seed, num_slots in ((2, 16), (3, 5)):
        assert_same_text(
            played(make(packed=True, num_slots=num_slots), tokenizer, random.Random(seed), keys=12, turns=4), first
        )


def assert_same_text(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for key, turns in expected.items():
        for (prompt, completion), (other_prompt, other) in zip(turns, got[key], strict=True):
            assert (prompt, completion.token_ids) == (other_prompt, other.token_ids)
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_conversations_that_go_on_feed_only_what_is_new(make, tokenizer, monkeypatch):
    engine = make(packed=True, num_slots=4)
    fed: list[int] = []
    read = SlotDecoder._prefill
    monkeypatch.setattr(
        SlotDecoder,
        "_prefill",
        lambda self, batch: fed.append(sum(len(w.prompt) - w.num_cached for w in batch)) or read(self, batch),
    )
    stream = engine.stream()
    prompt = list(range(5, 45))
    stream.add(7, prompt)
    [(_, completion)] = stream.finished()
    longer = [*prompt, *completion.token_ids, 9, 8, 7]
    stream.add(7, longer)
    [(_, second)] = stream.finished()
    assert fed == [40, 3 + 1]  # the last token written was never fed before
    torch.testing.assert_close(
        torch.tensor(second.logprobs), forward_logprobs(engine, longer, second.token_ids), rtol=1e-3, atol=1e-4
    )


def test_siblings_prompts_are_read_once(make, monkeypatch):
    engine = make(packed=True, num_slots=8)
    fed: list[int] = []
    read = SlotDecoder._prefill
    monkeypatch.setattr(SlotDecoder, "_prefill", lambda self, batch: fed.append(len(batch)) or read(self, batch))
    completions = engine.generate([[5, 6, 7]] * 8)
    assert fed == [1]
    assert len({tuple(c.token_ids) for c in completions}) > 1


def test_slots_grow_with_the_longest_prompt_and_lose_nothing(make):
    engine = make(packed=True, num_slots=3)
    stream = engine.stream()
    stream.add(0, [5, 6, 7])
    [(_, first)] = stream.finished()
    stream.add(1, list(range(1, 200)) * 4)
    stream.add(0, [5, 6, 7, *first.token_ids, 9])
    done = {}
    while len(stream):
        done |= dict(stream.finished())
    expected = forward_logprobs(engine, [5, 6, 7, *first.token_ids, 9], done[0].token_ids)
    torch.testing.assert_close(torch.tensor(done[0].logprobs), expected, rtol=1e-3, atol=1e-4)


def test_a_prompt_too_long_to_be_read_at_once_is_read_in_parts(make, monkeypatch):
    monkeypatch.setattr("spear_rl.engines.generation.continuous.PREFILL_SIZES", (8, 16))
    engine = make(packed=True, num_slots=4)
    prompts = [[5 + n % 7 for n in range(length)] for length in (50, 3, 16, 33)]
    for prompt, completion in zip(prompts, engine.generate(prompts), strict=True):
        expected = forward_logprobs(engine, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-3, atol=1e-4)


def test_a_stop_string_ends_a_completion_with_its_last_character(make, tokenizer):
    engine = make(packed=True, sampling=Sampling(max_new_tokens=40, stop=("e",)), num_slots=64)
    completions = engine.generate([[5, 6, 7 + n] for n in range(60)])
    texts = [tokenizer.decode(c.token_ids) for c in completions]
    ended = [text for text, c in zip(texts, completions, strict=True) if "e" in text]
    assert ended
    for text, completion in zip(texts, completions, strict=True):
        assert "e" not in tokenizer.decode(completion.token_ids[:-1])
        assert not ("e" in text and completion.truncated)


def test_a_prompt_with_a_limit_of_its_own_is_cut_there(make):
    prompts = [[5, 6, 7], [9, 8], [11, 12]]
    options = {"packed": True, "sampling": Sampling(max_new_tokens=8), "end_ids": []}
    whole = make(**options).generate(prompts)
    limited = make(**options).generate([ShortPrompt(p, (), n) for p, n in zip(prompts, (3, 20, 1), strict=True)])
    for cut, full, most in zip(limited, whole, (3, 8, 1), strict=True):
        assert (cut.token_ids, cut.truncated) == (full.token_ids[:most], True)


def test_no_end_token_means_full_length(make):
    engine = make(packed=True, end_ids=(), sampling=Sampling(max_new_tokens=30), num_slots=64)
    assert all(len(c.token_ids) == 30 and c.truncated for c in engine.generate([[5, 6]] * 64))


def test_greedy_takes_the_likeliest_token_and_evaluating_leaves_training_as_it_was(make):
    engine, other = make(packed=True), make(packed=True)
    first = engine.generate([[5, 6, 7]] * 4)
    greedy = engine.evaluation_generator(Sampling(max_new_tokens=6, temperature=0), seed=1).generate([[5, 6, 7]] * 2)
    ids = torch.tensor([5, 6, 7])[None]
    with torch.no_grad():
        assert greedy[0].token_ids[0] == int(engine.model(input_ids=ids).logits[0, -1].argmax())
    assert greedy[0] == greedy[1]
    assert [c.token_ids for c in other.generate([[5, 6, 7]] * 4)] == [c.token_ids for c in first]
    assert engine.generate([[5, 6, 7]] * 4) == other.generate([[5, 6, 7]] * 4)


def test_weights_that_ran_away_are_reported(make):
    engine = make(packed=True)
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLossError, match="have diverged"):
        engine.generate([[5, 6]])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8)])
def test_sampled_tokens_follow_the_exact_distribution(make, temperature, top_p):
    """Chi-square: with 60,000 draws a wrong probability of a few percent would show."""
    engine = make(packed=True, end_ids=(), num_slots=500, sampling=Sampling(1, temperature, top_p))
    prompt, draws = [5, 6, 7], 60_000
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor(prompt)[None]).logits[0, -1] / temperature
    exact = nucleus(logits.softmax(-1)[None].double(), top_p)[0]
    exact /= exact.sum()
    counts = torch.zeros_like(exact)
    for _ in range(draws // 500):
        for completion in engine.generate([prompt] * 500):
            counts[completion.token_ids[0]] += 1
    assert counts[exact == 0].sum() == 0
    common = exact * draws >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([exact[common], exact[~common].sum()[None]]) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # beyond five deviations of chi-square: chance 1e-6


def test_later_tokens_follow_the_exact_distribution_too(make):
    engine = make(packed=True, end_ids=(), num_slots=500, sampling=Sampling(2))
    first, second = [], []
    for _ in range(20):
        for completion in engine.generate([[5, 6, 7]] * 500):
            first.append(completion.token_ids[0])
            second.append(completion.token_ids[1])
    likeliest = max(set(first), key=first.count)
    followers = torch.tensor([b for a, b in zip(first, second, strict=True) if a == likeliest])
    with torch.no_grad():
        exact = engine.model(input_ids=torch.tensor([[5, 6, 7, likeliest]])).logits[0, -1].softmax(-1).double()
    counts = torch.bincount(followers, minlength=len(exact)).double()
    common = exact * len(followers) >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([exact[common], exact[~common].sum()[None]]) * len(followers)
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_chance_at_either_end_picks_a_token_that_can_be():
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 3)
    tokens, scores, entropies = chosen(logits, torch.tensor([1e-8, 0.5, 1.0]), temperature=1.0, top_p=1.0)
    assert tokens.tolist() == [1, 2, 2]
    assert torch.isfinite(scores).all()
    torch.testing.assert_close(entropies, Categorical(logits=logits[:, 1:3]).entropy())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.5), (0.0, 1.0)])
def test_an_entropy_is_that_of_the_distribution_whose_log_probability_is_given(temperature, top_p):
    """Of the full one: top_p changes neither, and greedy decoding has those of temperature 1."""
    logits, rng = 3 * torch.randn(50, 300), torch.Generator().manual_seed(0)
    full = Categorical(logits=logits / (temperature or 1.0))
    drawn = sampled(logits, Sampling(temperature=temperature, top_p=top_p), rng)
    for tokens, scores, entropies in (drawn, chosen(logits, torch.rand(50), temperature=temperature, top_p=top_p)):
        torch.testing.assert_close(scores, full.log_prob(tokens), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(entropies, full.entropy(), rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_random_numbers_hang_on_their_seed_and_place_alone(seed):
    several = uniforms(torch.tensor([seed, seed ^ 1, seed]), 64)
    assert torch.equal(several[0], several[2])
    assert not torch.equal(several[0], several[1])
    assert torch.equal(several[:1], uniforms(torch.tensor([seed]), 64))
    assert ((several > 0) & (several < 1)).all()


def test_random_numbers_are_uniform():
    numbers = uniforms(torch.arange(1000), 100).flatten()
    counts = torch.histc(numbers, 50, 0, 1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 49 + 5 * 98**0.5


def test_half_precision_learns_steps_too_small_for_it(make):
    """A rate of 1e-5 moves no bfloat16 weight near 1 in one step; the float32 masters add them up."""
    engine = make(packed=True, dtype=torch.bfloat16, learning_rate=1e-5, weight_decay=0.0)
    exact = make(packed=True, learning_rate=1e-5, weight_decay=0.0)
    assert all(p.dtype == torch.bfloat16 for p in engine.model.parameters())
    batch = random_batch(random.Random(0), rows=4, vocabulary=VOCABULARY)
    start = {name: p.detach().clone() for name, p in exact.model.named_parameters()}
    for _ in range(20):
        engine.update([Term("policy", batch, clipped_surrogate)])
        exact.update([Term("policy", batch, clipped_surrogate)])
    learned, full = engine._masters.exact_weights(), dict(exact.model.named_parameters())
    moved, should = (torch.cat([(w[n] - start[n]).flatten() for n in start]) for w in (learned, full))
    assert torch.cosine_similarity(moved, should.detach(), dim=0) > 0.95
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, learned[name].to(torch.bfloat16))


def test_a_saved_half_precision_engine_loads_with_its_exact_weights(make, tmp_path):
    from spear_rl.engines.models.load import model_in_folder

    engine = make(packed=True, dtype=torch.bfloat16)
    engine.update([Term("policy", random_batch(random.Random(0), rows=4, vocabulary=VOCABULARY), clipped_surrogate)])
    engine.save(tmp_path)
    model, tokenizer = model_in_folder(tmp_path)
    again = HFEngine(model, tokenizer, packed=True, dtype=torch.bfloat16)
    for name, weight in engine._masters.exact_weights().items():
        assert torch.equal(weight, again._masters.exact_weights()[name])


def test_slots_are_kept_for_their_conversation_until_another_needs_them(make):
    slots = Slots(make(packed=True).model, 2)
    slots.make_room(10)
    (a, _), (b, _) = slots.take(1, [1, 2, 3]), slots.take(2, [4])
    assert slots.take(3, [5]) is None
    slots.release(a, [1, 2, 3])
    slots.release(b, [4])
    assert slots.take(1, [1, 2, 9, 9]) == (a, 2)
    assert slots.take(3, [4, 5]) == (b, 0)
    assert slots.take(2, [4]) is None


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1), min_size=1))
def test_a_slot_is_reused_up_to_the_first_token_that_differs_but_the_last_is_always_fed(held, prompt):
    slots = Slots(
        SimpleNamespace(config=LlamaConfig(), device="cpu", get_input_embeddings=lambda: nn.Embedding(1, 1)), 1
    )
    slots.release(slots.take(0, held)[0], held)
    _, reused = slots.take(0, prompt)
    assert reused < len(prompt)
    assert held[:reused] == prompt[:reused]
    assert reused in (len(held), len(prompt) - 1) or held[reused] != prompt[reused]


def test_a_model_whose_attention_is_not_plain_is_refused_in_one_sentence(tokenizer):
    model = small_llama(tokenizer)
    model.config.sliding_window = 4
    with pytest.raises(UserError, match=r"engine\.attention=packed"):
        HFEngine(model, tokenizer, packed=True)
    assert not HFEngine(model, tokenizer).packed
