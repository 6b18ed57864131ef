"""Settings of a model and its tokenizer that transformers leaves out when it reads a GGUF file's metadata.

Without them a model loads with the right weights and wrong logits, or is given other tokens than it was trained with.
"""

import math
from collections.abc import Sequence
from typing import Any

WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Pre-tokenizers of Llama 3 and Mistral: a word that is a token is not merged from its parts."""
COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Pre-tokenizers of tokenizers that compose letters and their accents (NFC)."""

_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the Gemma models that scale queries by hidden size per head; no key of their files says so."""
_LOCAL_THETA = 10000.0
_LENGTHS = (8192, *(1 << power for power in range(5, 18)))
_FACTORS = (8.0, 32.0, 2.0, 4.0, 16.0)


def gguf_value(reader: Any, name: str) -> Any:
    """The value of a key in a GGUF file's metadata, or None."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def unread_settings(reader: Any) -> dict[str, Any]:
    """Settings of the transformers configuration: head width, biases, scale of queries, scaled rotary positions."""
    kind, names = str(gguf_value(reader, "general.architecture")), {tensor.name for tensor in reader.tensors}
    out: dict[str, Any] = {}
    if kind.startswith("qwen3") and (width := gguf_value(reader, f"{kind}.attention.key_length")):
        out["head_dim"] = int(width)
    if kind.startswith(("llama", "qwen3", "gemma")) and "blk.0.attn_q.bias" in names:
        out["attention_bias"] = True
    if kind == "llama" and "blk.0.ffn_up.bias" in names:
        out["mlp_bias"] = True
    if kind in _27B and gguf_value(reader, f"{kind}.block_count") == _27B[kind]:
        size, heads = (gguf_value(reader, f"{kind}.{key}") for key in ("embedding_length", "attention.head_count"))
        out["query_pre_attn_scalar"] = size // heads
    if rope := _rope(reader, kind):
        local = {"rope_type": "default", "rope_theta": gguf_value(reader, f"{kind}.rope.freq_base_swa") or _LOCAL_THETA}
        is_mixed = kind == "gemma3"  # local layers are not scaled
        out["rope_parameters"] = {"full_attention": rope, "sliding_attention": local} if is_mixed else rope
    return out


def _rope(reader: Any, kind: str) -> dict[str, Any]:
    """The scaling of rotary positions; empty without one."""
    theta, how, factor, original, context = (
        gguf_value(reader, f"{kind}.{key}")
        for key in (
            "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
            "context_length",
        )
    )  # fmt: skip
    theta = float(theta or 10000.0)
    factors = next((tensor.data.reshape(-1) for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), ())
    if kind == "llama" and any(abs(float(value) - 1) > 1e-6 for value in factors):
        return _llama3([float(value) for value in factors], theta)
    if how in ("linear", "yarn") and factor:
        out = {"rope_type": how, "factor": float(factor), "rope_theta": theta}
        length = {"original_max_position_embeddings": int(original or context / factor)}
        return out | (length if how == "yarn" else {})
    return {}


def _llama3(factors: Sequence[float], theta: float) -> dict[str, Any]:
    """Llama 3.1 and later have no key for their scaling: the file holds the factor of every frequency."""
    for largest in (max(factors), *_FACTORS):
        for length in _LENGTHS:
            expected = [_llama3_factor(n / len(factors), theta, largest, length) for n in range(len(factors))]
            if all(math.isclose(one, other, rel_tol=1e-3) for one, other in zip(factors, expected, strict=True)):
                limits = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": length}
                return {"rope_type": "llama3", "factor": largest, "rope_theta": theta, **limits}
    raise ValueError("its rotary positions are scaled in an unknown way (rope_freqs.weight)")


def _llama3_factor(share: float, theta: float, largest: float, length: int) -> float:
    """By what one frequency is divided: 1 up to a quarter of the length per wave, `largest` beyond the length."""
    waves = length / (2 * math.pi * math.pow(theta, share))
    smooth = min(max((waves - 1.0) / 3.0, 0.0), 1.0)
    return 1 / ((1 - smooth) / largest + smooth)
