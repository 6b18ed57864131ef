"""A renderer without a tokenizer, whose tokens are whole messages: for policies that read text, such as chat servers."""

from __future__ import annotations

from collections.abc import Sequence

from spear_rl.rollout.rendering.renderer import Message, images_in, refuse_images
from spear_rl.types import Completion


class MessageRenderer:
    """Numbers every distinct message in order of first appearance, so that prompts stay short.

    In a fresh one:

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
