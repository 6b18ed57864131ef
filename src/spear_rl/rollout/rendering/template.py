"""A tokenizer's chat template, rendered without Jinja where that is provably the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

Message = dict[str, Any]
"""`role` and `content`, both texts; with pictures also `images`, a tuple of PNG files."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""For a tokenizer without a chat template."""

_MARK = "\u2063{}\u2063"
"""Stands for the content of a message by its number; no template contains it."""


class ChatTemplate:
    """Messages to the text of a prompt that ends where the policy's next message starts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template: str | None = None
        if not tokenizer.chat_template:
            warnings.warn("the tokenizer has no chat template; using plain 'role: text' lines", stacklevel=3)
            self._template = PLAIN_TEMPLATE
        source = self._template or tokenizer.chat_template
        self._is_verbatim = isinstance(source, str) and is_verbatim(source)
        self._around = lru_cache(maxsize=64)(self._text_around)

    def text(self, messages: Sequence[Message]) -> str:
        if self._is_verbatim and all(message.keys() == {"role", "content"} for message in messages):
            around = self._around(tuple(message["role"] for message in messages))
            if around is not None:
                contents = [message["content"] for message in messages]
                return "".join(part for pair in zip(around, [*contents, ""], strict=True) for part in pair)
        return self._rendered(messages)

    def _text_around(self, roles: tuple[str, ...]) -> list[str] | None:
        """What the template writes before, between and after the contents; None unless it writes each of them once."""
        marks = [_MARK.format(number) for number in range(len(roles))]
        rest = self._rendered([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        if any(rest.count(mark) != 1 for mark in marks):
            return None
        around = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            around.append(before)
        return [*around, rest]

    def _rendered(self, messages: Sequence[Message]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, chat_template=self._template
            )
        )


def is_verbatim(template: str) -> bool:
    """Whether a template writes contents as they are and decides nothing by them.

    It must go through `messages` in one plain loop, take nothing but named fields of a message, and do nothing with a
    content but write it, alone or as part of a sum. Whatever else it does (`trim`, a test, a macro) means no.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes

    try:
        tree = Environment().parse(template)
    except TemplateSyntaxError:  # it needs extensions of the tokenizer's own
        return False
    plain = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Name, nodes.Const, nodes.Add),
        *(nodes.Concat, nodes.Getitem, nodes.Getattr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
    )
    everything = list(tree.find_all(nodes.Node))
    loops = [node for node in everything if isinstance(node, nodes.For)]
    if not all(isinstance(node, plain) for node in everything) or len(loops) != 1:
        return False
    loop = loops[0]
    if not (isinstance(loop.target, nodes.Name) and loop.iter == nodes.Name("messages", "load")) or loop.test:
        return False
    message = nodes.Name(loop.target.name, "load")
    written = {id(part) for node in everything if isinstance(node, nodes.Output) for part in _summands(node.nodes)}
    fields = [node for node in everything if isinstance(node, nodes.Getitem | nodes.Getattr)]
    wholes = {id(field.node) for field in fields} | {id(loop.iter), id(loop.target)}
    for node in everything:
        if isinstance(node, nodes.Name) and node.name in ("messages", "loop", message.name) and id(node) not in wholes:
            return False
    for field in fields:
        name = _field_name(field)
        if field.node == nodes.Name("loop", "load"):
            is_plain = name in ("first", "last", "index", "index0", "length")
        elif field.node == nodes.Name("messages", "load"):
            is_plain = isinstance(name, int) and id(field) in wholes
        elif name == "content":
            is_plain = field.node == message and id(field) in written
        else:
            is_plain = isinstance(name, str)
        if not is_plain:
            return False
    return True


def _summands(expressions: Sequence[Any]) -> Iterator[Any]:
    """What the given Jinja expressions write one after the other."""
    from jinja2 import nodes

    for expression in expressions:
        if isinstance(expression, nodes.Add):
            yield from _summands([expression.left, expression.right])
        elif isinstance(expression, nodes.Concat):
            yield from _summands(expression.nodes)
        else:
            yield expression


def _field_name(field: Any) -> object:
    """The constant a Jinja expression takes a field by; None for anything computed."""
    from jinja2 import nodes

    if isinstance(field, nodes.Getattr):
        return field.attr
    return field.arg.value if isinstance(field.arg, nodes.Const) else None
