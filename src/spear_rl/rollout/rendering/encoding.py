"""Which tokenizers encode the segments of a text (`renderer.segments`) as they encode the whole text.

A tokenizer that splits text into words first never merges tokens across certain positions. The tokens between two such
positions depend on the text between them alone, so they can be cached.
"""

import json
import re
from typing import Any

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_WORDS = (_WORDS % "", _WORDS % "{1,3}")
"""The word patterns of Qwen and Llama; GPT-2's is built into the pre-tokenizer ByteLevel."""


def has_segments(backend: Any) -> bool:
    """Whether `segments` is known to be right for a `tokenizers.Tokenizer`.

    Its words must be GPT-2's, Qwen's or Llama's: none of their patterns looks behind, matches across a boundary, or
    looks past one with a different result. Its normalizer must not move text across a boundary (NFC composes no ASCII
    character with a line's end or a space), and no added token may contain or strip white space, or start like a word.
    """
    normalizer, words = (
        None if component is None else json.loads(component.__getstate__())
        for component in (backend.normalizer, backend.pre_tokenizer)
    )
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}) or words is None:
        return False
    kinds = [_kind(stage) for stage in words.get("pretokenizers", [words])]
    if "words" not in kinds or "unknown" in kinds:
        return False
    added = backend.get_added_tokens_decoder().values()
    return not any(t.lstrip or t.rstrip or t.single_word or re.search(r"^[A-Za-z'-]|\s", t.content) for t in added)


def _kind(stage: dict[str, Any]) -> str:
    """words: splits text into words in a known way; harmless: splits words further at most; or unknown."""
    if stage["type"] == "ByteLevel" and not stage["add_prefix_space"]:
        return "words" if stage["use_regex"] else "harmless"
    if stage["type"] == "Split":
        is_known = stage["pattern"].get("Regex") in _KNOWN_WORDS
        return "words" if is_known and stage["behavior"] == "Isolated" and not stage["invert"] else "unknown"
    return "harmless" if stage["type"] == "Digits" else "unknown"
