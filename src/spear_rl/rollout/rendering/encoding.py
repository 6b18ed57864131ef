"""Text to token ids, exactly as the tokenizer does it but without doing the same piece twice: games repeat themselves.

A tokenizer that cuts its text into words before it looks for tokens never joins what lies on both sides of certain
places. Between two such places the tokens depend on the text between them alone, so they can be remembered.
"""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

MAX_PIECES = 1 << 16
MAX_PIECE_CHARACTERS = 2000
"""Longer pieces are a policy's babble, hardly ever seen twice."""

_VISIBLE = frozenset(string.ascii_letters + string.digits + string.punctuation)
_LETTERS = frozenset(string.ascii_letters)
_AFTER_SPACE = _LETTERS | {"'", "-"}

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_WORDS = (_WORDS % "", _WORDS % "{1,3}")
"""How Qwen and Llama cut a text into words; GPT-2's way is built into the pre-tokenizer ByteLevel."""


class Encoder:
    """Token ids of a text, without special tokens around it; those written out in it are recognised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = None
        self._has_cuts = False
        self._known: dict[str, list[int]] = {}
        if getattr(tokenizer, "is_fast", False) and not getattr(tokenizer, "split_special_tokens", False):
            # A copy of its own: the tokenizer's callers switch padding and truncation on and off.
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_padding()
            self._backend.no_truncation()
            self._has_cuts = has_cuts(self._backend)

    def __call__(self, text: str) -> list[int]:
        if not text.isascii():  # half a character, which JSON can spell, is nothing a tokenizer takes
            text = text.encode("utf-8", "replace").decode()
        if not self._has_cuts:
            return self._encoded(text)
        ids: list[int] = []
        for piece in pieces(text):
            known = self._known.get(piece)
            ids += self._remembered(piece) if known is None else known
        return ids

    def _remembered(self, piece: str) -> list[int]:
        ids = self._encoded(piece)
        if len(piece) <= MAX_PIECE_CHARACTERS:
            if len(self._known) >= MAX_PIECES:
                self._known.clear()
            self._known[piece] = ids
        return ids

    def _encoded(self, text: str) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def pieces(text: str) -> Iterator[str]:
    """The text cut where no token can reach across: after a line's end and, in a list, between `;` and a word.

    "Shelf 1.\\nYou see: a mug; a pen\\n  - or nothing" -> "Shelf 1.\\n", "You see: a mug;", " a pen\\n  - or nothing"

    A line's end counts only between visible ASCII characters, with at most one space after it and then a word: in a
    longer run of white space, or before a digit or an added token, it is the tokenizer's choice what belongs together.
    """
    lines = text.split("\n")
    held = ""
    for line, following in pairwise(lines):
        held += line + "\n"
        starts = following[:1] in _VISIBLE or (following[:1] == " " and following[1:2] in _AFTER_SPACE)
        if starts and line[-1:] in _VISIBLE:
            yield from _list_entries(held)
            held = ""
    yield from _list_entries(held + lines[-1])


def _list_entries(line: str) -> Iterator[str]:
    if "; " not in line:
        if line:
            yield line
        return
    entries = line.split("; ")
    held = entries[0]
    for entry in entries[1:]:
        if entry[:1] in _LETTERS:
            yield held + ";"
            held = " " + entry
        else:
            held += "; " + entry
    yield held


def has_cuts(backend: Any) -> bool:
    """Whether a `tokenizers.Tokenizer` is of a kind for which `pieces` is known to be right.

    The words must be GPT-2's, Qwen's or Llama's: none of their patterns looks back, and none matches across a cut or
    looks past one with a different result. Nothing before them may move text across a cut (NFC composes no ASCII
    character with a line's end or a space), and no token of the added vocabulary may contain or swallow white space, or
    start like a word.
    """
    normalizer, words = _settings(backend.normalizer), _settings(backend.pre_tokenizer)
    if normalizer not in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []}) or words is None:
        return False
    stages = words["pretokenizers"] if words["type"] == "Sequence" else [words]
    if not _cut_into_words(stages):
        return False
    added = backend.get_added_tokens_decoder().values()
    return not any(
        token.lstrip
        or token.rstrip
        or token.single_word
        or token.content[:1] in _AFTER_SPACE
        or _has_space(token.content)
        for token in added
    )


def _has_space(text: str) -> bool:
    return any(character.isspace() for character in text)


def _cut_into_words(stages: list[dict[str, Any]]) -> bool:
    """Every stage is a known one, and one of them cuts words."""
    has_words = False
    for stage in stages:
        if stage["type"] == "ByteLevel" and not stage["add_prefix_space"]:
            has_words |= stage["use_regex"]
        elif stage["type"] == "Split":
            if stage["pattern"].get("Regex") not in _KNOWN_WORDS or stage["behavior"] != "Isolated" or stage["invert"]:
                return False
            has_words = True
        elif stage["type"] != "Digits":
            return False
    return has_words


def _settings(component: Any) -> dict[str, Any] | None:
    return None if component is None else json.loads(component.__getstate__())
