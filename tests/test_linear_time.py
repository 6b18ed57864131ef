"""Everything that reads text of a policy, a server, a data set or a game takes time in proportion to its length.

A pattern that begins with a repetition is tried at every place of a text made for it: 100 kB of blanks took half a
minute. Here every reader gets texts made for it, at two lengths.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from html import unescape

import pytest

from spear_rl.algorithms.filters import repetitive, unreadable
from spear_rl.app.show.text import Words, episode_lines
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.envs.adapters.shared import answered
from spear_rl.envs.alfworld.gamefile import GameFile
from spear_rl.envs.household.experts.search import _ARRIVED, Searcher
from spear_rl.envs.household.families import parsed_task
from spear_rl.envs.household.rules.pddl import read_formula, task_sentence
from spear_rl.envs.lookup import LookupEnv
from spear_rl.envs.shared.answer_tags import parsed_answer
from spear_rl.envs.sokoban.boxoban import _HEAD
from spear_rl.envs.tool_math.calls import tool_calls
from spear_rl.envs.tool_math.problems import _answer, _question
from spear_rl.envs.tool_math.verification.answers import boxed_answer, integer, is_copied, is_same_answer, normalised
from spear_rl.envs.tool_math.verification.integers import as_integer
from spear_rl.envs.tools.env import answer_in
from spear_rl.envs.webshop.browser.server import escaped
from spear_rl.envs.webshop.data.product import prices
from spear_rl.envs.webshop.data.words import lowered, nouns
from spear_rl.envs.webshop.experts import _LIMIT
from spear_rl.envs.webshop.search import _WORD
from spear_rl.envs.webshop.session import parsed_action
from spear_rl.errors import UserError
from spear_rl.io.escaping import indented, markdown, one_line, visible
from spear_rl.rollout.policies.endpoint import with_stop
from spear_rl.rollout.rendering.conversation import tool_results, without_thoughts
from spear_rl.rollout.rendering.layouts import _action
from spear_rl.rollout.rendering.renderer import Encoder, MessageRenderer, segments
from spear_rl.rollout.rendering.tool_calls import calls_in, split_calls
from spear_rl.sandbox.client.fusion import ESCAPES
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn


def turn(text: str) -> Turn:
    return Turn([1], Completion(list(map(ord, text)), [0.0] * len(text)), text=text)


def group(text: str) -> list[Group]:
    return [Group("t", [Trajectory([turn(text)], Stop.DONE)])]


def searched(text: str) -> None:
    searcher = Searcher(0)
    searcher._learn(text)
    searcher._learn(f"You move the {text}")
    searcher._learn(f"You pick up the {text}")


def shown(text: str) -> None:
    episode_lines(
        {
            "task": text,
            "step": 0,
            "success": True,
            "reward": 1.0,
            "stop": text,
            "turns": [{"observation": text, "text": text}],
        },
        Words(full=True),
    )


ENCODER = Encoder(tiny_tokenizer(["look at the code"]))
READERS: dict[str, Callable[[str], object]] = {
    "command of household and sokoban": parsed_answer,
    "action of webshop": parsed_action,
    "step of lookup": lambda text: (env := LookupEnv("red", "1"), env.reset(), env.step(text)),
    "thoughts": without_thoughts,
    "calls of tools": lambda text: (calls_in(text, {"add": {}}), split_calls(text, [{"function": {"name": "add"}}])),
    "results of tools": tool_results,
    "answer with tools": answer_in,
    "action of an adapter": answered,
    "tool calls": tool_calls,
    "tool calls in every format": lambda text: tool_calls(text, formats="all"),
    "boxed answer": boxed_answer,
    "integer": as_integer,
    "same answer": lambda text: is_same_answer(text, text[:2000], integer),
    "short answer": lambda text: is_same_answer("42", text[:2000], normalised, text[:20_000]),
    "formula": lambda text: is_same_answer("\\sqrt{2}", text[:2000], normalised, text[:20_000]),
    "copied answer": lambda text: is_copied("1/2", text[:1000], text),
    "normalised answer": lambda text: normalised(text, text),
    "question of a data set": _question,
    "question of a conversation": lambda text: _question([{"role": "user", "content": text}]),
    "answer of a data set": _answer,
    "words of a search": _WORD.findall,
    "nouns of a title": nouns,
    "price": prices,
    "price limit": lambda text: _LIMIT.sub("", text),
    "expert's reading": searched,
    "expert's place": _ARRIVED.match,
    "task of household": parsed_task,
    "task in a grammar": task_sentence,
    "game's grammar": lambda text: GameFile("", text, "", (), True, "").is_published,
    "PDDL": read_formula,
    "Boxoban": _HEAD.split,
    "named turn": lambda text: _action(turn(text), 400),
    "unreadable": lambda text: unreadable(group(text)),
    "repetitive": lambda text: repetitive(group(text)),
    "segments": segments,
    "encoder": ENCODER,
    "messages": lambda text: (own := MessageRenderer()).messages(own.prompt([{"role": "user", "content": text}])),
    "stop string": lambda text: with_stop(text, ("</action>", "</think>"), {"finish_reason": "stop"}),
    "notebook's colours": lambda text: ESCAPES.sub("", text),
    "shown": visible,
    "shown set in": indented,
    "shown on one line": one_line,
    "shown in Markdown": markdown,
    "shown on a page": lambda text: unescape(str(escaped(text))),
    "button's name": lowered,
    "shown episode": shown,
}
SOUP = {
    "blanks": " ",
    "lines": "\n",
    "blank lines": "\n \t",
    "returns": "\r",
    "one word": "a",
    "digits": "9",
    "digits and commas": "1,234",
    "backslashes": "\\",
    "open tags": "<think>",
    "closed tags": "<think></think>",
    "turned tags": "</think><think>",
    "actions": "<action>",
    "half actions": "<action>a</action",
    "angles": "<a",
    "tool calls": "<tool_call>",
    "code tags": "<code>",
    "fences": "```python\n",
    "equations": "x=",
    "sums": "a+",
    "half tool calls": '<tool_call>{"a":',
    "deep lists": "[",
    "deep records": '{"a":',
    "boxes": "\\boxed{",
    "boxes with blanks": "\\boxed   ",
    "nested boxes": "\\boxed{ x ",
    "braces": "{",
    "closed braces": "}{",
    "texts": "\\text{a",
    "fractions": "\\frac1",
    "brackets": "search[",
    "clicks": "click[a]",
    "on the": "On the ",
    "on the, you see": "On the a 1, you see ",
    "is open": "The a is open. In it",
    "to the": "a to the ",
    "your task": "Your task is to: ",
    "put a": "put a ",
    "arrive": "You arrive at ",
    "DAPO": "Solve the following math problem step by step.",
    "DAPO's end": "Remember to put your answer on its own line",
    "DAPO's end in lines": "\nRemember to put your answer on its own line".replace("Remember", " Remembe"),
    "dollars": "$1",
    "price lower than": ", and price lower than 1",
    "apostrophes": "a'",
    "points": "a.",
    "semicolons": "; ",
    "list": "a; 1",
    "parentheses": "(",
    "comments": ";",
    "escapes": "\x1b[1;",
    "marks": "\u202e",
    "mojibake": "\u00e9\u20ac",
    "halves": "\ud800",
    "hashes": "####",
}


def seconds(read: Callable[[str], object], text: str) -> float:
    """The quicker of two runs, for a machine that is busy with other things."""
    took = []
    for _ in range(2):
        started = time.process_time()
        with suppress(ValueError, RecursionError, UserError):
            read(text)
        took.append(time.process_time() - started)
        if took[-1] < 0.05:
            break
    return min(took)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_text_of_twice_the_length_takes_about_twice_the_time(reader):
    read, slow = READERS[reader], {}
    for name, part in SOUP.items():
        for end in ("", " x]</action>"):
            text = part * (100_000 // len(part)) + end
            whole = seconds(read, text)
            if whole > 0.5:  # what is quick at 100 kB is no danger
                half = seconds(read, text[len(text) // 2 :])
                if whole > 3.5 * half or whole > 5:
                    slow[name + end] = (half, whole)
    assert not slow


def test_a_hundred_kilobytes_of_blanks_are_read_at_once():
    text = "x" + " " * 100_000 + "x"
    for read in READERS.values():
        assert seconds(read, text) < 2


def test_what_a_frame_of_dapo_surrounds_is_the_question():
    before = "Solve the following math problem step by step. The last line is Answer: $Answer.\n\n"
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    assert _question(f"{before}What is 1 + 1?{after}") == "What is 1 + 1?"
    assert _question([{"role": "user", "content": f"{before}\n \nTwo\n\nlines{after}"}]) == "Two\n\nlines"
    assert _question("Remember to put your answer on its own line.") == "Remember to put your answer on its own line."
    assert json.loads(json.dumps(_question("no frame"))) == "no frame"
