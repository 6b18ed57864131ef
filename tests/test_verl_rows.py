"""The verl adapter's rows and loss, without verl: they are the core's batches, and cost what the core says."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

import references
from spear_rl.algorithms import (
    ClippedSurrogate,
    CovarianceClip,
    FixedLength,
    SequenceMean,
    TokenMean,
    dr_bot,
    grpo,
    spear,
)
from spear_rl.engines.base import Batch, Term
from spear_rl.functional import LossInputs
from spear_rl.integrations.verl import rows
from spear_rl.integrations.verl.rows import covariance_clipped, is_clipped
from spear_rl.train.step import collate
from spear_rl.types import Completion, Stop, Trajectory, Turn

WEIGHT, LENGTH = 0.37, 11


def trajectory(rng: random.Random, *, chat: bool, turns: int = 3) -> Trajectory:
    played: list[Turn] = []
    for _ in range(turns):
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
        if chat and played:
            prompt = [*played[-1].prompt_ids, *played[-1].completion.token_ids, *prompt]
        size = rng.randint(1, 4)
        said = Completion([rng.randrange(9) for _ in range(size)], [-rng.random() for _ in range(size)])
        played.append(Turn(prompt, said, reward=rng.choice([0.0, 1.0])))
    return Trajectory(played, Stop.DONE)


def term(rng: random.Random, name: str, loss, *, count: int = 4, weight: float = 1.0, chat: bool | None = None) -> Term:
    """Random episodes, some of whose turns do not train; a replayed one has a positive advantage."""
    episodes = [trajectory(rng, chat=rng.random() < 0.5 if chat is None else chat) for _ in range(count)]
    sign = abs if name == "replay" else float
    advantages = [[sign(rng.gauss(0, 1)) for _ in t.turns] for t in episodes]
    dropped = [["" if rng.random() < 0.7 else "void" for _ in t.turns] for t in episodes]
    dropped[0][0] = ""
    batch = collate(episodes, advantages, pad_id=0, dropped=dropped)
    assert batch is not None
    return Term(name, batch, loss, weight)


def widened(fields: list[dict], name: str, width: int) -> torch.Tensor:
    """[B, T] a response field in the columns of its whole row."""
    out = torch.zeros(len(fields), width)
    for line, row in zip(out, fields, strict=True):
        start = len(row["prompts"])
        line[start : start + len(row[name])] = row[name]
    return out


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_rows_say_what_the_batch_says(seed):
    batch = term(random.Random(seed), "policy", None).batch
    fields = rows.fields_of(batch)
    width = batch.input_ids.shape[1]
    for row, ids, seen in zip(fields, batch.input_ids, batch.attention, strict=True):
        assert row["input_ids"].tolist() == ids[seen].tolist()
        assert torch.equal(torch.cat([row["prompts"], row["responses"]]), row["input_ids"])
        assert row["response_mask"][0] == 1
    mask = widened(fields, "response_mask", width)
    torch.testing.assert_close(mask.bool(), batch.mask)
    torch.testing.assert_close(widened(fields, "advantages", width) * mask, batch.advantages * batch.mask)
    torch.testing.assert_close(widened(fields, "old_log_probs", width) * mask, batch.old_logprobs * batch.mask)


@given(seed=st.integers(0, 10**6), extra=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_a_step_is_filled_up_with_rows_that_train_nothing_and_knows_its_counts(seed, extra):
    rng = random.Random(seed)
    policy, replay = term(rng, "policy", None), term(rng, "replay", None, count=2, weight=WEIGHT)
    size = len(policy.batch) + len(replay.batch) + extra
    laid = rows.rows_of([policy, replay], size=size)
    assert len(laid) == size
    assert [bool(row["response_mask"].any()) for row in laid] == [True] * (size - extra) + [False] * extra
    counts = [1.0, float(policy.batch.mask.sum()), len(policy.batch)]
    counts += [WEIGHT, float(replay.batch.mask.sum()), len(replay.batch)]
    for number, row in enumerate(laid[: size - extra]):
        assert row["spear"].tolist() == [number >= len(policy.batch), *counts]
    assert {tuple(row["spear"][1:].tolist()) for row in laid} == {tuple(counts)}


class Data(dict):
    """As much of a TensorDict as the loss asks for."""

    copy = lambda self: Data(self)  # noqa: E731
    select = lambda self, *names: Data({name: self[name] for name in names})  # noqa: E731
    to_padded_tensor = copy
    set_non_tensor = dict.__setitem__


class Metric:
    """As much of verl's as the loss asks for."""

    def __init__(self, aggregation: str, value: torch.Tensor) -> None:
        self.aggregation, self._value = SimpleNamespace(value=aggregation), float(value)

    def aggregate(self) -> float:
        return self._value


def written_out_loss(model_output, data, dp_group, *, low, high, dual, length=None, by_row=False):
    """PPO's clipped loss as in its paper, with a dual clip, reduced by the counts a mini-batch has in all."""
    ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
    advantages, mask = data["advantages"], data["response_mask"].double()
    worst = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    worst = torch.where(advantages < 0, torch.minimum(worst, -advantages * dual), worst)
    total = data["global_batch_size"] * (length or 1) if length or by_row else data["batch_num_tokens"]
    weights = mask / mask.sum(1, keepdim=True).clamp(min=1) if by_row else mask
    clipped = ((ratio - 1).abs() > 0.2).double()
    mean = (clipped * mask).sum() / mask.sum() if mask.any() else torch.zeros(())
    return (worst * weights).sum() / total, {
        "actor/tokens": Metric("sum", mask.sum()),
        "actor/clipped": Metric("mean", mean),
        "kl_coef": 0.1,  # as verl has it: a number
    }


@pytest.mark.parametrize("name", ["grpo", "token mean", "dr_bot"])
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(1, 9), max_size=3))
@settings(max_examples=20, deadline=None)
def test_the_joint_loss_is_the_cores_however_a_mini_batch_is_cut(name, seed, cuts):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    base = dr_bot(grpo(), max_length=LENGTH) if name == "dr_bot" else grpo()
    base = grpo(reduction=TokenMean()) if name == "token mean" else base
    policy = term(rng, "policy", base.loss)
    replay = term(rng, "replay", base.loss, count=2, weight=WEIGHT)
    laid = rows.rows_of([policy, replay], size=len(policy.batch) + len(replay.batch) + 2)
    now = [row["old_log_probs"] + 0.3 * torch.randn(len(row["old_log_probs"])) for row in laid]
    loss = partial(
        written_out_loss,
        low=base.loss.clip_low,
        high=base.loss.clip_high,
        dual=base.loss.dual_clip or 1e9,
        length=LENGTH if name == "dr_bot" else None,
        by_row=name == "grpo",
    )
    pad = partial(pad_sequence, batch_first=True)
    summed: dict[str, float] = defaultdict(float)
    total, bounds = 0.0, sorted({0, *(min(cut, len(laid)) for cut in cuts), len(laid)})
    for begin, end in pairwise(bounds):
        part = laid[begin:end]
        data = Data({k: pad([row[k] for row in part]) for k in ("old_log_probs", "advantages", "response_mask")})
        data |= {"spear": torch.stack([row["spear"] for row in part]), "dp_size": 1}
        value, metrics = rows.joint_loss({"log_probs": pad(now[begin:end])}, data, losses=[loss, loss])
        total += float(value)
        kinds = ("actor", "spear/replay")
        assert {"kl_coef", *(f"{kind}/{name}" for kind in kinds for name in ("tokens", "clipped"))} == {*metrics}
        assert metrics.pop("kl_coef") == 0.1
        for metric in metrics:
            summed[metric] += metrics[metric].aggregate()
    expected, start = 0.0, 0
    for entry in (policy, replay):
        own = slice(start, start + len(entry.batch))
        columns = ([row[k] for row in laid[own]] for k in ("old_log_probs", "advantages", "response_mask"))
        old, advantages, mask = map(pad, columns)
        expected += entry.weight * float(base.loss(LossInputs(pad(now[own]), old, advantages, mask.bool())).loss)
        start += len(entry.batch)
        moved = ((pad(now[own]) - old).exp() - 1).abs()[mask.bool()] > 0.2
        kind = "actor" if entry is policy else "spear/replay"
        assert summed[f"{kind}/tokens"] == len(moved)
        assert summed[f"{kind}/clipped"] == pytest.approx(float(moved.double().mean()), abs=1e-6)
    assert total == pytest.approx(expected, abs=1e-6)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_tokens_without_an_advantage_cost_what_the_covariance_clip_makes_them_cost(seed):
    rng, clip = random.Random(seed), CovarianceClip(fraction=0.2, low=0.0)
    one, other = (spear(dr_bot(grpo()), covariance=clip, seed=5).imitation for _ in range(2))
    replay = replace(term(rng, "replay", one.loss, count=8), generator=one.generator)
    batch = replay.batch
    torch.manual_seed(seed)
    now = batch.old_logprobs + 0.1 * torch.randn(batch.advantages.shape)
    held, metrics = covariance_clipped(replay, now)
    inputs = LossInputs(now, batch.old_logprobs, batch.advantages, batch.mask, generator=other.generator)
    expected = other.loss(inputs)
    cost = replace(one.loss, covariance=None)(replace(inputs, advantages=held.batch.advantages))
    torch.testing.assert_close(cost.loss, expected.loss, atol=1e-6, rtol=1e-6)
    assert metrics["covariance_clip_fraction"] == pytest.approx(float(expected.metrics["covariance_clip_fraction"]))
    assert metrics["ratio"] == pytest.approx(float((now - batch.old_logprobs)[batch.mask].exp().mean()))


def test_only_a_loss_with_a_covariance_clip_or_a_bound_holds_tokens_back():
    assert is_clipped(Term("replay", None, spear(grpo()).imitation.loss))  # type: ignore[arg-type]
    assert is_clipped(Term("replay", None, replace(grpo().loss, max_second_moment=2.0)))  # type: ignore[arg-type]
    assert not is_clipped(Term("replay", None, grpo().loss))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("reduction", [TokenMean(), SequenceMean(), FixedLength(9)])
def test_rows_that_are_too_stale_train_as_little_in_verl_as_here(seed, reduction):
    tokens = references.random_tokens(seed, max_rows=6)
    inputs = references.loss_inputs(tokens)
    batch = Batch(inputs.mask, inputs.mask, inputs.mask, inputs.old_logprobs, inputs.advantages)
    free = ClippedSurrogate(reduction=reduction)
    term = Term("replay", batch, replace(free, max_second_moment=1.3))
    held, metrics = covariance_clipped(term, inputs.logprobs.detach())
    here, there = term.loss(inputs), free(replace(inputs, advantages=held.batch.advantages))
    gradients = [torch.autograd.grad(out.loss, inputs.logprobs)[0] for out in (here, there)]
    torch.testing.assert_close(*gradients)
    assert metrics["held_back"] == pytest.approx(here.metrics["held_back"].item())
    assert metrics["second_moment"] == pytest.approx(here.metrics["second_moment"].item())
