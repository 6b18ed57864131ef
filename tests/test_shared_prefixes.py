"""What packed rows have in common at their beginning is computed once, and nothing else changes."""

from __future__ import annotations

import gc
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from spear_rl.engines.base import Batch, Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.packed import attention, layout, tree
from spear_rl.functional import clipped_surrogate

VOCABULARY = 250
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen": (Qwen2Config, Qwen2ForCausalLM)}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def model_of(kind: str, **shape):
    """Grouped key-value heads, and weights large enough for wrong attention to show."""
    config, cls = KINDS[kind]
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.2, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    return cls(config(**(sizes | shape)))


def engine_of(tokenizer, kind: str = "llama", *, share: bool, **options) -> HFEngine:
    options = {"packed": True, "compiled": False, "max_grad_norm": 1e9, "num_slots": 4} | options
    return HFEngine(model_of(kind), tokenizer, share_prefixes=share, **options)


def batch_of(rng: random.Random, rows: list[list[int]], masks: list[list[bool]] | None = None) -> Batch:
    """Rows padded on the right; random trained tokens, in several places of a row, unless `masks` says which."""
    width = max(map(len, rows)) + rng.randint(0, 2)
    ids, old, advantages = torch.zeros(len(rows), width, dtype=torch.int64), *torch.zeros(2, len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    lengths = torch.tensor([len(row) for row in rows])
    for n, row in enumerate(rows):
        ids[n, : len(row)] = torch.tensor(row)
        own = [rng.random() < 0.5 for _ in row] if masks is None else masks[n]
        mask[n, 1 : len(row)] = torch.tensor(own[1:], dtype=torch.bool)
        old[n] = torch.tensor([rng.uniform(-6, -4) for _ in range(width)])
        advantages[n] = torch.tensor([rng.gauss(0, 2) for _ in range(width)])
    mask[:, 1] |= lengths > 1
    return Batch(ids, torch.arange(width) < lengths[:, None], mask, old, advantages)


def random_tree(rng: random.Random, size: int) -> list[list[int]]:
    """Rows that branch off each other anywhere, some of them twice there, some a prefix of another."""
    rows = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 12))]]
    while len(rows) < size:
        row = rng.choice(rows)
        begin = rng.randint(0, len(row))
        # Few distinct tokens, 0 (the padding's number) among them, so that branches meet again.
        rows.append((row[:begin] + [rng.randrange(3) for _ in range(rng.randint(0, 6))])[:30] or [0, 1])
        if len(rows[-1]) < 2:
            rows[-1] = [*rows[-1], 1]
    rng.shuffle(rows)
    return rows


def results(engine: HFEngine, batch: Batch) -> list[torch.Tensor]:
    scores = engine.scored(batch)
    engine.update([Term("policy", batch, clipped_surrogate)])
    trained = engine._masters.trained
    return [*scores, *(p.grad.clone() for p in trained if p.grad is not None)]


def assert_same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_scores_and_gradients_are_those_of_separate_rows_however_they_are_cut(tokenizer, kind, seed):
    rng = random.Random(seed)
    batch = batch_of(rng, random_tree(rng, rng.randint(1, 12)))
    expected = results(engine_of(tokenizer, kind, share=False), batch)
    assert_same(results(engine_of(tokenizer, kind, share=False, packed=False), batch), expected)
    for options in ({}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 25, "max_kept_tokens": 30}):
        assert_same(results(engine_of(tokenizer, kind, share=True, **options), batch), expected)


SHAPES = {
    "the same row three times": [[5, 6, 7, 8]] * 3,
    "a row that is a prefix of another": [[5, 6, 7, 8, 9, 10], [5, 6, 7], [5, 6]],
    "nothing in common": [[5, 6, 7], [6, 7, 8], [7, 8, 9]],
    "the same first token": [[5, 6], [5, 7], [5, 8]],
    "zeros at the end, as padding has": [[5, 6], [5, 6, 0], [5, 6, 0, 0], [5, 6, 0, 1]],
    "a single row": [[5, 6, 7]],
}


@pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
def test_rows_of_special_shapes_train_as_separate_ones_do(tokenizer, rows):
    batch = batch_of(random.Random(3), rows, [[True] * len(row) for row in rows])
    expected = results(engine_of(tokenizer, share=False), batch)
    assert_same(results(engine_of(tokenizer, share=True), batch), expected)


def episodes(rng: random.Random, *, groups: int, size: int, turns: int, first: int, log: int, answer: int):
    """Rows of episodes in layout "log", and which of their tokens are trained: the answers, after a suffix of 5."""

    def text(length: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(length)]

    rows, masks, suffix = [], [], text(5)
    for _ in range(groups):
        opening = text(first)
        for _ in range(size):
            prompt = opening
            for _ in range(turns):
                rows.append([*prompt, *suffix, *text(answer)])
                masks.append([False] * (len(prompt) + 5) + [True] * answer)
                prompt = prompt + text(log)
    return rows, masks


def test_the_turns_of_an_episode_are_fed_once(tokenizer):
    rng = random.Random(0)
    rows, masks = episodes(rng, groups=2, size=3, turns=5, first=30, log=6, answer=3)
    batch = batch_of(rng, rows, masks)
    fed = {
        share: sum(p.model_inputs["input_ids"].numel() for p in engine_of(tokenizer, share=share)._micro_batches(batch))
        for share in (False, True)
    }
    assert fed[False] == sum(map(len, rows))
    # Where a turn's log and the suffix happen to begin alike, one token more is shared.
    assert 0 <= 2 * 30 + 2 * 3 * (4 * 6 + 5 * 8) - fed[True] <= 20


def test_micro_batches_respect_the_budget_of_distinct_tokens(tokenizer):
    rng = random.Random(1)
    rows, masks = episodes(rng, groups=3, size=4, turns=6, first=40, log=3, answer=2)
    batch, budget = batch_of(rng, rows, masks), 80
    parts = engine_of(tokenizer, share=True, micro_batch_tokens=budget)._micro_batches(batch)
    assert sorted(n for part in parts for n in part.rows.tolist()) == list(range(len(rows)))
    assert len(parts) > 3
    assert all(part.model_inputs["input_ids"].numel() <= budget for part in parts)
    many = batch_of(rng, [[5, 6, 7, 8]] * 100)
    assert len(engine_of(tokenizer, share=True, micro_batch_tokens=4)._micro_batches(many)) == 1


def test_rows_that_share_little_are_laid_out_as_before(tokenizer):
    rng = random.Random(2)
    rows = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(10, 30))] for _ in range(8)]
    rows[1] = [*rows[0][:3], *rows[1]]
    batch = batch_of(rng, rows)
    parts = [engine_of(tokenizer, share=share)._micro_batches(batch) for share in (False, True)]
    assert [p.rows.tolist() for p in parts[0]] == [p.rows.tolist() for p in parts[1]]
    assert all(p.model_inputs["rows"].blocks is None for p in parts[1])


@pytest.mark.parametrize("how", ["adapter", "checkpointing", "reference", "critic"])
def test_whatever_reads_the_model_shares_prefixes_alike(tokenizer, how):
    rng = random.Random(4)
    batch = batch_of(rng, random_tree(rng, 10))
    found = []
    for share in (False, True):
        options = {"checkpointing": True} if how == "checkpointing" else {}
        model = model_of("llama")
        if how == "adapter":
            pytest.importorskip("peft")
            from spear_rl.engines.models.lora import with_adapter

            options["adapter"] = with_adapter(model, rank=2, alpha=4, targets=(), name="base")
            torch.manual_seed(5)
            for p in model.parameters():
                p.data += 0.1 * torch.randn_like(p) * p.requires_grad
        engine = HFEngine(
            model, tokenizer, packed=True, compiled=False, max_grad_norm=1e9, share_prefixes=share, learning_rate=1e-2,
            **options,
        )  # fmt: skip
        if how == "reference":
            engine.set_reference(model_of("qwen", initializer_range=0.1))
            parts = engine._micro_batches(batch)
            found.append([torch.zeros(batch.mask.shape)])
            for part in parts:
                found[-1][0][part.rows, : part.width] = engine._scores(engine._reference, part)[0].detach()
        elif how == "critic":
            engine.hold_critic(1e-2)
            returns = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(6))
            for _ in range(2):
                engine.critic.update(batch, engine.critic.values(batch), returns, clip=None)
            found.append([engine.critic.values(batch)])
        else:
            found.append(results(engine, batch))
    assert_same(found[1], found[0])


def test_a_wrong_shared_layout_is_found_out_before_training(tokenizer, monkeypatch):
    from spear_rl.engines.packed.parity import disagreement

    model = model_of("llama")
    assert not disagreement(model, tokenizer, plain_head=True, generates=False)
    right = tree.Blocks.of
    monkeypatch.setattr(tree.Blocks, "of", lambda ends, device: right(np.roll(ends, 1), device))
    assert "common prefix" in disagreement(model, tokenizer, plain_head=True, generates=False)


def tree_scores(q, k, blocks, scale):
    """[heads, T, T] scaled scores, -inf where a token does not attend."""
    places = torch.arange(len(q))
    is_seen = (places <= places[:, None]) & (places[:, None] < blocks.ends)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return scores.masked_fill(~is_seen, float("-inf"))


def tree_forward(q, k, v, blocks, scale):
    """What the tree kernels compute."""
    scores = tree_scores(q, k, blocks, scale)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out.contiguous(), scores.logsumexp(-1) / math.log(2)


def tree_backward(grad, q, k, v, out, sums, blocks, scale):
    group = q.shape[1] // k.shape[1]
    weights = (tree_scores(q, k, blocks, scale) - sums[:, :, None] * math.log(2)).exp()
    key, value = (x.repeat_interleave(group, 1) for x in (k, v))
    slope = weights * (torch.einsum("qhd,khd->hqk", grad, value) - (grad * out).sum(-1).T[:, :, None])
    by_key, by_value = torch.einsum("hqk,qhd->khd", slope, q) * scale, torch.einsum("hqk,qhd->khd", weights, grad)
    by_query = torch.einsum("hqk,khd->qhd", slope, key) * scale
    return by_query.contiguous(), *(x.unflatten(1, (-1, group)).sum(2).contiguous() for x in (by_key, by_value))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1, 4, 64]))
def test_blocks_say_what_the_paths_say(seed, size):
    """Every pair of a token and one on its path is in the ends; every pair of blocks that holds one, in the lists."""
    rng = random.Random(seed)
    batch = batch_of(rng, random_tree(rng, rng.randint(2, 25)))
    lengths = batch.attention.sum(1)
    order, shared = layout.row_order(batch.input_ids, lengths, share=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "BLOCK", size)
        patch.setattr(tree, "SPAN", 3)
        inputs, places = layout.packed_inputs(batch.input_ids[order], lengths[order], shared, torch.device("cpu"))
    if (blocks := inputs["rows"].blocks) is None:
        return
    count = inputs["input_ids"].numel()
    on_path = torch.zeros(count, count, dtype=torch.bool)
    for row, length in enumerate(lengths[order].tolist()):
        for column in range(length):
            on_path[places[row, column], places[row, : column + 1].long()] = True
    token = torch.arange(count)
    assert torch.equal(on_path, (token <= token[:, None]) & (token[:, None] < blocks.ends))
    num_blocks = -(-count // size)
    wanted = {(q, k) for q, k in (on_path.nonzero() // size).tolist()}
    starts, keys = blocks.starts.tolist(), blocks.keys.tolist()
    assert len(starts) == num_blocks + 1
    listed = [(q, k) for q in range(num_blocks) for k in keys[starts[q] : starts[q + 1]]]
    spanned = [(q, k) for k, begin, end in blocks.spans.tolist() for q in range(begin, end)]
    assert sorted(listed) == sorted(spanned) == sorted(wanted)
    assert all(end - begin <= 3 for _, begin, end in blocks.spans.tolist())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_operators_for_gpus_train_as_plain_code_does(tokenizer, monkeypatch, compiled):
    """Their kernels, which need a GPU, are replaced by what they compute."""
    from torch._dynamo.utils import counters

    computed = SimpleNamespace(tree_attention=tree_forward, tree_attention_backward=tree_backward)
    monkeypatch.setattr(attention, "TREE_WIDTHS", (8,))
    monkeypatch.setattr(attention, "tree_kernels", lambda: computed)

    rng = random.Random(5)
    batches = [batch_of(rng, random_tree(rng, size)) for size in (9, 5, 12, 7)]
    engines = [engine_of(tokenizer, share=share) for share in (False, True)]
    expected = [results(engines[0], batch) for batch in batches]
    monkeypatch.setattr(attention, "_is_fused", lambda q: True)
    if compiled:
        torch._dynamo.reset()
        for layer in engines[1].model.model.layers:
            layer.compile(dynamic=True, fullgraph=True, backend="aot_eager")
    graphs = []
    for batch, wanted in zip(batches, expected, strict=True):
        assert_same(results(engines[1], batch), wanted)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1  # the first batch compiled all that was needed


@pytest.mark.parametrize(("width", "shares"), [(16, True), (64, True), (80, False), (256, False)])
def test_on_a_gpu_rows_share_only_where_the_kernels_take_the_width(monkeypatch, width, shares):
    monkeypatch.setattr(layout, "find_spec", lambda name: object())
    model = model_of("llama", hidden_size=4 * width)
    assert layout.can_share(model)
    there = SimpleNamespace(device=torch.device("cuda"), config=model.config)
    assert layout.can_share(there) == shares


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def alfworld_like(rng: random.Random, *, groups: int, turns: int = 16) -> Batch:
    rows, masks = episodes(rng, groups=groups, size=8, turns=turns, first=350, log=30, answer=12)
    return batch_of(rng, rows, masks)


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 32), (16, 2, 128), (6, 1, 80)])
def test_on_a_gpu_a_row_attends_to_its_path_forwards_and_backwards(heads, kv_heads, width):
    rng = random.Random(heads)
    rows = episodes(rng, groups=2, size=3, turns=5, first=140, log=31, answer=12)[0]
    batch = batch_of(rng, [*rows, *random_tree(rng, 9), rows[3]])
    lengths = batch.attention.sum(1)
    order, shared = layout.row_order(batch.input_ids, lengths, share=True)
    inputs, _ = layout.packed_inputs(batch.input_ids[order], lengths[order], shared, torch.device("cuda"))
    count = inputs["input_ids"].numel()
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(count, n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    out = attention._row_attention(q, k, v, inputs["rows"], 0.1)
    exact = attention._row_attention(q.float(), k.float(), v.float(), inputs["rows"], 0.1)
    assert relative(out, exact) < 0.01
    wish = torch.randn_like(exact)
    got = torch.autograd.grad((out.float() * wish).sum(), (q, k, v))
    expected = torch.autograd.grad((exact * wish).sum(), (q, k, v))
    assert max(relative(a, b) for a, b in zip(got, expected, strict=True)) < 0.02


def gpu_engine(tokenizer, *, share: bool, **options) -> HFEngine:
    """As a user has it on a GPU: bfloat16, compiled layers, limits by memory."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.06}
    options = {"micro_batch_tokens": None, "max_kept_tokens": None, "max_grad_norm": 1e9, "num_slots": 16} | options
    model = model_of("llama", **(shape | options.pop("shape", {})))
    return HFEngine(model, tokenizer, device="cuda", dtype=torch.bfloat16, share_prefixes=share, **options)


@needs_gpu
@pytest.mark.parametrize(
    "options", [{}, {"micro_batch_tokens": 1500, "max_kept_tokens": 3000}, {"checkpointing": True}]
)
def test_on_a_gpu_shared_prefixes_train_as_separate_rows_do(tokenizer, options):
    batch = alfworld_like(random.Random(0), groups=2, turns=6)
    found = []
    for share in (False, True):
        engine = gpu_engine(tokenizer, share=share, **options)
        assert engine.packed
        scores = engine.scored(batch)[0]
        if not share:  # ratios near 1, so that rounding moves none of them beyond the clip
            batch = replace(batch, old_logprobs=scores.cpu())
        engine.update([Term("policy", batch, clipped_surrogate)])
        found.append((scores, torch.cat([p.grad.flatten() for p in engine._masters.trained])))
    assert (found[0][0] - found[1][0])[batch.mask.cuda()].abs().mean() < 0.02
    assert relative(found[1][1], found[0][1]) < 0.05


@needs_gpu
def test_on_a_gpu_nothing_is_compiled_anew_for_other_shared_rows(tokenizer):
    from torch._dynamo.utils import counters

    rng, engine = random.Random(1), gpu_engine(tokenizer, share=True)
    seen = []
    # The last has 39,000 tokens: by size, torch.compile may choose other kernels than for the first.
    for groups, turns in ((2, 4), (1, 3), (3, 7), (1, 12), (8, 12)):
        batch = alfworld_like(rng, groups=groups, turns=turns)
        engine.scored(batch)
        engine.update([Term("policy", batch, clipped_surrogate)])
        engine.generate([[5, 6, 7]] * 3)
        engine.sync()
        seen.append(counters["stats"]["unique_graphs"])
    assert len(set(seen)) == 1


@needs_gpu
def test_on_a_gpu_sharing_is_faster_and_takes_less_memory(tokenizer):
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152, "initializer_range": 0.02}  # fmt: skip
    batch, taken = alfworld_like(random.Random(2), groups=4), {}
    for share in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        engine = gpu_engine(tokenizer, share=share, shape=shape)
        fed = sum(part.model_inputs["input_ids"].numel() for part in engine._micro_batches(batch))
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            engine.update([Term("policy", batch, clipped_surrogate)])
            seconds = time.perf_counter() - start
        taken[share] = seconds, torch.cuda.max_memory_allocated()
        print(f"\nshared {share}: {fed} tokens, {seconds:.3f} s per update, {taken[share][1] / 2**30:.1f} GiB")
        del engine
    assert taken[True][0] < 0.6 * taken[False][0]
    assert taken[True][1] < taken[False][1]
