"""The layouts `log` and `transcript`: a prompt per turn that names every earlier action, or tells all that happened."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spear_rl.rollout import ChatRenderer
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.renderer import LAYOUTS, MessageRenderer
from spear_rl.types import Completion, Turn


def prompt_after(tokenizer, said: list[str], *, layout: str = "log") -> str:
    renderer = ChatRenderer(tokenizer)
    task = Task("t", make_env=lambda: None, instructions="Act.")
    seen = ["You are in a room with a desk 1.\n\nYour task is to: look.", *(f"heard {n}" for n in range(len(said)))]
    observations = [Observation(text, choices=("go", "stay")) for text in seen]
    turns = [Turn([1], Completion([2], [0.0]), text=text) for text in said]
    return tokenizer.decode(LAYOUTS[layout](renderer, task, observations, turns))


def test_the_first_prompt_has_the_whole_opening(tokenizer):
    text = prompt_after(tokenizer, [])
    assert "a room with a desk 1" in text
    assert "Possible actions: go; stay" in text


def test_later_prompts_keep_the_task_and_name_every_action_without_its_tags(tokenizer):
    said = [
        "<think>hm</think><action>go to desk 1</action>",
        "<action>open it</action>",
        "<action>take pen 1</action>",
        "",
    ]
    text = prompt_after(tokenizer, said)
    assert "a room with a desk 1" not in text
    assert "Your task is to: look." in text
    assert "Earlier: go to desk 1; open it" in text
    assert "> take pen 1" in text
    assert "> (nothing)" in text
    assert "heard 2" in text
    assert "heard 0" not in text
    assert "Now: heard 3" in text


def test_babble_is_cut(tokenizer):
    text = prompt_after(tokenizer, ["x" * 500, "go", "go"])
    assert "x" * 60 in text
    assert "x" * 61 not in text


def test_the_papers_layout_is_as_it_was(tokenizer):
    text = prompt_after(tokenizer, ["<action>go</action>"] * 3, layout="turns")
    assert "a room with a desk 1" in text
    assert "Steps taken: 3. The last 2:" in text
    assert "Earlier" not in text


# -- the layout `transcript`: everything so far, and possible actions as what changed --------------------------------


def room(seen: list[tuple[str, tuple[str, ...]]], said: list[str], *, detail: str = "full") -> str:
    """The prompt after these (observation, possible actions) and answers, as text."""
    observations = [Observation(text, choices=choices) for text, choices in seen]
    turns = [Turn([1], Completion([2], [0.0]), text=text) for text in said]
    renderer = MessageRenderer()
    task = Task("t", make_env=lambda: None, instructions="Act.")
    [message] = renderer.messages(LAYOUTS["transcript"](renderer, task, observations, turns, detail=detail))
    return message["content"]


def test_a_transcript_has_every_action_and_observation_and_what_changed_of_the_possible_actions():
    seen = [
        ("A desk 1 and a shelf 1.", ("go to desk 1", "go to shelf 1", "look")),
        ("On the desk 1, a mug 1.", ("go to shelf 1", "look", "take mug 1")),
        ("You have it.", ("go to shelf 1", "look")),
    ]
    assert room(seen[:1], []) == (
        "Act.\n\nA desk 1 and a shelf 1.\nPossible actions: go to desk 1; go to shelf 1; look"
    )
    said = ["<think>hm</think><action>go to desk 1</action>", "<action>take mug 1</action>"]
    assert room(seen, said) == (
        "Act.\n\nA desk 1 and a shelf 1.\nPossible actions: go to desk 1; go to shelf 1; look\n"
        "> go to desk 1\nOn the desk 1, a mug 1.\n> take mug 1\nYou have it.\n"
        "Possible actions: go to shelf 1; look"  # shorter than what changed
    )
    assert room(seen, said, detail="short") == (
        "A desk 1 and a shelf 1.\n> go to desk 1\nOn the desk 1, a mug 1.\n> take mug 1\nYou have it."
    )


NAMES = st.lists(st.from_regex(r"[a-z]{3,8} [0-9]", fullmatch=True), unique=True, min_size=1, max_size=12).map(tuple)


@given(NAMES, NAMES, st.integers(0, 10**6))
def test_the_possible_actions_can_be_read_from_what_changed(first, other, seed):
    rng = random.Random(seed)
    now = tuple(dict.fromkeys([*rng.sample(first, rng.randint(0, len(first))), *other]))
    line = room([("a", first), ("b", now)], ["go"]).rpartition("\n")[2].removeprefix("Possible actions: ")
    if line.startswith("as at the start"):
        gone, _, new = line.removeprefix("as at the start").partition(". Also: ")
        gone, new = (set(filter(None, text.split("; "))) for text in (gone.removeprefix(", without: "), new))
        assert gone <= set(first)
        assert (set(first) - gone) | new == set(now)
        assert len(line) < len("; ".join(now))
    else:
        assert line == "; ".join(now)


@given(st.lists(st.tuples(st.text("ab \n", max_size=9), NAMES), min_size=2, max_size=8))
def test_a_transcripts_prompts_differ_at_their_ends_alone(seen):
    texts = [room(seen[: n + 1], ["go"] * n) for n in range(len(seen))]
    for number, (text, later) in enumerate(pairwise(texts)):
        ends = text.rpartition("\nPossible actions: ")[0] if number else text  # the first list stays
        assert later.startswith(f"{ends}\n> go\n")


def test_an_observation_without_possible_actions_has_no_line_of_them():
    assert room([("a", ()), ("b", ())], ["go"]) == "Act.\n\na\n> go\nb"
    assert room([("a", ()), ("b", ("x",))], ["go"]) == "Act.\n\na\n> go\nb\nPossible actions: x"
