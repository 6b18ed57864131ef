"""Conversations with tools in tokens: a whole one, and what follows the tokens that the policy wrote."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from secrets import token_hex
from typing import Any

from spear_rl.errors import ConfigError
from spear_rl.rollout.agents.messages import said, without_tools
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.renderer import ChatRenderer, Message
from spear_rl.rollout.rendering.tool_calls import split_calls

_ANSWER = f"\u2063{token_hex(8)}\u2063"
"""Stands for the policy's message in a rendered conversation; random, so that no text contains it."""
Tools = Sequence[Mapping[str, Any]]
ReadCalls = Callable[[str, Tools], tuple[str, list[dict[str, Any]], bool]]
"""Answer and tools in; out: its text without the calls, the calls, and whether some could not be read."""


class AgentRenderer(ChatRenderer):
    """A chat renderer for conversations with tools.

    The chat template shows tools, calls and results in its own format. A template that knows no tools gets them in
    plain messages (`messages.without_tools`).

    Args:
        read_calls: reads the calls in an answer, as the model's family writes them.
    """

    _kept_tags = (
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
        *("<|python_tag|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    )

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None, read_calls: ReadCalls = split_calls) -> None:
        super().__init__(tokenizer, thinking=thinking)
        self.read_calls = read_calls

    def conversation(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """A whole conversation, ready for the policy's next message."""
        return self._encode(self._shown(messages, tools))

    def continued(
        self, prompt_ids: list[int], completion_ids: list[int], messages: Sequence[Message], tools: Tools = ()
    ) -> list[int]:
        """The prompt after the policy's completion and the `messages` that follow it, whose first part stays as it is.

        With a ChatML template: prompt + completion + ids("\\n<|im_start|>user\\nHello<|im_end|>\\n..."), and for a
        completion without its end token that comes first.
        """
        before: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        after = self._shown([*before, *messages], tools).partition(_ANSWER)[2]
        between = self._encode(self._from_end(after))
        if completion_ids and between and completion_ids[-1] == between[0]:
            between = between[1:]
        return [*prompt_ids, *completion_ids, *between]

    def written(self, message: Message, tools: Tools) -> str:
        """What a policy writes for a message: its calls as the chat template shows them, or in <tool_call> tags."""
        calls = [call | {"id": f"call{number:05d}"} for number, call in enumerate(message.get("tool_calls", ()))]
        with suppress(Exception):  # templates raise what they like
            if calls and self._knows_tools:
                asked: Message = {"role": "user", "content": "?"}
                before = self._rendered([asked], tools=list(tools) or None)
                options = self._options | {"tools": list(tools) or None, "add_generation_prompt": False}
                shown = str(self._templated.apply_chat_template([asked, message | {"tool_calls": calls}], **options))
                _, found, answer = shown.partition(before.removesuffix("<think>\n"))
                end = str(self._tokenizer.decode([self.end_id])).strip()
                text = without_thoughts(answer.partition(end)[0]).strip()
                if found and self.read_calls(text, tools)[1] == [call["function"] for call in calls]:
                    return text
        return said(message)

    def decoded(self, token_ids: list[int]) -> str:
        """As `parse`, with the white space around it."""
        if self._hidden_tags:
            token_ids = [token for token in token_ids if token not in self._hidden_tags]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not self._hidden_tags))

    def text_pieces(self, token_ids: list[int]) -> list[str]:
        """The text of each token, for a reader."""
        return [str(self._tokenizer.decode([token])) for token in token_ids]

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    def _shown(self, messages: Sequence[Message], tools: Tools) -> str:
        if not self._knows_tools:
            return self._text(without_tools(messages, tools))
        if not tools and all(message["role"] != "tool" and "tool_calls" not in message for message in messages):
            return self._text(messages)
        with suppress(Exception):  # templates raise what they like
            return self._rendered(messages, tools=list(tools) or None)
        return self._text(without_tools(messages, tools))

    @cached_property
    def _knows_tools(self) -> bool:
        template = str(self._options.get("chat_template") or self._templated.chat_template or "")
        return "tools" in template


def require_text(processor: object) -> None:
    """Agents get text only."""
    if processor is not None:
        raise ConfigError("task.agent: agents are served text only: set engine.model to a model without vision")
