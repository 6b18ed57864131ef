"""What the policy sees and writes, in tokens: chat template, token cache and the growing chat (others: `layouts`).

Sampled tokens never change: a growing conversation is extended, never rendered again.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Any, Literal, Protocol

from spear_rl.errors import ConfigError
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.conversation import ToolSupport, merged, system_message, tool_results, tool_support
from spear_rl.rollout.rendering.conversation import without_thoughts as without_thoughts
from spear_rl.rollout.rendering.encoding import has_segments
from spear_rl.types import Completion, ImagePrompt, Turn, images_of

Message = dict[str, Any]
"""`role` and `content`, both strings; with images also `images`, PNG files; with tools see `system_message`."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For a tokenizer without a chat template."""

TODAY = datetime(2024, 7, 26)
"""The date for templates that print one: what Llama 3.2's template falls back to without a clock."""
_DATE = re.compile(r"""strftime_now\(\s*(["'])([^"']*)\1\s*\)""")

_ANSWER = "\u2063answer\u2063"
"""Stands for the policy's message in a rendered conversation; no template contains it."""
_ANSWERED: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]

MAX_CACHED = 1 << 16
MAX_CACHED_CHARACTERS = 2000
"""Longer segments are rarely seen twice."""

_BOUNDARY = re.compile(r"[\n;](?:(?<=[!-~]\n)(?=[!-~]| [A-Za-z'-])|(?<=;)(?= [A-Za-z]))")
"""The last character of a segment. A pattern that begins with a character class is searched faster."""


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


Layout = Callable[[Renderer, Task, Sequence[Observation], Sequence[Turn]], list[int]]
"""Task, all observations so far (one more than turns) and all turns so far in; the next prompt's token ids out."""

Detail = Literal["full", "short"]
"""full: instructions and the list of possible actions are in the prompt; short: observations only, for tiny models."""

_SWITCH = re.compile(r"\benable_thinking\b|\bif (?:not )?thinking\b|\bthinking is\b|\(thinking\b")


def growing_chat(
    renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn], *,
    detail: Detail = "full",
) -> list[int]:  # fmt: skip
    """The whole conversation so far, in the tokens that were sampled. Its turns train as one row."""
    text, images = shown_text(observations[-1], detail), observations[-1].images
    if not turns:
        return renderer.prompt(first_messages(task, detail, text, images))
    last = turns[-1]
    before = ImagePrompt(last.prompt_ids, last.images) if last.images else last.prompt_ids
    return renderer.extended(before, last.completion.token_ids, text, images)


class ChatRenderer:
    """A renderer over any Hugging Face tokenizer.

    A growing conversation is extended, never rendered again, so the tokens that the policy sampled stay as they are.
    With a ChatML template, for a prompt p and a completion c that ends with its end token:

        extended(p, c, "Nothing happens.") == p + c + ids("\\n<|im_start|>user\\nNothing happens.<|im_end|>\\n...")

    and for a truncated completion the missing `<|im_end|>` comes first. So thoughts stay in a growing conversation,
    also where the template would leave earlier ones out.

    A template without a system role, or one that wants roles to alternate, gets its messages merged: each conversation
    that it cannot show otherwise. One that prints today's date prints TODAY, so prompts do not depend on the clock.

    Args:
        thinking: the template's switch for thoughts; None leaves the template's own default.
    """

    _kept_tags: tuple[str, ...] = ("<think>", "</think>")  # special tokens that stay in a completion's text

    def __init__(self, tokenizer: Any, *, thinking: bool | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "engine.model: its tokenizer has no end token (eos_token), so no completion could ever end"
            )
        self._set(tokenizer, tokenizer, thinking)
        self._after_answer = lru_cache(maxsize=4096)(self._after_answer)  # type: ignore[method-assign]
        if not tokenizer.chat_template:
            self._options["chat_template"] = PLAIN_TEMPLATE
            warnings.warn("the tokenizer has no chat template; using plain 'role: text' lines", stacklevel=2)

    def _set(self, templated: Any, tokenizer: Any, thinking: bool | None) -> None:
        self._templated, self._tokenizer, self._encode = templated, tokenizer, Encoder(tokenizer)
        self._options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
        if isinstance(template := templated.chat_template, str) and _DATE.search(template):
            self._options["chat_template"] = _DATE.sub(lambda found: f'"{TODAY.strftime(found[2])}"', template)
        if thinking is not None:
            if not _SWITCH.search(str(templated.chat_template or "")):
                raise ConfigError("rollout.thinking: the model's chat template has no such switch; leave it out")
            self._options |= {"enable_thinking": thinking, "thinking": thinking}

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        images = images_in(messages)
        ids = self._ids(self._text_with_tools(*messages) if "schemas" in messages[0] else self._text(messages), images)
        return ImagePrompt(ids, images) if images else ids

    def extended(
        self, prompt_ids: list[int], completion_ids: list[int], reply: str, images: tuple[bytes, ...] = ()
    ) -> list[int]:
        between = self._after_answer(reply, images)
        if completion_ids and between and completion_ids[-1] == between[0]:
            between = between[1:]
        ids = [*prompt_ids, *completion_ids, *between]
        images = (*images_of(prompt_ids), *images)
        return ImagePrompt(ids, images) if images else ids

    def answer(self, text: str) -> list[int]:
        return [*self._encode(f"</think>\n\n{text}" if self._opens_thought else text), self.end_id]

    def parse(self, token_ids: list[int]) -> str:
        shown = [token for token in token_ids if token not in self._hidden_tags]
        return str(self._tokenizer.decode(shown, skip_special_tokens=not self._hidden_tags)).strip()

    @cached_property
    def _opens_thought(self) -> bool:
        """Whether the prompt ends with an opening tag, so that every answer begins with a thought."""
        return self._text([{"role": "user", "content": "?"}]).rstrip().endswith("<think>")

    @cached_property
    def _hidden_tags(self) -> frozenset[int]:
        """All special tokens but `_kept_tags`; empty where those are plain tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {number: str(token) for number, token in added.items() if token.special}
        tags = {number for number, text in special.items() if text in self._kept_tags}
        return frozenset(special.keys() - tags) if tags else frozenset()

    @cached_property
    def end_id(self) -> int:
        """The token that ends an answer: the template's, or else the tokenizer's."""
        said = [*_ANSWERED, {"role": "user", "content": "?"}]
        ids: list[int] = []
        with suppress(ConfigError):  # a template for one question alone
            before, _, after = self._text(said).rpartition(_ANSWER)
            ids = self._encode(after.lstrip(" ")) if before else []
        is_added = bool(ids) and ids[0] in getattr(self._tokenizer, "added_tokens_decoder", {})
        return ids[0] if is_added else int(self._tokenizer.eos_token_id)

    def _after_answer(self, reply: str, images: tuple[bytes, ...]) -> list[int]:
        """The template's tokens from the end of an answer to the next generation prompt, around `reply`."""
        last: list[Message] = [{"role": "user", "content": reply, **({"images": images} if images else {})}]
        if reply.startswith("<tool_response>") and self._tool_support.has_role:
            last = tool_results(reply) or last
        text = self._text([*_ANSWERED, *last])
        return self._ids(self._from_end(text.rpartition(_ANSWER)[2]), images)

    def _from_end(self, after: str) -> str:
        """What follows an answer, without blanks before the end token: these are not sampled."""
        return bare if (bare := after.lstrip(" ")).startswith(str(self._tokenizer.eos_token)) else after

    @cached_property
    def _tool_support(self) -> ToolSupport:
        return tool_support(self._rendered)

    def _text_with_tools(self, first: Message, *others: Message) -> str:
        if self._tool_support.shows_tools:
            return self._text([{"role": first["role"], "content": first["told"]}, *others], tools=first["schemas"])
        return self._text([{"role": first["role"], "content": first["content"]}, *others])

    def _text(self, messages: Sequence[Message], **options: Any) -> str:
        with suppress(Exception):  # templates raise what they like
            text = self._rendered(messages, **options)
            if messages[0]["role"] != "system" or messages[0]["content"].strip() in text:
                return text
        try:
            return self._rendered(merged(messages), **options)
        except Exception as error:  # of any type, as above
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"engine.model: its chat template cannot show this conversation: {reason}") from error

    def _rendered(self, messages: Sequence[Message], **options: Any) -> str:
        return str(self._templated.apply_chat_template(list(messages), **self._options, **options))

    def _ids(self, text: str, images: tuple[bytes, ...]) -> list[int]:
        refuse_images(images)
        return self._encode(text)


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
        parts = (self._cached_ids(s) if len(s) <= MAX_CACHED_CHARACTERS else self._ids(s) for s in segments(text))
        return list(chain.from_iterable(parts))

    def _ids(self, text: str) -> list[int]:
        if self._has_segments and (backend := self._tokenizer.backend_tokenizer).truncation is backend.padding is None:
            return list(backend.encode(text, add_special_tokens=False).ids)  # what `encode` calls, 8 us sooner
        return list(self._tokenizer.encode(text, add_special_tokens=False, **self._options))


def segments(text: str) -> list[str]:
    """The text split where no token can cross: after a line's end and, in a list, between `;` and a word.

    "Shelf 1.\\nYou see: a mug; a pen\\n  - or nothing" -> "Shelf 1.\\n", "You see: a mug;", " a pen\\n  - or nothing"

    A line's end counts only between visible ASCII characters, with at most one space after it and then a word: in a
    longer run of white space, or before a digit or an added token, the tokenizer may merge across it.
    """
    ends = (found.end() for found in _BOUNDARY.finditer(text))
    return [text[begin:end] for begin, end in pairwise([0, *ends, len(text)])]


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


def images_in(messages: Sequence[Message]) -> tuple[bytes, ...]:
    return tuple(image for message in messages for image in message.get("images", ()))


def refuse_images(images: Sequence[bytes]) -> None:
    """Raises if there are any: a text-only policy must not drop images silently."""
    if images:
        raise ConfigError(
            "the environment shows images, which this policy cannot see: set task.options.observation=text, or "
            "engine.model to the folder of a vision-language model"
        )


def first_messages(task: Task, detail: Detail, content: str, images: tuple[bytes, ...]) -> list[Message]:
    """The task's instructions, in their role, and `content`."""
    message: Message = {"role": "user", "content": content}
    if images:
        message["images"] = images
    if detail == "short" or not (task.instructions or task.tools):
        return [message]
    if task.tools:
        return [system_message(task.instructions, task.tools), message]
    if task.instructions_role == "system":
        return [{"role": "system", "content": task.instructions}, message]
    return [message | {"content": f"{task.instructions}\n\n{content}"}]


def shown_text(observation: Observation, detail: Detail) -> str:
    if detail == "full" and observation.choices:
        return f"{observation.text}\n{choices_line(observation)}"
    return observation.text


def choices_line(observation: Observation) -> str:
    return "Possible actions: " + "; ".join(observation.choices)


def __getattr__(name: str) -> Any:
    """The other layouts, by the path that they had."""
    if name in ("LAYOUTS", "independent_turns", "present_only"):
        from spear_rl.rollout.rendering import layouts

        return getattr(layouts, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
