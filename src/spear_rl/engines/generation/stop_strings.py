"""Strings that end a completion, noticed without decoding every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TAIL = 32
"""Tokens looked back at; a stop string is far shorter than their text."""


class StopStrings:
    """Whether a completion has just come to one of `stops`."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._may_end: dict[int, bool] = {}

    def end(self, token_ids: list[int]) -> bool:
        """Whether the text of these tokens contains a stop string, given that it did not one token ago."""
        if not self._stops:
            return False
        last = token_ids[-1]
        if last not in self._may_end:
            self._may_end[last] = self._could_end(last)
        if not self._may_end[last]:
            return False
        tail = self._tokenizer.decode(token_ids[-TAIL:])
        return any(stop in tail for stop in self._stops)

    def _could_end(self, token: int) -> bool:
        """A stop string is complete with the token that brings its last character; a stray byte may be part of one."""
        text = self._tokenizer.decode([token])
        return not text or "\ufffd" in text or any(stop[-1] in text or stop[-1].isspace() for stop in self._stops)
