"""Memory of the presets with Qwen models on cards of 24 and 80 GB, and of 3B and 7B against arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

from spear_rl.app import doctor
from spear_rl.app.config import load, presets
from spear_rl.engines.memory import GIB
from test_generator_choice import qwen

CARDS = {24: 23.5, 80: 79.1, 141: 139.8}
"""Name -> GiB that the driver says of an RTX 4090, an H100 and an H200."""
FOR_24 = ["alfworld-qwen-0.5b", "webshop-qwen-0.5b", "math-qwen-1.5b"]
FOR_80 = ["alfworld-qwen-1.5b"]


@pytest.fixture
def card(monkeypatch):
    """Puts a GPU with this many GB into the machine, and Qwen's shapes behind the names of the hub."""

    def put(gigabytes: int) -> None:
        size = int(CARDS[gigabytes] * GIB)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (size - GIB // 4, size))
        monkeypatch.setattr(doctor, "empty_model", lambda name, **_: qwen(name.split("-")[-2].lower()))

    return put


def test_every_qwen_preset_is_for_one_of_the_cards():
    assert sorted([*FOR_24, *FOR_80]) == [name for name in presets() if "qwen" in name]
    for name in [*FOR_24, *FOR_80]:
        model = load(name).engine.model
        assert model == f"Qwen/Qwen2.5-Coder-{name.rsplit('-', 1)[1].upper()}-Instruct"


@pytest.mark.parametrize(("preset", "gigabytes"), [*((p, 24) for p in FOR_24), *((p, 80) for p in [*FOR_24, *FOR_80])])
def test_a_preset_fits_its_card(card, preset, gigabytes):
    card(gigabytes)
    config = load(preset)
    taken, free, most = doctor.estimate(config)
    assert doctor.advice(config, taken, free, most).startswith("fits: ")
    assert most >= config.rollout.max_context + config.rollout.max_new_tokens, "the longest row has room"


def test_a_large_model_does_not_fit_a_small_card(card):
    card(24)
    config = load("alfworld-qwen-1.5b")
    taken, free, most = doctor.estimate(config)
    assert doctor.advice(config, taken, free, most).startswith("does not fit: ")
    adapted = load("alfworld-qwen-1.5b", ["engine.lora_rank=16"])
    assert doctor.advice(adapted, *doctor.estimate(adapted)).startswith("fits: ")


BY_HAND = {
    # Embedding; per layer q, k, v with biases, o, three matrices of the feed-forward part, two norms; the last norm;
    # without tied embeddings a head.
    "3b": 151936 * 2048
    + 36 * (2048 * 2048 + 2048 + 2 * (2048 * 256 + 256) + 2048 * 2048 + 3 * 2048 * 11008 + 2 * 2048)
    + 2048,
    "7b": 2 * 152064 * 3584
    + 28 * (3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584 + 3 * 3584 * 18944 + 2 * 3584)
    + 3584,
}
PUBLISHED = {"3b": 3.09e9, "7b": 7.62e9}
"""Parameters by the models' own pages."""


@pytest.mark.parametrize("size", BY_HAND)
def test_the_estimate_for_3b_and_7b_is_what_arithmetic_by_hand_gives(card, size):
    card(141)
    weights = BY_HAND[size]
    assert weights == pytest.approx(PUBLISHED[size], rel=0.005)
    name = f"engine.model=Qwen/Qwen2.5-{size.upper()}-Instruct"
    settings = ["rollout.max_context=1000", "rollout.max_new_tokens=22", "engine.micro_batch_tokens=4096"]
    config = load("alfworld-qwen-1.5b", [name, *settings])
    taken, _, _ = doctor.estimate(config)
    assert taken.weights == 2 * weights, "bfloat16"
    assert taken.optimizer == 16 * weights, "master weights, two moments and gradients in float32"
    layers, kv_width, hidden, inner = {"3b": (36, 256, 2048, 11008), "7b": (28, 512, 3584, 18944)}[size]
    room = (CARDS[141] - 0.25 - 1.2) * GIB - 18 * weights
    one = 1024 * 2 * layers * kv_width * 2  # 1000 + 22 + 2 tokens, keys and values, two bytes each
    slots = min(128, max(int(room / 2 / one) - 1, 8))
    assert taken.slots == (slots + 1) * one
    # Saved for the backward pass, in units of two bytes: twice a norm's input in float32 and its output, q, k, v and
    # attention's output, o's input, the feed-forward part's two inner products and what is made of them.
    low = 2 * (6 * hidden + 2 * kv_width + 3 * inner)
    high = 2 * (16 * hidden + 4 * kv_width + 5 * inner)
    per_token = taken.activations / 4096 / layers
    assert 0.72 * low < per_token < 0.72 * high
    assert taken.logits == 16 * (1 << 26)
    assert taken.total == taken.weights + taken.optimizer + taken.slots + taken.activations + taken.logits


@pytest.mark.parametrize(("size", "fits"), [("3b", True), ("7b", False)])
def test_all_weights_of_3b_fit_one_h200_and_those_of_7b_need_checkpointing_or_an_adapter(card, size, fits):
    card(141)
    name = f"engine.model=Qwen/Qwen2.5-{size.upper()}-Instruct"
    config = load("alfworld-qwen-1.5b", [name])
    assert doctor.advice(config, *doctor.estimate(config)).startswith("fits: ") == fits
    for setting in ("engine.checkpointing=true", "engine.lora_rank=16"):
        smaller = load("alfworld-qwen-1.5b", [name, setting])
        assert doctor.advice(smaller, *doctor.estimate(smaller)).startswith("fits: ")
