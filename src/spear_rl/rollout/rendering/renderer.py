"""Chat messages to token ids and back, through the tokenizer's own chat template. Sampled tokens never change."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from spear_rl.errors import ConfigError
from spear_rl.rollout.rendering.encoding import Encoder
from spear_rl.types import Completion, ImagePrompt

Message = dict[str, Any]
"""`role` and `content`, both strings; with images also `images`, a tuple of PNG files."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For a tokenizer without a chat template."""

_ANSWER = "\u2063answer\u2063"
"""Stands for the policy's message in a rendered conversation; no template contains it."""


class Renderer(Protocol):
    """Text to tokens and back; owns the chat template.

    prompt    a whole conversation, ready for the policy's next message
    extended  the next prompt, after the policy's `completion_ids` and the environment's `reply` with its images
    answer    the completion of a policy that writes exactly `text`
    parse     the text of a completion
    """

    def prompt(self, messages: Sequence[Message]) -> list[int]: ...
    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]: ...
    def answer(self, text: str) -> list[int]: ...
    def parse(self, token_ids: list[int]) -> str: ...


def images_in(messages: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(image for message in messages for image in message.get("images", ()))


def refuse_images(images: Sequence[bytes]) -> None:
    """Raises if there are any: a text-only policy must not drop images silently."""
    if images:
        raise ConfigError(
            "the environment shows images, which this policy cannot see: set task.options.observation=text, or "
            "engine.model to the folder of a vision-language model"
        )


class ChatRenderer:
    """A renderer over any Hugging Face tokenizer.

    A growing conversation is extended, never rendered again, so the tokens that the policy sampled stay as they are.
    With a ChatML template, for a prompt p and a completion c that ends with its end token:

        extended(p, c, "Nothing happens.") == p + c + ids("\\n<|im_start|>user\\nNothing happens.<|im_end|>\\n...")

    and for a truncated completion the missing `<|im_end|>` comes first.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "engine.model: its tokenizer has no end token (eos_token), so no completion could ever end"
            )
        self._tokenizer, self._encode = tokenizer, Encoder(tokenizer)
        self._after_answer = lru_cache(maxsize=4096)(self._after_answer)  # type: ignore[method-assign]
        self._template = None if tokenizer.chat_template else PLAIN_TEMPLATE
        if self._template:
            warnings.warn("the tokenizer has no chat template; using plain 'role: text' lines", stacklevel=2)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        images = images_in(messages)
        ids = self._ids(self._text(messages), images)
        return ImagePrompt(ids, images) if images else ids

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        between = self._after_answer(reply, images)
        if completion_ids and between and completion_ids[-1] == between[0]:
            between = between[1:]
        ids = [*prompt_ids, *completion_ids, *between]
        images = (*getattr(prompt_ids, "images", ()), *images)
        return ImagePrompt(ids, images) if images else ids

    def answer(self, text: str) -> list[int]:
        return [*self._encode(text), self._tokenizer.eos_token_id]

    def parse(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True)).strip()

    def _after_answer(self, reply: str, images: tuple[bytes, ...]) -> list[int]:
        """The template's tokens from the end of an answer to the next generation prompt, around `reply`."""
        last: Message = {"role": "user", "content": reply}
        if images:
            last["images"] = images
        text = self._text([{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, last])
        return self._ids(text.rpartition(_ANSWER)[2], images)

    def _text(self, messages: Sequence[Message]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, chat_template=self._template
            )
        )

    def _ids(self, text: str, images: tuple[bytes, ...]) -> list[int]:
        refuse_images(images)
        return self._encode(text)


class MessageRenderer:
    """A renderer without a tokenizer, for policies that read text: a token is the number of a distinct message.

    In a new one:

        prompt([{"role": "user", "content": "You see a desk 1."}])               == [0]
        extended([0], answer("go to desk 1"), "You arrive at desk 1.")           == [0, 1, 2]
        [message["role"] for message in messages([0, 1, 2])]                     == ["user", "assistant", "user"]
    """

    def __init__(self) -> None:
        self._messages: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        refuse_images(images_in(messages))
        return [self._number(message["role"], message["content"]) for message in messages]

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        refuse_images(images)
        return [*prompt_ids, *completion_ids, self._number("user", reply)]

    def answer(self, text: str) -> list[int]:
        return [self._number("assistant", text)]

    def parse(self, token_ids: list[int]) -> str:
        return "".join(self._messages[number][1] for number in token_ids).strip()

    def messages(self, prompt_ids: Sequence[int]) -> list[Message]:
        """The conversation that a prompt stands for."""
        return [{"role": role, "content": content} for role, content in map(self._messages.__getitem__, prompt_ids)]

    def completion(self, text: str, *, truncated: bool = False) -> Completion:
        """A completion by a policy whose tokens are unknown."""
        return Completion(self.answer(text), [0.0], truncated)

    def _number(self, role: str, content: str) -> int:
        number = self._numbers.setdefault((role, content), len(self._messages))
        if number == len(self._messages):
            self._messages.append((role, content))
        return number
