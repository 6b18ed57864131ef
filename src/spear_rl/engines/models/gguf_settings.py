"""Settings of a model and its tokenizer that transformers leaves out when it reads a GGUF file's metadata.

Without them a model loads with the right weights and wrong logits, or is given other tokens than it was trained with.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spear_rl.errors import ConfigError

WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")
"""Pre-tokenizers of Llama 3 and Mistral: a word that is a token is not merged from its parts."""
COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Pre-tokenizers of tokenizers that compose letters and their accents (NFC)."""
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split digits one by one before words, as llama.cpp does for them."""

_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are never split."""
_IDS = ("eot", "eom", "eos", "bos", "padding", "unknown")
"""Keys of special tokens."""

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


def check_tokenizer(file: Path, reader: Any) -> None:
    """Refuse a file without a whole tokenizer, or with an id that is not in its table of tokens."""
    size, merges, scores = (
        len(reader.fields[f"tokenizer.ggml.{name}"].data) if f"tokenizer.ggml.{name}" in reader.fields else 0
        for name in ("tokens", "merges", "scores")
    )
    if not (size and (merges or scores) and gguf_value(reader, "tokenizer.ggml.model")):
        raise ConfigError(f"engine.model: {file} has no whole tokenizer: take a file that has one")
    for name in _IDS:
        number = gguf_value(reader, f"tokenizer.ggml.{name}_token_id")
        if number is not None and number >= size:
            raise ConfigError(f"engine.model: {file} is damaged: its {name} token is {number} of {size} tokens")


def gguf_tokenizer(file: Path, reader: Any) -> tuple[Any, list[int] | None]:
    """(tokenizer, ids that end an answer), by the file's own table of tokens."""
    from tokenizers import decoders
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace
    from tokenizers.pre_tokenizers import Sequence as Stages
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokens, kinds = (gguf_value(reader, f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    kinds = kinds or [1] * len(tokens)
    whole = [(text, kind) for text, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens(
        [AddedToken(text, special=kind == _CONTROL, normalized=False) for text, kind in whole if text.strip()]
    )
    ids = {name: gguf_value(reader, f"tokenizer.ggml.{name}_token_id") for name in _IDS}
    ends = list(dict.fromkeys(ids[name] for name in ("eot", "eos", "eom") if ids[name] is not None))
    # Some versions of transformers read wrong tokens from the file.
    if ends:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    for name, key in (("bos_token", "bos"), ("pad_token", "padding")):
        if ids[key] is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(ids[key]))
    words = gguf_value(reader, "tokenizer.ggml.pre")
    if words in WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    if words in COMPOSED:
        tokenizer.backend_tokenizer.normalizer = NFC()
    if words in SINGLE_DIGITS:
        split = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Stages(split)
    has_prefix = gguf_value(reader, "tokenizer.ggml.add_space_prefix") is not False
    if not has_prefix and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, Metaspace):  # one of sentencepiece
        tokenizer.backend_tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.chat_template = gguf_value(reader, "tokenizer.chat_template") or tokenizer.chat_template
    return tokenizer, ends or None
