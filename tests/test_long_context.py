"""Episodes of 16k tokens: through generation, packed and padded training, the estimates, and a model's positions."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers

from conftest import WORDS
from spear_rl.app import doctor
from spear_rl.app.config import load
from spear_rl.engines.base import Batch, Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.memory import LEAST_SLOTS, MAX_SLOTS, kv_cache_bytes, kv_slots, smaller_settings
from spear_rl.engines.models.positions import position_limit
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.functional import clipped_surrogate
from spear_rl.rollout import Sampling
from spear_rl.rollout.env import Observation, StepResult, Task
from test_agreement import AGREE

LONG = 16_384
PAGE = " code ".join(str(number % 10) for number in range(4000))
"""About 8,000 tokens of the toy's tokenizer."""


class Archive:
    """Two pages of 8,000 tokens; then any answer that says a digit pays."""

    def __init__(self) -> None:
        self._num_read = 0

    def reset(self) -> Observation:
        self._num_read = 1
        return Observation(PAGE)

    def step(self, action: str) -> StepResult:
        self._num_read += 1
        if self._num_read == 2:
            return StepResult(Observation(f"{PAGE} again"))
        return StepResult(Observation("over"), reward=float(any(c.isdigit() for c in action)), done=True)

    def close(self) -> None:
        pass


def tasks(split: str = "train") -> list[Task]:
    """The panel of `task.env=test_long_context:tasks`."""
    return [Task(f"archive/{split}/{n}", Archive, demonstrate=lambda seed: ["look", "7"]) for n in range(2)]


@pytest.mark.slow
def test_episodes_of_sixteen_thousand_tokens_are_played_and_learned_from(spear, tmp_path, monkeypatch):
    run, widths, update = tmp_path / "run", [], HFEngine.update

    def watched(engine: HFEngine, terms):
        widths.extend(term.batch.input_ids.shape[1] for term in terms)
        return update(engine, terms)

    monkeypatch.setattr(HFEngine, "update", watched)
    code, text = spear(
        "train", "task.env=test_long_context:tasks", f"rollout.max_context={LONG}", "rollout.max_new_tokens=3",
        "rollout.num_tasks=1", "rollout.group_size=2", "rollout.max_turns=2", "run.steps=1", f"run.dir={run}",
        "engine.model=tiny-xs", "sft.episodes=1", "eval.tasks=0", "eval.every=0", "algorithm.name=grpo",
        "run.threads=1",
    )  # fmt: skip
    assert code == 0, text
    assert "positions" not in text
    [row] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["rollout/turns"] == 2, "the second prompt has 16,000 tokens and is played"
    assert len(widths) >= 2, "the cold start and the step"
    assert all(15_000 < width <= LONG + 3 for width in widths), widths


def row_of(tokenizer, num_tokens: int) -> list[int]:
    ids = tokenizer.encode(PAGE * 3, add_special_tokens=False)
    return ids[:num_tokens]


@pytest.mark.slow
def test_packed_and_padded_rows_of_sixteen_thousand_tokens_agree(tokenizer):
    ids = torch.tensor([row_of(tokenizer, LONG)])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -64:] = True
    batch = Batch(ids, torch.ones_like(mask), mask, torch.full(ids.shape, -3.0), torch.ones(ids.shape))
    gradients, scores = [], []
    for packed in (True, False):
        model = tiny_model("tiny-xs", tokenizer, seed=0)
        engine = HFEngine(model, tokenizer, packed=packed, num_slots=1, learning_rate=0.0, max_grad_norm=1e9)
        scores.append(engine.scored(batch)[0][mask])
        engine.update([Term("policy", batch, clipped_surrogate)])
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*scores, atol=1e-4)
    assert torch.allclose(*gradients, atol=1e-3 * float(gradients[0].abs().max()))


@pytest.mark.slow
def test_continuous_batching_goes_on_with_a_conversation_of_sixteen_thousand_tokens(tokenizer):
    prompts = [row_of(tokenizer, LONG - 200), row_of(tokenizer, 50)]
    texts = []
    for packed in (True, False):
        model = tiny_model("tiny-xs", tokenizer, seed=0)
        count, length = kv_slots(
            model.config, torch.float32, max_context=LONG, max_new_tokens=4, num_episodes=2, room=None
        )
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        engine = HFEngine(
            model, tokenizer, packed=packed, sampling=sampling, num_slots=count, slot_tokens=length, end_ids=()
        )
        texts.append([completion.token_ids for completion in engine.generate(prompts)])
        if packed:
            assert engine._slots.slots.length == length, "slots have room for it from the start"
    assert texts[0] == texts[1]


def config_with(kind: str = "Llama", **settings):
    return getattr(transformers, f"{kind}Config")(**(AGREE["Llama"] | settings))


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, 4096),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, 16_384),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 8192),
        (
            {"rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}},
            16_384,
        ),
        (
            {"rope_parameters": {
                "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "rope_theta": 1e4}},
            4096,
        ),
        (
            {"rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4,
                "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
            4096,
        ),
    ],
)  # fmt: skip
def test_the_longest_sequence_is_that_of_the_config_with_its_rope_scaling(settings, limit):
    assert position_limit(config_with(max_position_embeddings=4096, **settings)) == limit


def test_other_configs_name_their_positions_in_their_own_way_or_not_at_all():
    assert position_limit(transformers.GPT2Config(n_positions=300)) == 300
    assert position_limit(transformers.BloomConfig()) is None
    assert position_limit(transformers.Gemma3Config().get_text_config()) == 131_072


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("short")
    config = config_with(max_position_embeddings=512, vocab_size=len(tokenizer))
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


PLAY = ["lookup", "rollout.max_new_tokens=5", "run.steps=1", "sft.episodes=0", "eval.tasks=0", "eval.every=0"]


@pytest.mark.parametrize("verb", ["train", "doctor"])
def test_a_context_beyond_a_models_positions_is_one_sentence(spear, folder, tmp_path, verb):
    code, text = spear(verb, *PLAY, f"engine.model={folder}", "rollout.max_context=16384", f"run.dir={tmp_path / 'r'}")
    assert code == 2, text
    sentence = f"rollout.max_context=16384: {folder} has positions for 512 tokens: set rollout.max_context=507 or less"
    assert sentence in " ".join(text.split())
    assert "Traceback" not in text
    assert not (tmp_path / "r" / "config.toml").exists()


def test_a_context_that_nobody_asked_for_only_warns(folder, caplog):
    from spear_rl.app.build.training import engine_of

    engine_of(load(None, [f"engine.model={folder}", "engine.device=cpu"]))
    assert "has positions for 512 tokens" in caplog.text
    caplog.clear()
    engine_of(load(None, [f"engine.model={folder}", "engine.device=cpu", "rollout.max_context=512"]))
    assert "positions" not in caplog.text


def test_a_table_of_positions_must_hold_the_answer_too(spear, tmp_path, tokenizer):
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer), "n_positions": 512}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    for context, expected in ((512, 2), (507, 0)):
        settings = [f"engine.model={tmp_path / 'gpt2'}", f"rollout.max_context={context}"]
        code, text = spear("train", *PLAY, *settings, f"run.dir={tmp_path / str(context)}")
        assert code == expected, text
    assert "set rollout.max_context=507 or less" in " ".join(spear(
        "train", *PLAY, f"engine.model={tmp_path / 'gpt2'}", "rollout.max_context=600", f"run.dir={tmp_path / 'x'}"
    )[1].split())  # fmt: skip


def test_slots_hold_whole_conversations_and_take_at_most_half_of_the_room():
    rng, config = random.Random(0), config_with()
    for _ in range(200):
        context, new, episodes = rng.randint(1, 40_000), rng.randint(1, 4000), rng.randint(1, 4000)
        limits = {"max_context": context, "max_new_tokens": new, "num_episodes": episodes}
        free, length = kv_slots(config, torch.bfloat16, **limits, room=None)
        assert free == min(episodes, MAX_SLOTS)
        assert context + new < length <= context + new + 130
        room = rng.randint(0, 1 << 34)
        count, _ = kv_slots(config, torch.bfloat16, **limits, room=room)
        taken = kv_cache_bytes(config, torch.bfloat16, num_slots=count, slot_tokens=length)
        assert taken <= room / 2 or count == min(episodes, LEAST_SLOTS)
        more = kv_cache_bytes(config, torch.bfloat16, num_slots=count + 1, slot_tokens=length)
        assert count == free or more > room / 2, "no slot is left out that has room"


def test_a_row_is_never_divided_so_the_estimate_counts_the_longest(folder):
    wide = config_with(max_position_embeddings=1 << 20, vocab_size=300)
    wide.save_pretrained(folder.parent / "wide")
    found = {}
    for context in (1000, LONG):
        settings = [f"rollout.max_context={context}", "engine.micro_batch_tokens=2048", "engine.attention=padded"]
        config = load(None, [f"engine.model={folder.parent / 'wide'}", "engine.device=cpu", *settings])
        found[context], _, _ = doctor.estimate(config, free=1 << 40)
    ratio = found[LONG].activations / found[1000].activations
    assert ratio == pytest.approx((LONG + 64) / 2048, rel=0.01)
    taken, free, most = doctor.estimate(config, free=1 << 20)
    assert most == 0
    assert doctor.advice(config, taken, free, most).startswith("does not fit: lower rollout.max_context (it is 16384)")


def test_advice_for_long_rows_does_not_name_micro_batches_that_would_not_help():
    given = {"micro_batch_tokens": 4096, "checkpointing": False, "has_adapter": False}
    assert "engine.micro_batch_tokens=2048 (it is 4096)" in smaller_settings(500, **given)
    long = smaller_settings(LONG, **given)
    assert "micro_batch_tokens" not in long
    assert "rollout.max_context lower (a row has 16384 tokens)" in long
    assert "engine.checkpointing=true" in long


def test_the_toy_has_words_for_its_pages(tokenizer):
    assert 7_000 < len(tokenizer.encode(PAGE, add_special_tokens=False)) < 9_000, WORDS
