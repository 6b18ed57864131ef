"""Chat messages with images to token ids, through a vision-language model's own processor. Makes no tensors.

In a prompt an image is a run of placeholder tokens, as many as the processor gives an image of its size.
"""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from spear_rl.errors import MissingExtraError
from spear_rl.rollout.rendering.renderer import ChatRenderer, Message

MAX_CACHED = 4096


def pil_image(png: bytes) -> Any:
    """A Pillow image from the bytes of a PNG file."""
    if find_spec("PIL") is None:
        raise MissingExtraError("images need Pillow: pip install 'spear-rl[vision]'")
    from PIL import Image

    return Image.open(io.BytesIO(png)).convert("RGB")


class VisionRenderer(ChatRenderer):
    """A renderer over a Hugging Face processor; a message's images come before its text."""

    def __init__(self, processor: Any, *, thinking: bool | None = None) -> None:
        self._processor = processor
        self._set(processor, processor.tokenizer, thinking)
        self._cache: dict[tuple[str, tuple[tuple[int, int], ...]], list[int]] = {}

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
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
        return super()._rendered(parts, **options)

    def _ids(self, text: str, images: tuple[bytes, ...]) -> list[int]:
        """Token ids with the images' placeholders, which depend on the images' sizes, not on their content."""
        opened = [pil_image(image) for image in images]
        key = (text, tuple(image.size for image in opened))
        if key not in self._cache:
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            options: dict[str, Any] = {"images": [opened]} if opened else {}
            ids = self._processor(text=[text], add_special_tokens=False, **options)["input_ids"][0]
            self._cache[key] = [int(token) for token in ids]
        return self._cache[key]
