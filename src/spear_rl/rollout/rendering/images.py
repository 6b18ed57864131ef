"""Chat messages with pictures to token ids, through a vision-language model's own processor. Makes no tensors.

A picture's place in a prompt is a run of placeholder tokens, as many as the processor gives a picture of its size.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from spear_rl.errors import MissingExtraError
from spear_rl.rollout.rendering.template import Message
from spear_rl.types import ImagePrompt

MAX_KNOWN = 4096
_MARK = "\u2063mark\u2063"


def opened(image: bytes) -> Any:
    """A picture of Pillow's from the bytes of a file."""
    if find_spec("PIL") is None:
        raise MissingExtraError("pictures need Pillow: pip install 'spear-rl[vision]'")
    from PIL import Image

    return Image.open(io.BytesIO(image)).convert("RGB")


class VisionRenderer:
    """A renderer over a Hugging Face processor; a message's pictures come before its text."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._tokenizer = processor, processor.tokenizer
        self._known: dict[tuple[str, tuple[tuple[int, int], ...]], list[int]] = {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        images = tuple(image for message in messages for image in message.get("images", ()))
        ids = self._ids(self._text(messages), images)
        return ImagePrompt(ids, images) if images else ids

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        text = self._text([_said("user", "?"), _said("assistant", _MARK), _said("user", reply, images)])
        between = self._ids(text.rpartition(_MARK)[2], images)
        if completion_ids and between and completion_ids[-1] == between[0]:
            between = between[1:]
        seen = (*getattr(prompt_ids, "images", ()), *images)
        ids = [*prompt_ids, *completion_ids, *between]
        return ImagePrompt(ids, seen) if seen else ids

    def answer(self, text: str) -> list[int]:
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]

    def parse(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    def _text(self, messages: Sequence[Message]) -> str:
        parts = [
            {
                "role": message["role"],
                "content": [
                    *({"type": "image"} for _ in message.get("images", ())),
                    {"type": "text", "text": message["content"]},
                ],
            }
            for message in messages
        ]
        return str(self._processor.apply_chat_template(parts, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str, images: tuple[bytes, ...]) -> list[int]:
        """Token ids with a run of placeholders a picture. They hang on the pictures' sizes, not on what they show."""
        pictures = [opened(image) for image in images]
        key = (text, tuple(picture.size for picture in pictures))
        known = self._known.get(key)
        if known is None:
            given: dict[str, Any] = {"images": [pictures]} if pictures else {}
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            ids = self._processor(text=[text], add_special_tokens=False, **given)["input_ids"][0]
            known = self._known[key] = [int(token) for token in ids]
        return known


def _said(role: str, content: str, images: tuple[bytes, ...] = ()) -> Message:
    return {"role": role, "content": content, "images": images}
