"""A renderer without a tokenizer: its tokens are whole messages. For policies that read texts, as chat servers do."""

from __future__ import annotations

from collections.abc import Sequence

from spear_rl.rollout.rendering.renderer import refuse_images
from spear_rl.rollout.rendering.template import Message
from spear_rl.types import Completion


class MessageRenderer:
    """Gives every different message a number when it first meets it, so that prompts stay short and nothing is lost.

    In a fresh one:

        prompt([{"role": "user", "content": "You see a desk 1."}])               == [0]
        extended([0], answer("go to desk 1"), "You arrive at desk 1.")           == [0, 1, 2]
        [message["role"] for message in messages([0, 1, 2])]                     == ["user", "assistant", "user"]
    """

    def __init__(self) -> None:
        self._met: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        refuse_images(image for message in messages for image in message.get("images", ()))
        return [self._number(message["role"], message["content"]) for message in messages]

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        refuse_images(images)
        return [*prompt_ids, *completion_ids, self._number("user", reply)]

    def answer(self, text: str) -> list[int]:
        return [self._number("assistant", text)]

    def parse(self, token_ids: list[int]) -> str:
        return "".join(self._met[number][1] for number in token_ids).strip()

    def messages(self, prompt_ids: Sequence[int]) -> list[Message]:
        """The conversation that a prompt stands for."""
        return [{"role": role, "content": content} for role, content in map(self._met.__getitem__, prompt_ids)]

    def completion(self, text: str, *, truncated: bool = False) -> Completion:
        """What a policy said, of whose tokens nothing is known."""
        return Completion(self.answer(text), [0.0], truncated)

    def _number(self, role: str, content: str) -> int:
        number = self._numbers.setdefault((role, content), len(self._met))
        if number == len(self._met):
            self._met.append((role, content))
        return number
