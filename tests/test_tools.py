"""Tools: typed functions as schemas, calls in the formats of model families, sources, and problems from files."""

import json
import sys
import textwrap
from importlib.metadata import version
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.envs import ENVIRONMENTS
from spear_rl.envs.tools.functions import argument_fault, as_text, tool_of
from spear_rl.errors import ConfigError, UserError
from spear_rl.rollout.env import Observation
from spear_rl.rollout.rendering.tool_calls import FORMATS, calls_in, written
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.runner import Failure
from spear_rl.testing import check_tasks

USER = '''
def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first one
    """
    return a + b

def fails(text: str) -> str:
    """Fails."""
    raise ValueError(text)

def leaves() -> str:
    """Leaves."""
    raise SystemExit(3)

def much() -> str:
    """Gives much."""
    return "x" * 10_000_000

def sleeps() -> str:
    """Never returns."""
    import time
    time.sleep(1000)

functions = [add, fails, leaves, much, sleeps]

class Counter:
    def __init__(self):
        self.count = 0
    def up(self, by: int = 1) -> int:
        """Counts."""
        self.count += by
        return self.count

def untyped(a):
    return a

def strange(a: complex):
    return a

def sums(split):
    first = {"train": 0, "validation": 100, "test": 200}[split]
    for number in range(first, first + 12):
        call = {"name": "add", "arguments": {"a": number, "b": 1}}
        yield {"id": number, "question": f"{number} + 1 = ?", "answer": number + 1,
               "demonstration": [call, f"<answer>{number + 1}</answer>"]}

def broken(split):
    raise ValueError("the disk is full")

def nothing_at_all(split):
    return None

def no_number(problem, answer):
    return "x"

class Needy:
    def __init__(self, key):
        self.key = key
    def up(self, by: int = 1) -> int:
        """Counts."""
        return by

def half(problem, answer):
    return 0.5 if answer == str(problem["answer"]) else 0
'''


def add(a: int, kind: Literal["x", "y"] = "x", names: list[str] | None = None) -> int:
    """Adds."""
    return a


def require_mcp() -> None:
    pytest.importorskip("mcp")
    if version("mcp") < "2":
        pytest.skip("needs mcp 2")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    name = f"tools_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def play(tools, problems, *said, **options):
    env = ENVIRONMENTS["tools"]("train", tools=tools, problems=problems, **options)[0].make_env()
    env.reset()
    results = [env.step(text) for text in said]
    env.close()
    return results


def test_a_typed_function_becomes_a_tool_in_openai_format():
    schema = tool_of(add).schema
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["kind"] == {"type": "string", "enum": ["x", "y"]}
    assert parameters["properties"]["names"] == {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize("style", FORMATS)
@given(a=st.integers(), kind=st.sampled_from(["x", "y"]), names=st.lists(st.text("abc '\"", max_size=5), max_size=3))
def test_a_call_is_read_as_every_family_writes_it(style, a, kind, names):
    arguments = {"a": a, "kind": kind, "names": names}
    [call] = calls_in(written("add", arguments, style), {"add": tool_of(add).parameters})
    assert (call.name, dict(call.arguments), call.invalid) == ("add", arguments, "")


@given(st.text(max_size=300))
def test_any_text_can_be_read_for_calls(text):
    for wrapped in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"add({text})"):
        for call in calls_in(wrapped, {"add": tool_of(add).parameters}):
            assert call.invalid or call.name


def test_a_sentence_that_mentions_a_tool_is_no_call():
    assert calls_in("the sum add(a=1) is 1", {"add": tool_of(add).parameters}) == []
    assert calls_in("multiply(a=1)", {"add": tool_of(add).parameters}) == []


@pytest.mark.parametrize("arguments", [{}, {"a": "1"}, {"a": True}, {"a": 1, "c": 2}, {"a": 1, "kind": "z"}])
def test_wrong_arguments_are_refused_in_words(arguments):
    assert "add" in argument_fault(tool_of(add), arguments)


def test_a_tool_that_raises_leaves_or_gives_ten_megabytes_is_answered(user_module):
    tools, problems = f"{user_module}:functions", f"{user_module}:sums"
    raised, left, much, right = play(
        tools, problems, "fails(text='no')", "leaves()", "much()", "<answer>1</answer>", output_chars=100
    )
    assert "fails raised ValueError: no" in raised.observation.text
    assert "leaves raised SystemExit" in left.observation.text
    assert len(much.observation.text) < 300
    assert "10,000,000 characters" in much.observation.text
    assert [result.done for result in (raised, left, much, right)] == [False, False, False, True]
    assert right.reward == 1.0
    assert right.success


def test_a_class_gives_every_episode_tools_with_a_state_of_their_own(user_module):
    for _ in range(2):
        results = play(f"{user_module}:Counter", f"{user_module}:sums", "up()", "up(by=2)")
        assert "3" in results[-1].observation.text


def test_check_env_finds_no_fault_with_tools(user_module):
    options = {"tools": f"{user_module}:functions", "problems": f"{user_module}:sums"}
    assert check_tasks(ENVIRONMENTS["tools"], options=options, num_tasks=2) == []


def test_a_reward_function_of_the_user_pays(user_module):
    [result] = play(f"{user_module}:add", f"{user_module}:sums", "1", reward=f"{user_module}:half")
    assert result.reward == 0.5


def test_a_reward_that_is_no_number_ends_the_run_in_one_sentence(user_module):
    with pytest.raises(UserError, match="not a number"):
        play(f"{user_module}:add", f"{user_module}:sums", "1", reward=f"{user_module}:no_number")


@pytest.mark.parametrize(("package", "source"), [("mcp", "mcp:python x.py"), ("bm25s", "search:corpus.jsonl")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, user_module, monkeypatch, package, source):
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}')
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'spear-rl\[") as caught:
        play(source.replace("x.py", tmp_path.name), f"{user_module}:sums")
    assert "\n" not in str(caught.value)


def test_problems_come_from_a_file_and_their_content_decides_their_split(tmp_path, user_module):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": n + 1}) + "\n" for n in range(60)))
    panels = [ENVIRONMENTS["tools"](split, tools=f"{user_module}:add", problems=str(path)) for split in
              ("train", "validation", "test")]  # fmt: skip
    names = [task.id.split("/")[-1] for panel in panels for task in panel]
    assert sorted(names) == sorted({*names})
    assert len(names) == 60


def test_a_problem_may_hold_a_unicode_line_separator(tmp_path, user_module):
    row = {"question": "one\u2028two\x85three?", "answer": 3, "split": "train"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", "utf-8")
    [task] = ENVIRONMENTS["tools"]("train", tools=f"{user_module}:add", problems="problems.jsonl")
    assert task.make_env().reset().text == row["question"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": "MODULE:untyped"}, "has no type"),
        ({"tools": "MODULE:strange"}, "complex"),
        ({"tools": "MODULE:nothing"}, "has no nothing"),
        ({"tools": "no_such_module_x:f"}, "there is no module"),
        ({"tools": "MODULE:Needy"}, "made without arguments"),
        ({"tools": 5}, "takes a text or a list"),
        ({"tools": []}, "names no tool"),
        ({"tools": ["MODULE:add", "MODULE:add"]}, "two tools named add"),
        ({"tools": "search:no_such_file.jsonl"}, "cannot be read"),
        ({"problems": ""}, "problems is empty"),
        ({"problems": "no_such_file.jsonl"}, "cannot be read"),
        ({"problems": "MODULE:broken"}, "the disk is full"),
        ({"problems": "MODULE:nothing_at_all"}, "raised TypeError"),
        ({"reward": "MODULE:nothing"}, "has no nothing"),
    ],
)
def test_a_wrong_option_is_one_sentence(user_module, options, said):
    def named(value):
        return value.replace("MODULE", user_module) if isinstance(value, str) else value

    given_ = {key: [named(v) for v in value] if isinstance(value, list) else named(value) for key, value in
              options.items()}  # fmt: skip
    with pytest.raises(ConfigError, match=said) as caught:
        ENVIRONMENTS["tools"]("train", **{"tools": f"{user_module}:add", "problems": f"{user_module}:sums"} | given_)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["{", "[1]", '{"question": 5}', '{"question": "x", "demonstration": "y"}'])
def test_a_broken_problem_is_named_by_its_number(tmp_path, user_module, line):
    (tmp_path / "problems.jsonl").write_text('{"question": "1?", "answer": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="2"):
        ENVIRONMENTS["tools"]("train", tools=f"{user_module}:add", problems="problems.jsonl")


@given(st.integers(0, 30_000), st.integers(1, 1000))
def test_a_result_is_cut_to_its_limit(length, most):
    text = as_text("x" * length, most)
    assert len(text) == length if length <= most else len(text) < most + 100


def test_the_sandbox_is_a_tool_that_remembers_variables(user_module):
    results = play("sandbox", f"{user_module}:sums", "python(code='x = 6')", "python(code='print(x * 7)')")
    assert "42" in results[-1].observation.text


def test_search_finds_the_passage_that_has_the_words(tmp_path, user_module):
    pytest.importorskip("bm25s")
    rows = [{"title": f"town {n}", "text": f"it has {n} towers and a word{n}"} for n in range(50)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, nothing = play(
        "search:corpus.jsonl,1", f"{user_module}:sums", "search(query='word17')", "search(query='zzz')"
    )
    assert "town 17" in found.observation.text
    assert "town 18" not in found.observation.text
    assert "Nothing was found" in nothing.observation.text


def test_questions_over_the_generated_corpus_pass_the_check_and_ask_of_other_people_per_split():
    pytest.importorskip("bm25s")
    assert check_tasks(ENVIRONMENTS["search"], options={"calls": "pythonic"}, num_tasks=3) == []
    people = [{task.id.split("/")[-1] for task in ENVIRONMENTS["search"](split)} for split in ("train", "test")]
    assert not people[0] & people[1]


def test_a_tool_that_hangs_costs_its_episode_and_no_other(user_module):
    options = {"tools": f"{user_module}:functions", "problems": f"{user_module}:sums"}
    tasks = ENVIRONMENTS["tools"]("train", **options)
    with Pool(num_workers=2, step_timeout=3) as pool:
        pool.open(1, tasks[0])
        pool.open(2, tasks[1])
        assert all(isinstance(answer, Observation) for _, answer in pool.answers(2))
        pool.step(1, "sleeps()")
        pool.step(2, "add(a=2, b=5)")
        found = dict(pool.answers(2))
    assert isinstance(found[1], Failure)
    assert "7" in found[2].observation.text


SERVER = textwrap.dedent(
    """
    import os
    from mcp.server.mcpserver import MCPServer
    server = MCPServer("test")

    @server.tool()
    def add(a: int, b: int) -> int:
        "Adds."
        return a + b

    @server.tool()
    def much() -> str:
        "Gives much."
        return "x" * 10_000_000

    @server.tool()
    def nothing() -> str:
        "Gives an empty text."
        return ""

    @server.tool()
    def fails() -> str:
        "Fails."
        raise ValueError("no")

    @server.tool()
    def die() -> str:
        "Dies."
        os._exit(3)

    server.run()
    """
)


@pytest.mark.slow
def test_an_mcp_server_that_dies_fails_the_episode_in_one_sentence_and_is_started_again(tmp_path, user_module):
    require_mcp()
    (tmp_path / "server.py").write_text(SERVER)
    task = ENVIRONMENTS["tools"]("train", tools=f"mcp:{sys.executable} server.py", problems=f"{user_module}:sums")[0]
    env = task.make_env()
    env.reset()
    assert "5" in env.step("add(a=2, b=3)").observation.text
    assert "characters, of which" in env.step("much()").observation.text
    assert "Error" in env.step("fails()").observation.text
    assert env.step("nothing()").observation.text == "<tool_response>\n\n</tool_response>"
    with pytest.raises(RuntimeError, match="does not answer") as caught:
        env.step("die()")
    assert "\n" not in str(caught.value)
    env = task.make_env()
    env.reset()
    assert "9" in env.step("add(a=4, b=5)").observation.text


def test_an_mcp_command_that_is_not_there_is_one_sentence(user_module):
    require_mcp()
    with pytest.raises(ConfigError, match="does not answer"):
        ENVIRONMENTS["tools"]("train", tools="mcp:/no/such/server", problems=f"{user_module}:sums")


@pytest.mark.slow
def test_an_mcp_server_that_hangs_fails_the_episode(tmp_path, user_module, monkeypatch):
    require_mcp()
    from spear_rl.envs.tools import mcp

    (tmp_path / "server.py").write_text(SERVER.replace("os._exit(3)", "__import__('time').sleep(1000)"))
    command = f"mcp:{sys.executable} server.py hanging"
    env = ENVIRONMENTS["tools"]("train", tools=command, problems=f"{user_module}:sums")[0].make_env()
    env.reset()
    monkeypatch.setattr(mcp, "CALL_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="does not answer") as caught:
        env.step("die()")
    assert "\n" not in str(caught.value)
