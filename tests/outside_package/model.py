"""Models from outside: of a class that transformers does not know, and what goes wrong."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from spear_rl.engines.models.tiny import tiny_tokenizer


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnLlama(LlamaForCausalLM):
    config_class = OwnConfig


def make() -> tuple[OwnLlama, object]:
    """Random weights; the words are those of the lookup environment."""
    tokenizer = tiny_tokenizer(["red green blue gold code ?", "look", "1 2 3 4 5 6 7 8 9 0", "right wrong"])
    config = OwnConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return OwnLlama(config), tokenizer


def alone() -> OwnLlama:
    return make()[0]


def tensors() -> tuple[object, object]:
    import torch

    return torch.nn.Linear(2, 2), make()[1]


def leaves() -> None:
    raise SystemExit(0)


def raises() -> tuple[OwnLlama, object]:
    raise OSError("the disk with the weights is not mounted")
