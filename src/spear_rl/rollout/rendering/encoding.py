"""Text to token ids, exactly as the tokenizer does it, with a cache of the parts that recur from prompt to prompt.

A tokenizer that splits text into words first never merges tokens across certain positions. The tokens between two such
positions depend on the text between them alone, so they can be cached.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

MAX_CACHED = 1 << 16
MAX_CACHED_CHARACTERS = 2000
"""Longer segments are rarely seen twice."""

_BOUNDARY = re.compile(r"(?<=[!-~]\n)(?=[!-~]| [A-Za-z'-])|(?<=;)(?= [A-Za-z])")

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_WORDS = (_WORDS % "", _WORDS % "{1,3}")
"""The word patterns of Qwen and Llama; GPT-2's is built into the pre-tokenizer ByteLevel."""


class Encoder:
    """Token ids of a text, without special tokens around it; special tokens written in the text are recognised."""

    def __init__(self, tokenizer: Any) -> None:
        is_fast, splits_special = (getattr(tokenizer, name, False) for name in ("is_fast", "split_special_tokens"))
        self._has_segments = is_fast and not splits_special and has_segments(tokenizer.backend_tokenizer)
        self._tokenizer = tokenizer
        self._options = {"verbose": False} if is_fast else {}  # prompts are bounded by rollout.max_context
        self._cached_ids = lru_cache(maxsize=MAX_CACHED)(self._ids)

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():  # a lone surrogate, which JSON can contain, is refused by tokenizers
            text = text.encode("utf-8", "replace").decode()
        if not self._has_segments:
            return self._ids(text)
        ids: list[int] = []
        for segment in segments(text):
            ids += self._cached_ids(segment) if len(segment) <= MAX_CACHED_CHARACTERS else self._ids(segment)
        return ids

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, **self._options))


def segments(text: str) -> list[str]:
    """The text split where no token can cross: after a line's end and, in a list, between `;` and a word.

    "Shelf 1.\\nYou see: a mug; a pen\\n  - or nothing" -> "Shelf 1.\\n", "You see: a mug;", " a pen\\n  - or nothing"

    A line's end counts only between visible ASCII characters, with at most one space after it and then a word: in a
    longer run of white space, or before a digit or an added token, the tokenizer may merge across it.
    """
    return _BOUNDARY.split(text)


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
