"""Calls of tools in an agent's episode are read, and learned from chats, as the model's family writes them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.app.build.rollout import agent_renderer
from spear_rl.app.config import Config
from spear_rl.rollout.agents.answers import answer_of
from spear_rl.rollout.agents.endpoint import Call
from spear_rl.rollout.agents.messages import said
from spear_rl.rollout.agents.records import read_records
from spear_rl.rollout.agents.request import parsed
from spear_rl.rollout.agents.session import Session
from spear_rl.rollout.rendering.tool_calls import FORMATS, split_calls, written
from spear_rl.types import Completion
from test_chat_templates import tokenizer_of

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
ARGUMENTS = st.fixed_dictionaries(
    {"place": st.from_regex(r"[a-z\"' é]{0,12}[a-z]", fullmatch=True), "times": st.integers()}
)
TEMPLATES = (
    "llama3_1", "llama3_2", "lfm2_2_5", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink",
    "nemotron_3_nano",
)  # fmt: skip


def renderer_of(template: str):
    """That of a published chat template."""
    trl = pytest.importorskip("trl")
    tokenizer = copy.deepcopy(tokenizer_of("llama3" if template.startswith("llama") else "qwen2_5"))
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    return agent_renderer(Config(), tokenizer)


def message_of(arguments: dict) -> dict:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(arguments=ARGUMENTS)
def test_a_call_is_written_as_the_template_shows_it_and_read_back(template, arguments):
    renderer = renderer_of(template)
    text = renderer.written(message_of(arguments), [LOOK])
    asked = [{"role": "user", "content": "where?"}]
    session = Session(renderer)
    prompt, ids = session.prompt(asked, [LOOK]), renderer.answer(text)
    added = session.add(prompt, Completion(ids, [-1.0] * len(ids)), messages=asked, tools=[LOOK], key=0)
    assert [call["function"] for call in added.message["tool_calls"]] == [{"name": "look", "arguments": arguments}]
    assert (added.message["content"], added.invalid) == ("", "")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("llama3_1", '{"name": "look", "parameters": {"place": "here"}}'),
        ("lfm2_2_5", "<|tool_call_start|>[look(place='here')]<|tool_call_end|>"),
        ("qwen3", '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'),
        (
            "qwen3_5_nothink",
            "<tool_call>\n<function=look>\n<parameter=place>\nhere\n</parameter>\n</function>\n</tool_call>",
        ),
        ("gptoss", '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'),
    ],
)  # fmt: skip
def test_a_chat_is_learned_in_the_words_of_the_family_or_in_tags_where_we_could_not_read_those(
    tmp_path, template, form
):
    renderer = renderer_of(template)
    messages = [{"role": "user", "content": "where?"}, message_of({"place": "here"})]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": [LOOK]}))
    [found] = read_records(str(path), renderer, key="sft.from")
    assert found.trajectory.turns[0].text == form
    assert form in renderer.decoded(found.trajectory.turns[0].completion.token_ids)


@settings(max_examples=60, deadline=None)
@given(style=st.sampled_from(sorted(FORMATS)), arguments=ARGUMENTS)
def test_every_format_is_read(style, arguments):
    text = written("look", arguments, style)
    assert split_calls(text, [LOOK]) == ("", [{"name": "look", "arguments": arguments}], False)


@pytest.mark.parametrize("style", ["hermes", "xml", "mistral"])
def test_words_before_a_marked_call_are_kept(style):
    text = "I look there. " + written("look", {"place": "here"}, style)
    assert split_calls(text, [LOOK]) == ("I look there.", [{"name": "look", "arguments": {"place": "here"}}], False)


@pytest.mark.parametrize(
    "text",
    ['{"name": "Alice", "age": 3}', '[{"name": "Alice"}]', "7", "look", "print(1)", "{}", "[]", "a sentence, look(1)."],
)
def test_an_answer_that_calls_nothing_stays_as_it_is(text):
    assert split_calls(text, [LOOK]) == (text, [], False)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>", "[TOOL_CALLS]oops", "<|python_tag|>", "look(place={1, 2})", "look(place=b'x')",
        '<tool_call>{"name": "look", "arguments": 3}</tool_call>', "<tool_call>",
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_stays_in_the_text_and_is_counted(text):
    assert split_calls(text, [LOOK]) == (text, [], True)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["properties", "type", "a"]), inner),
    max_leaves=8,
)


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", '{"name": "look", "arguments": {"place": 1}}', "look(", ")", "[",
    "]", "{", "}", '"', "<function=look>", "</function>", "<parameter=a>", "</parameter>", "1: 2", ",", "x", " ",
    "place=", "<|python_tag|>", "[ARGS]",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12), parameters=VALUES)
def test_any_answer_with_any_tool_is_read_into_calls_that_json_can_hold(parts, parameters):
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    rest, calls, _ = split_calls("".join(parts), [tool])
    assert isinstance(rest, str)
    for call in calls:
        assert call["name"]
        assert json.loads(json.dumps(call["arguments"], sort_keys=True)) == call["arguments"]


def test_marks_that_are_special_tokens_are_read_too():
    tokenizer = copy.deepcopy(tokenizer_of("mistral"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    renderer = agent_renderer(Config(), tokenizer)
    asked, session = [{"role": "user", "content": "where?"}], Session(renderer)
    ids = tokenizer.encode(written("look", {"place": "here"}, "mistral"), add_special_tokens=False)
    assert tokenizer.convert_tokens_to_ids("[TOOL_CALLS]") == ids[0]
    prompt, ids = session.prompt(asked, [LOOK]), [*ids, renderer.end_id]
    added = session.add(prompt, Completion(ids, [-1.0] * len(ids)), messages=asked, tools=[LOOK], key=0)
    assert said(added.message) == said(message_of({"place": "here"}))


def test_the_ids_of_calls_are_such_as_every_template_takes():
    renderer = renderer_of("qwen3")
    body = {"messages": [{"role": "user", "content": "where?"}], "tools": [LOOK]}
    request, session = parsed(body), Session(renderer)
    ids = renderer.answer("".join(written("look", {"place": place}, "hermes") for place in "ab"))
    added = session.add(
        session.prompt(request.messages, request.tools), Completion(ids, [-1.0] * len(ids)),
        messages=request.messages, tools=request.tools, key=0,
    )  # fmt: skip
    [choice] = answer_of(Call(1, request), [added], renderer)["choices"]
    names = [call["id"] for call in choice["message"]["tool_calls"]]
    assert len({*names}) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", name) for name in names)
