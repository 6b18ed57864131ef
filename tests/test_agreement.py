"""Which architectures may be laid end to end: those for which that gives the results of their own attention."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from conftest import random_batch
from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.memory import activation_bytes, footprint
from spear_rl.engines.models.prepare import has_plain_head
from spear_rl.engines.packed import parity as agreement
from spear_rl.engines.packed.attention import attention_layers
from spear_rl.engines.packed.parity import disagreement
from spear_rl.errors import UserError
from spear_rl.functional import clipped_surrogate
from spear_rl.rollout import Sampling

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 264,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = SHAPE | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
LATENT = SHAPE | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip

AGREE = {
    "Llama": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": HEADS,
    "Gemma": HEADS,
    "Mistral": GROUPED | {"sliding_window": None},
    "Olmo2": GROUPED,
    "Phi3": GROUPED,
    "SmolLM3": GROUPED,
    "GPTNeoX": SHAPE,
    "Granite": GROUPED,
    "Cohere": GROUPED,
    "Starcoder2": GROUPED | {"sliding_window": None},
    "Mixtral": GROUPED | {"num_local_experts": 4},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 264, "n_positions": 128},
    "OPT": SHAPE | {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
REFUSED = {
    "Bloom": SHAPE | {"n_layer": 2, "n_head": 4},  # a bias by distance
    "Falcon": SHAPE,
    "StableLm": GROUPED,
    "Gemma2": HEADS,  # windows and soft caps
    "Gemma3Text": HEADS,
    "Mistral": GROUPED,  # a window
    "Olmo3": GROUPED,
    "GptOss": HEADS | {"num_local_experts": 4},  # sinks
    "Llama": GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "DeepseekV3": LATENT,  # keys wider than values
    "DiffLlama": GROUPED,  # attends twice a layer
    "Doge": GROUPED,  # a mask of its own
    "Bert": SHAPE,  # looks ahead
    "Mamba": SHAPE,
}
CLASSES = {"Gemma3Text": "Gemma3ForCausalLM", "Bert": "BertLMHeadModel", "GPT2": "GPT2LMHeadModel"}


def random_model(kind: str, options: dict, *, seed: int = 0):
    """Weights large enough for wrong attention to show, biases and norms included."""
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.15 if p.dim() > 1 else p + torch.randn_like(p) * 0.05)
    return model


@pytest.mark.parametrize("kind", AGREE)
def test_rows_end_to_end_score_train_and_generate_as_padded_ones_do(kind, tokenizer):
    batch = random_batch(random.Random(0), rows=5, vocabulary=250)
    results = {}
    for packed in (False, True):
        engine = HFEngine(
            random_model(kind, AGREE[kind]), tokenizer, packed=packed, max_grad_norm=1e9, num_slots=4,
            sampling=Sampling(max_new_tokens=5), end_ids=(),
        )  # fmt: skip
        scores = engine.scored(batch)
        metrics = engine.update([Term("policy", batch, clipped_surrogate)])
        results[packed] = [*scores, torch.cat([p.grad.flatten() for p in engine.model.parameters()])]
        assert metrics["policy/grad_norm"] > 0
        engine.sync()
    for padded, laid in zip(results[False], results[True], strict=True):
        torch.testing.assert_close(laid, padded, rtol=2e-3, atol=2e-5)
    prompts = [[5, 6, 7, 8], [9]]
    for prompt, completion in zip(prompts, engine.generate(prompts), strict=True):
        ids = torch.tensor([*prompt, *completion.token_ids])[None]
        with torch.no_grad():
            exact = engine.model(input_ids=ids).logits[0].log_softmax(-1)
        expected = exact[range(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_attention_is_left_to_the_model_itself(kind, tokenizer):
    model = random_model(kind, REFUSED[kind])
    own = model.config._attn_implementation
    assert disagreement(model, tokenizer, plain_head=has_plain_head(model))
    assert model.config._attn_implementation == own
    with pytest.raises(UserError, match=r"^engine\.attention=packed: .* set engine\.attention=padded$"):
        HFEngine(model, tokenizer, packed=True)


def test_a_faithless_attention_is_found_out_and_padding_used_with_a_word_on_it(tokenizer, monkeypatch, caplog):
    """As if a GPU had kernels, and they did something else than the model does."""
    model = random_model("Llama", GROUPED)
    assert not disagreement(model, tokenizer, plain_head=True)
    monkeypatch.setattr("spear_rl.engines.models.prepare.has_kernel", lambda device, dtype: True)
    assert HFEngine(model, tokenizer, compiled=False).packed
    model = random_model("Llama", GROUPED)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 0.5
    assert not disagreement(model, tokenizer, plain_head=True)
    scores = agreement._own_scores
    monkeypatch.setattr(agreement, "_own_scores", lambda m, ids: scores(m, ids) + torch.linspace(0, 0.5, 264))
    engine = HFEngine(model, tokenizer)
    assert not engine.packed
    assert "rows are padded, which is slower: LlamaForCausalLM scores rows differently" in caplog.text
    assert model.config._attn_implementation != "spear"


def test_half_precision_is_not_taken_for_other_attention(tokenizer):
    for kind in ("Llama", "Qwen3", "GPT2"):
        model = random_model(kind, AGREE[kind]).to(torch.bfloat16)
        assert not disagreement(model, tokenizer, plain_head=has_plain_head(model))


@pytest.mark.parametrize("kind", ["Llama", "OPT", "GPT2"])
def test_layers_are_checkpointed_without_dropout(kind, tokenizer):
    batch = random_batch(random.Random(1), rows=4, vocabulary=250)
    gradients = []
    for checkpointing in (False, True):
        engine = HFEngine(
            random_model(kind, AGREE[kind]), tokenizer, checkpointing=checkpointing, max_grad_norm=1e9
        )  # fmt: skip
        layer, runs = next(attention_layers(engine.model)), []
        layer.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        engine.update([Term("policy", batch, clipped_surrogate)])
        assert len(runs) == 1 + checkpointing
        gradients.append(torch.cat([p.grad.flatten() for p in engine.model.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [*AGREE, *REFUSED])
def test_memory_is_estimated_for_any_architecture(kind):
    options = (AGREE | REFUSED)[kind]
    config = getattr(transformers, f"{kind}Config")(**options)
    assert 100 < activation_bytes(config.get_text_config(), torch.bfloat16) < 40_000
    taken = footprint(config, num_weights=10, num_trained=10, dtype=torch.bfloat16, kept_tokens=1024)
    assert taken.total > taken.activations > 0
