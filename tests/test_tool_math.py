"""tool_math: what a turn means, what it is answered, what it pays, and that it never breaks."""

from __future__ import annotations

import json
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from math_standin import Echo, Session
from spear_rl.algorithms.filters import void
from spear_rl.envs import ENVIRONMENTS, tool_math
from spear_rl.envs.tool_math.calls import FORMATS, SCHEMA, TOOL, call_text, tool_calls
from spear_rl.envs.tool_math.env import MAX_CALLS, MAX_TURNS, ToolMathEnv
from spear_rl.envs.tool_math.generated import EASY, LEVELS
from spear_rl.envs.tool_math.problems import Problem
from spear_rl.envs.tool_math.verification.answers import boxed_answer, integer, is_same_answer, normalised
from spear_rl.envs.tool_math.verification.integers import as_integer
from spear_rl.rollout import collect_groups
from spear_rl.rollout.env import INADMISSIBLE
from spear_rl.rollout.rendering.renderer import MessageRenderer, without_thoughts
from spear_rl.testing import check_environment, check_panels
from spear_rl.types import Completion, Stop

PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "\\boxed{", "}", "{", "\\", '"', "[", "]", ":", ","),
    *('"name"', '"arguments"', '"code"', TOOL, "print(1)", "42", "\n", " ", "\\u", "null", "\ud800", "\x00", "```"),
    call_text("print(1)"),
]
noise = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)


def env_of(answer: str = "42", *, session=Session, **options) -> ToolMathEnv:
    env = ToolMathEnv(Problem("6*7=?", answer), open_session=session, checker=integer, **options)
    env.reset()
    return env


def call(value: object) -> str:
    return f"<tool_call>{json.dumps(value)}</tool_call>"


# Calls


@given(st.lists(st.text().filter(lambda code: code.isprintable() or code.isascii()), min_size=1, max_size=5), st.data())
def test_calls_that_are_written_are_read_back_in_order_whatever_stands_between_them(codes, data):
    codes = [f"x{code}" for code in codes]
    between = st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"]))
    text = "".join(data.draw(between) + call_text(code) for code in codes) + data.draw(between)
    assert [found.code for found in tool_calls(text)] == codes
    assert not any(found.invalid for found in tool_calls(text))


@pytest.mark.parametrize(
    "text",
    [
        call({"name": TOOL, "arguments": {"code": "print({1: {2: '}'}})</tool_call>"}}),
        call({"name": TOOL, "arguments": {"code": "x", "why": {"nested": [1]}}, "id": 3}),
        call({"name": TOOL, "arguments": '{"code": "x"}'}),
        call({"name": TOOL, "arguments": "x"}),
        f'<tool_call>\n {{"name": "{TOOL}", "arguments": {{"code": "a\nb"}}}} \n</tool_call>',
    ],
    ids=["nested braces", "more than needed", "arguments as JSON text", "arguments as code", "line breaks"],
)
def test_a_call_in_an_unusual_spelling_is_understood(text):
    [found] = tool_calls(text)
    assert found.code
    assert not found.invalid


MALFORMED = {
    "<tool_call>": ("unclosed_tag", "closing"),
    '<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}': ("unclosed_tag", "closing"),
    "<tool_call>print(1)</tool_call>": ("bad_json", "not valid JSON"),
    '<tool_call>{"name": </tool_call>': ("bad_json", "not valid JSON"),
    f'<tool_call>{{"name": "{TOOL}"}} twice</tool_call>': ("bad_json", "something follows"),
    "<tool_call>" + "[" * 100_000 + "</tool_call>": ("bad_json", "cannot be read"),
    "<tool_call>[1, 2]</tool_call>": ("bad_call", "JSON object"),
    call({"name": "search", "arguments": {"code": "1"}}): (INADMISSIBLE, "no tool 'search'"),
    call({"arguments": {"code": "1"}}): (INADMISSIBLE, 'no "name"'),
    call({"name": TOOL}): (INADMISSIBLE, '"arguments" must hold "code"'),
    call({"name": TOOL, "arguments": {"code": 7}}): (INADMISSIBLE, '"arguments" must hold "code"'),
    call({"name": TOOL, "arguments": [1]}): (INADMISSIBLE, '"arguments" must hold "code"'),
    call({"name": TOOL, "arguments": {"code": "\ud800"}}): (INADMISSIBLE, "Unicode"),
    **{
        call({"name": TOOL, "arguments": {"code": code}}): (INADMISSIBLE, "no code to run")
        for code in ("", " \n\t", "# only a comment\n\n  # and another", "```python\n```", "```python\n\n```")
    },
    "<tool_call>```json\n{'name'}\n```</tool_call>": ("bad_json", "not valid JSON"),
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:50])
def test_a_malformed_call_is_answered_with_the_reason_and_the_episode_goes_on(text):
    reason, words = MALFORMED[text]
    env = env_of()
    result = env.step(text)
    assert (result.invalid, result.used_tool, result.reward, result.done) == (reason, False, 0.0, False)
    assert words in result.observation.text
    assert result.observation.text.startswith("<tool_response>\nError: ")
    assert words == "Unicode" or '<tool_call>{"name": "code_interpreter", "arguments"' in result.observation.text
    assert env.step("\\boxed{42}").reward == 1.0


def test_what_is_thought_is_not_said():
    assert without_thoughts("<think>a</think>b<think>c</think>d") == "bd"
    assert without_thoughts("a<think>never closed") == "a<think>never closed"
    assert without_thoughts("opened by the prompt</think>b") == "b"
    assert without_thoughts("opened</think>b<think>c</think>d") == "bd"
    assert without_thoughts("<think>a<think>b</think>c</think>d") == "d"
    assert env_of().step(f"\\boxed{{1}} or {call_text('1')}</think>\\boxed{{42}}").success
    assert env_of().step("so it is \\boxed{42}</think>").invalid == "void"
    assert env_of().step(f"<think>{call_text('1')}</think>\\boxed{{42}}").success
    assert env_of().step(f"<think>\\boxed{{1}}</think>{call_text('print(3)')}").used_tool


# Formats

FENCED = [
    "```python\nprint(6*7)\n```",
    "```py\nprint(6*7)\n```\n",
    "```\nprint(6*7)\n```",
    "``` Python3 \r\nprint(6*7)\n```",
]


@pytest.mark.parametrize("code", [*FENCED, "```python\nprint(6*7)", "\n ```python\nprint('```'[:0])\nprint(6*7)\n```"])
def test_code_in_fences_inside_a_call_runs(code):
    texts = [call({"name": TOOL, "arguments": {"code": code}}), call({"name": TOOL, "arguments": code})]
    if code in FENCED:
        inner = json.dumps({"name": TOOL, "arguments": {"code": "print(6*7)"}})
        texts += [f"<tool_call>\n{code}\n</tool_call>", f"<tool_call>```json\n{inner}\n```</tool_call>"]
    for text in texts:
        result = env_of().step(text)
        assert (result.used_tool, result.invalid) == (True, "")
        assert result.observation.text.split() == ["<tool_response>", "42", "</tool_response>"]


def test_blank_code_is_no_tool_use_beside_code_that_is():
    result = env_of().step(call_text("") + call_text("print(1)"))
    assert (result.used_tool, result.invalid) == (True, "")
    assert "no code to run" in result.observation.text
    assert len(Session.opened[-1].codes) == 1


BLOCKS = {
    "code": "<code>\nprint(6*7)\n</code>",
    "fenced": "```python\nprint(6*7)\n```",
    # As Qwen2.5-Coder writes it when it is reminded of the format.
    "json": '```json\n{\n  "name": "code_interpreter",\n  "arguments": {\n    "code": "print(6*7)"\n  }\n}\n```',
}


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("block", BLOCKS)
def test_other_formats_of_a_call_are_run_where_they_are_switched_on(block, formats):
    is_on = formats in (block, "all")
    result = env_of(calls=formats).step(f"Let me see.\n{BLOCKS[block]}\nThen \\boxed{{42}}.")
    assert (result.used_tool, result.done, bool(result.success)) == (is_on, not is_on, not is_on)
    mixed = f"{call_text('print(1)')} {BLOCKS[block]} {call_text('print(2)')}"
    assert [found.code.strip() for found in tool_calls(mixed, formats=formats)] == [
        "print(1)", *["print(6*7)"] * is_on, "print(2)"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "invalid"),
    [
        ("<code>print(1)", "unclosed_tag"),
        ("```python\nprint(1)", "unclosed_tag"),
        ("<code> </code>", INADMISSIBLE),
        ("```python\n# nothing\n```", INADMISSIBLE),
        ("```text\n1\n```", "void"),
        ("```\n1\n```", "void"),
        ('{"name": "code_interpreter", "arguments": {"code": "print(1)', "bad_json"),
        ('{"name": "code_interpreter"}', INADMISSIBLE),
        ('<tool_call>{"name": "code_interpreter", "arguments": {"code": "print(1)"}}', "unclosed_tag"),
        ('{"name": "search"}', "void"),
    ],
)
def test_a_broken_block_is_answered_with_the_reason(text, invalid):
    result = env_of(calls="all").step(text)
    assert (result.used_tool, result.invalid) == (False, invalid)
    assert result.observation.text


def test_a_block_in_code_tags_may_be_fenced_and_the_options_say_so_to_the_policy():
    assert [found.code.strip() for found in tool_calls("<code>```python\n1+1\n```</code>", formats="all")] == ["1+1"]
    for formats, words in {"code": "<code></code>", "fenced": "```python block", "json": "the JSON alone"}.items():
        task = tool_math.tasks("train", level="tiny", calls=formats, max_tasks=1)[0]
        env = task.make_env()
        env.reset()
        assert words in task.instructions
        assert words in env.step("hm").observation.text
    with pytest.raises(
        ValueError, match=r"calls: unknown format 'xml': there is hermes \(JSON in .*fenced \(```python blocks"
    ):
        tool_math.tasks("train", level="tiny", calls="xml")


# Boxes


@given(st.recursive(st.sampled_from(["1", "x", "\\{", "\\}", "\\pi", " y "]), lambda s: s.map("{{{}}}".format) | s))
def test_what_is_boxed_is_found_again(content):
    assert boxed_answer(f"so {{ \\boxed{{{content}}} done") == content.strip()
    assert boxed_answer(f"\\boxed{{7}} then \\boxed{{{content}}}, not \\boxed{{8") == content.strip()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{\\boxed{5}}", "5"),
        ("\\boxed {3}", "3"),
        ("\\\\boxed{3}", "3"),
        ("\\fbox{3}", "3"),
        ("\\boxed{3", None),
        ("\\boxed{}", None),
        ("\\boxed3", None),
        ("boxed{3}", None),
        ("\\boxed{1} and \\boxed{ }", "1"),
    ],
)
def test_the_last_whole_box_is_the_answer(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 30_000, "\\boxed{" * 30_000 + "5" + "}" * 30_000, "\\" * 200_000, "<tool_call>{" * 10_000],
    ids=["open", "nested", "backslashes", "calls"],
)
def test_a_hundred_thousand_characters_take_no_time(text):
    started = time.perf_counter()
    env_of().step(text)
    assert time.perf_counter() - started < 2.0


# Answers


@given(st.integers(), st.integers(), st.integers(0, 3), st.booleans())
def test_integers_are_compared_as_numbers_whatever_they_look_like(one, other, zeros, has_point):
    sign, digits = ("-" if other < 0 else ""), str(abs(other))
    spelled = f"${sign}{'0' * zeros}{digits}{'.0' if has_point else ''}$"
    assert is_same_answer(str(one), spelled, integer) == (one == other)
    assert is_same_answer(str(other), f" {sign}{abs(other):,} ", integer)


@pytest.mark.parametrize("text", ["1e3", "1,2", "2^{10}", "1/1", "", "one", "1 2x", "--1", "\u0663", "1.5"])
def test_what_is_not_plainly_an_integer_is_none(text):
    assert as_integer(text) is None


def test_digits_without_end_are_compared_too():
    digits = "123456789" * 200
    assert is_same_answer(digits, f"000{digits}", integer)
    assert not is_same_answer("1", "1" * 3000, integer)


@pytest.mark.parametrize(
    ("gold", "given_", "same"),
    [
        ("\\frac{1}{2}", "\\dfrac12", True),
        ("\\frac{1}{2}", "1/2", True),
        ("0.5", "\\tfrac{1}{2}", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("90^\\circ", "90", True),
        ("x+1", "x+2", False),
        ("1", "1/0", False),
        ("\\frac{1}{3}", "0.333", False),
    ],
)
def test_without_math_verify_spellings_of_the_same_text_or_fraction_are_the_same(gold, given_, same):
    assert normalised(gold, given_) is same


@given(noise, noise)
def test_no_pair_of_answers_breaks_the_comparison(one, other):
    assert isinstance(is_same_answer(one, other, normalised), bool)
    assert is_same_answer(one, one, normalised) or len(one) > 2000


# Episodes


def test_a_right_answer_pays_one_and_a_wrong_one_costs_one():
    for answer, reward in (("42", 1.0), ("41", -1.0), ("\\text{no idea}", -1.0), ("6*7", -1.0)):
        result = env_of().step(f"\\boxed{{{answer}}}")
        assert (result.reward, result.done, result.success, result.invalid) == (reward, True, reward > 0, "")


def test_code_is_run_and_answered_and_its_variables_stay():
    env = env_of()
    first = env.step(f"Let me see. {call_text('x = 6')}")
    assert (first.used_tool, first.invalid, first.done, first.reward) == (True, "", False, 0.0)
    assert first.observation.text == "<tool_response>\n(The code ran and printed nothing.)\n</tool_response>"
    second = env.step(call_text("print(x * 7)"))
    assert second.observation.text == "<tool_response>\n42\n</tool_response>"
    assert env.step("\\boxed{42}").success
    assert Session.opened[-1].is_closed


def test_code_that_fails_is_a_call_answered_with_its_error():
    result = env_of().step(call_text("print(1)\n1/0"))
    assert (result.used_tool, result.invalid) == (True, "")
    assert result.observation.text == "<tool_response>\n1\nZeroDivisionError: division by zero\n</tool_response>"


def test_several_calls_are_run_in_order_and_too_many_are_not():
    codes = [f"a{number} = {number}\nprint(a{number})" for number in range(MAX_CALLS + 2)]
    result = env_of().step("".join(map(call_text, codes)))
    replies = result.observation.text.split("</tool_response>")[:-1]
    assert [reply.split("\n")[-2] for reply in replies[:MAX_CALLS]] == [str(number) for number in range(MAX_CALLS)]
    assert "not run" in replies[MAX_CALLS]
    assert len(Session.opened[-1].codes) == MAX_CALLS


def test_a_broken_call_beside_a_good_one_is_answered_and_the_turn_is_valid():
    result = env_of().step(f"<tool_call>x</tool_call>{call_text('print(2)')}")
    assert (result.used_tool, result.invalid) == (True, "")
    assert "not valid JSON" in result.observation.text
    assert result.observation.text.endswith("<tool_response>\n2\n</tool_response>")


def test_a_turn_that_calls_is_no_answer_yet():
    env = env_of()
    result = env.step(f"{call_text('print(41)')} so it is \\boxed{{42}}")
    assert (result.done, result.reward, result.used_tool) == (False, 0.0, True)


def test_no_session_is_opened_for_an_episode_that_runs_nothing():
    before = len(Session.opened)
    env = env_of()
    env.step("hm")
    env.step("<tool_call>x</tool_call>")
    env.step("\\boxed{42}")
    assert len(Session.opened) == before


@pytest.mark.parametrize("said", ["I do not know.", "", "The answer is 42.", "\\boxed{}", "\\boxed{4"])
def test_a_turn_with_neither_a_call_nor_an_answer_is_void_and_reminded(said):
    result = env_of().step(said)
    assert (result.invalid, result.reward, result.done, result.used_tool) == ("void", 0.0, False, False)
    assert "neither" in result.observation.text
    shown = result.observation.text.partition("write ")[2]
    assert tool_calls(shown)[0].code == "...", "the reminder shows a call that would be understood"
    assert "\\boxed{...}" in shown


@pytest.mark.parametrize("said", ["hm", call_text("print(1)"), "<tool_call>"])
def test_an_episode_without_an_answer_ends_after_its_turns_as_a_wrong_one_does(said):
    env = env_of(max_turns=3)
    results = [env.step(said) for _ in range(3)]
    assert [(r.reward, r.done) for r in results] == [(0.0, False), (0.0, False), (-1.0, True)]
    assert results[-1].success is False
    with pytest.raises(RuntimeError, match="reset"):
        env.step(said)


@given(
    st.floats(0, 10),
    st.lists(st.tuples(st.integers(0, MAX_CALLS + 2), st.integers(0, 2)), min_size=1, max_size=MAX_TURNS - 1),
    st.sampled_from(["42", "41"]),
)
def test_a_costly_tool_takes_its_cost_for_every_call_that_is_run_and_for_nothing_else(cost, turns, answer):
    env, paid = env_of(session=Echo, tool_cost=cost), 0
    for num_calls, num_refused in turns:
        asked = [call({"name": "search"})] * num_refused + [call_text("print(1)")] * num_calls
        num_run = max(0, min(num_calls, MAX_CALLS - num_refused))
        result = env.step("".join(asked) or "hm")
        assert result.reward == pytest.approx(-cost * num_run)
        assert result.used_tool == (num_run > 0)
        paid += num_run
    final = env.step(f"\\boxed{{{answer}}}")
    assert (final.reward, final.success) == ((1.0, True) if answer == "42" else (-1.0, False)), (
        "the answer costs nothing"
    )
    assert final.metrics["tool_turns"] <= paid


def test_the_cost_of_a_call_in_the_last_turn_is_added_to_that_of_no_answer():
    env = env_of(max_turns=2, tool_cost=0.25)
    assert [env.step(call_text("print(1)")).reward for _ in range(2)] == [-0.25, -1.25]


@settings(max_examples=300)
@given(st.lists(noise, min_size=1, max_size=MAX_TURNS))
def test_whatever_a_policy_says_is_answered(said):
    env = env_of(session=Echo)
    for number, text in enumerate(said):
        result = env.step(text)
        assert result.reward in (-1.0, 0.0, 1.0)
        assert result.done == (result.reward != 0.0)
        assert not (result.invalid and result.used_tool)
        assert result.done or result.observation.text
        shown = without_thoughts(text)
        is_answer = boxed_answer(shown) is not None and "<tool_call>" not in shown
        assert result.done == (is_answer or number + 1 == MAX_TURNS)
        if result.done:
            break
    env.close()


# Through the rollout


class Script:
    """Says the given texts, one a turn, in every episode."""

    def __init__(self, renderer: MessageRenderer, said: list[str]) -> None:
        self._renderer, self._said, self._turn = renderer, said, 0

    def generate(self, prompts):
        text = self._said[min(self._turn, len(self._said) - 1)]
        self._turn += 1
        return [Completion(self._renderer.answer(text), [0.0]) for _ in prompts]


def played(said: list[str], *, max_turns: int = MAX_TURNS, task=None):
    renderer = MessageRenderer()
    [group] = collect_groups(
        [task or tool_math.tasks("train", level="tiny")[0]],
        group_size=1,
        generator=Script(renderer, said),
        renderer=renderer,
        max_turns=max_turns,
        step=0,
    )
    return group, renderer


def test_an_episode_that_the_trainer_cuts_off_costs_as_much_as_a_wrong_answer():
    group, _ = played(["hm"], max_turns=2)
    [trajectory] = group.trajectories
    assert (trajectory.reward, trajectory.stop, trajectory.success) == (-1.0, Stop.MAX_TURNS, False)
    assert [turn.reward for turn in trajectory.turns] == [0.0, -1.0]


def test_the_task_option_makes_a_call_costly(monkeypatch):
    monkeypatch.setattr(tool_math, "open_session", lambda *_: Session())
    said = [call_text("print(1)"), "\\boxed{no}"]
    rewards = [
        [
            turn.reward
            for turn in played(said, task=tool_math.tasks("train", level="tiny", **option)[0])[0].trajectories[0].turns
        ]
        for option in ({}, {"tool_cost": 0.5})
    ]
    assert rewards == [[0.0, -1.0], [-0.5, -1.0]]


def test_void_turns_do_not_train_but_a_refused_call_does():
    group, _ = played(["hm", "<tool_call>x</tool_call>", call({"name": "search"}), "\\boxed{1}"])
    assert void([group]) == [["void", "void", "", ""]]


def test_the_conversation_starts_with_the_tools_schema_in_the_systems_name():
    group, renderer = played(["hm", "\\boxed{1}"])
    system, problem, said, reminder = renderer.messages(group.trajectories[0].turns[-1].prompt_ids)
    assert (system["role"], problem["role"], said["role"], reminder["role"]) == ("system", "user", "assistant", "user")
    assert json.dumps(SCHEMA) in system["content"]
    assert problem["content"] == tool_math.tasks("train", level="tiny")[0].make_env().reset().text


# Tasks


def test_the_environment_is_known_by_its_name():
    assert ENVIRONMENTS["tool_math"] is tool_math.tasks


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_is_a_sound_panel_whose_tasks_pickle(level):
    assert check_panels(tool_math.tasks, level=level) == []
    task = tool_math.tasks("validation", level=level, max_tasks=1)[0]
    assert pickle.loads(pickle.dumps(task)).make_env().reset() == task.make_env().reset()
    texts = [{t.make_env().reset().text for t in tool_math.tasks(split, level=level)} for split in tool_math.SPLITS]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 2400


def test_the_careless_demonstrator_seldom_calls_and_the_other_always_does():
    tasks = tool_math.tasks("train", level="tiny", expert="careless", max_tasks=400)
    said = [task.demonstrate(number) for number, task in enumerate(tasks)]
    assert 0.15 < sum(len(actions) == 2 for actions in said) / len(said) < 0.35
    assert said == [task.demonstrate(number) for number, task in enumerate(tasks)]
    assert all(len(t.demonstrate(0)) == 2 for t in tool_math.tasks("train", level="small", max_tasks=50))


def test_the_careless_demonstrator_is_right_without_the_tool_where_that_is_easy_and_seldom_elsewhere():
    right = {True: [], False: []}
    for number, task in enumerate(tool_math.tasks("train", level="tiny", expert="careless", max_tasks=800)):
        said = task.demonstrate(number)
        if len(said) == 1:
            right[task.family in EASY].append(is_right(task, said[0]))
    assert all(right[True])
    assert len(right[True]) > 300
    assert sum(right[False]) < 0.1 * len(right[False])


def is_right(task, answer: str) -> bool:
    env = task.make_env()
    env.reset()
    return bool(env.step(answer).success)


@pytest.mark.parametrize(
    "options",
    [{"split": "dev"}, {"level": "huge"}, {"verifier": "eyes"}, {"prompt": "long"}, {"expert": "me"},
     {"families": ["geometry"]}, {"max_turns": 0}, {"tool_cost": -1.0}],
)  # fmt: skip
def test_what_does_not_exist_is_refused_by_name(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values()))).strip("[]'")):
        tool_math.tasks(**options)


def test_a_check_finds_no_fault(monkeypatch):
    monkeypatch.setattr(tool_math, "open_session", lambda *_: Session())
    for level in LEVELS:
        assert check_environment(tool_math.tasks("test", level=level), num_tasks=3) == []
