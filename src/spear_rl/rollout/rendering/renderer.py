"""Chat messages to token ids and back, through the tokenizer's own chat template. Tokens once written never change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from spear_rl.errors import ConfigError
from spear_rl.rollout.rendering.encoding import Encoder
from spear_rl.rollout.rendering.template import ChatTemplate, Message

_MARK = "\u2063mark\u2063"


class Renderer(Protocol):
    """Text to tokens and back; owns the chat template."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """A whole conversation, ready for the policy's next message."""
        ...

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        """The prompt after the policy said `completion_ids` and the environment answered `reply`, with pictures."""
        ...

    def answer(self, text: str) -> list[int]:
        """What a policy that says exactly `text` would have sampled."""
        ...

    def parse(self, token_ids: list[int]) -> str: ...


def refuse_images(images: Iterable[bytes]) -> None:
    """Pictures must not be dropped in silence by a policy that reads text only."""
    if any(True for _ in images):
        raise ConfigError(
            "the environment shows pictures, which this policy cannot see: set task.options.observation=text, or "
            "engine.model to the folder of a vision-language model"
        )


class ChatRenderer:
    """A renderer over any Hugging Face tokenizer.

    A growing conversation is extended, never rendered anew, so the tokens the policy sampled stay as they are. With a
    ChatML template, for a prompt p and a completion c that ended itself:

        extended(p, c, "Nothing happens.") == p + c + ids("\\n<|im_start|>user\\nNothing happens.<|im_end|>\\n...")

    and for one that was cut off, the missing end `<|im_end|>` comes first.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._after_answer = lru_cache(maxsize=4096)(self._after_answer_ids)  # games repeat themselves
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "engine.model: its tokenizer has no end token (eos_token), so no completion could ever end"
            )
        self._template, self._ids = ChatTemplate(tokenizer), Encoder(tokenizer)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        refuse_images(image for message in messages for image in message.get("images", ()))
        return self._ids(self._template.text(messages))

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        refuse_images(images)
        between = self._after_answer(reply)
        if completion_ids and between and completion_ids[-1] == between[0]:
            between = between[1:]
        return [*prompt_ids, *completion_ids, *between]

    def answer(self, text: str) -> list[int]:
        return [*self._ids(text), self._tokenizer.eos_token_id]

    def parse(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    def _after_answer_ids(self, reply: str) -> list[int]:
        """The template's tokens from the end of an answer to the next generation prompt, around `reply`."""
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            {"role": "user", "content": reply},
        ]
        return self._ids(self._template.text(messages).rpartition(_MARK)[2])
