"""The layout `log`: a prompt a turn that names every earlier action and repeats only what is asked for."""

from __future__ import annotations

from spear_rl.rollout import ChatRenderer
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.rendering.renderer import LAYOUTS
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
