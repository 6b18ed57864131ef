"""tool_math's problems: files of every kind, the habits of the known sets, and panels that are the same everywhere."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.envs import tool_math
from spear_rl.envs.tool_math import manifest
from spear_rl.envs.tool_math.generated import EASY, LEVELS
from spear_rl.envs.tool_math.panel import BENCHMARKS, FOLDER, KNOWN, SPLITS, Source, entries
from spear_rl.envs.tool_math.problems import Problem, distinct, problems_in
from spear_rl.errors import MissingExtraError, OptionError

RECORDED = {
    "tiny": {"train": "6144d02c8fe12c5c", "validation": "5211a25872d36b5a", "test": "9ed087ea76b789eb"},
    "small": {"train": "d1b9fc4906e671fd", "validation": "7364d3eb92e3ae98", "test": "2e31d140115de910"},
    "medium": {"train": "c05400f84a0b8127", "validation": "7eed43ea8dd18c60", "test": "2e7cc938f8ef9912"},
    "hard": {"train": "fa2e0517877f9e9f", "validation": "d77817e29475d31d", "test": "6d9632f4946fdf2a"},
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(count: int, *, first: int = 0):
    return [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(first, first + count)]


def asked(split: str, **options) -> dict[str, str]:
    """Question -> id of every problem of a split."""
    return {entry.problem.text: entry.id for entry in entries(split, Source(**options))}


def one(row: dict, **columns: str) -> Problem:
    [found], _ = problems_in([row], place="here", **columns)
    return found


# Several test sets


def test_a_test_panel_of_two_sets_has_the_set_as_the_family_and_neither_is_trained_on(tmp_path):
    shared = rows_of(1, first=7)
    write(tmp_path / "aime24.jsonl", rows_of(3, first=1000))
    write(tmp_path / "aime25.jsonl", rows_of(2, first=2000) + shared)
    data = write(tmp_path / "mine.jsonl", rows_of(60))
    options = {"data": data, "test_data": "aime24, aime25", "data_folder": str(tmp_path)}
    panel = tool_math.tasks("test", **options)
    assert [(task.family, task.id.split("/")[1]) for task in panel] == [("aime24",) * 2] * 3 + [("aime25",) * 2] * 3
    assert len({task.id for task in panel}) == 6
    assert [task.family for task in tool_math.tasks("test", **options, families=["aime25"])] == ["aime25"] * 3
    seen = asked("train", **options) | asked("validation", **options)
    assert len(seen) == 59
    assert shared[0]["problem"] not in seen
    [own] = {task.family for task in tool_math.tasks("test", **options | {"test_data": "aime24"})}
    assert own == ""


def test_a_test_file_with_a_comma_in_its_name_is_one_file_and_two_of_one_name_are_refused(tmp_path):
    odd = write(tmp_path / "a,b.jsonl", rows_of(2))
    assert len(asked("test", test_data=odd)) == 2
    (tmp_path / "x").mkdir()
    twins = [write(tmp_path / "same.jsonl", rows_of(2)), write(tmp_path / "x" / "same.jsonl", rows_of(2, first=5))]
    with pytest.raises(OptionError, match="two of its sets have the same name"):
        asked("test", test_data=",".join(twins))
    with pytest.raises(OptionError, match=r"test_data: there is no file .*nowhere\.jsonl"):
        asked("test", test_data=f"{twins[0]},{tmp_path}/nowhere.jsonl")


def test_several_training_sets_are_one_panel_whose_families_are_the_sets_and_no_problem_is_in_it_twice(tmp_path):
    shared, tested = rows_of(3, first=50), rows_of(2, first=10)
    one_set, other = (
        write(tmp_path / "one.jsonl", rows_of(60)),
        write(tmp_path / "two.jsonl", rows_of(40, first=500) + shared),
    )
    options = {"data": f"{one_set}, {other}", "test_data": write(tmp_path / "test.jsonl", tested)}
    panel = [*tool_math.tasks("train", **options), *tool_math.tasks("validation", **options)]
    assert Counter(task.family for task in panel) == {"one": 58, "two": 40}
    assert {task.id.split("/")[1] for task in panel if task.family == "two"} == {"two"}
    assert len({task.id.split("/")[2] for task in panel}) == 98
    for split in SPLITS:
        both = asked(split, data=f"{one_set},{other}")
        assert both == asked(split, data=other) | asked(split, data=one_set)
    with pytest.raises(OptionError, match=r"^data: there is no file .*nowhere\.jsonl"):
        asked("train", data=f"{one_set},{tmp_path}/nowhere.jsonl")


def test_sets_with_a_test_file_of_their_own_are_tested_on_it_in_company_too(tmp_path, monkeypatch):
    write(tmp_path / "gsm8k_train.jsonl", [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(50)])
    write(tmp_path / "gsm8k_test.jsonl", [{"question": f"t{n}", "answer": f"#### {n}"} for n in range(5)])
    write(tmp_path / "dapo_math_17k.jsonl", rows_of(30))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert set(asked("test", data="gsm8k,dapo")) == {f"t{n}" for n in range(5)}
    assert len(asked("train", data="gsm8k,dapo")) + len(asked("validation", data="gsm8k,dapo")) == 80


# Generated problems


@pytest.mark.parametrize("level", LEVELS)
def test_generated_panels_are_the_recorded_ones(level):
    found = {split: manifest.manifest_of(split, entries(split, Source(level=level)))["sha256"] for split in SPLITS}
    assert {split: digest[:16] for split, digest in found.items()} == RECORDED[level]


@pytest.mark.parametrize("level", LEVELS)
def test_the_code_of_a_generated_problem_prints_its_answer(level, capsys):
    panel = entries("test", Source(level=level))
    for entry in panel[:60]:
        exec(entry.problem.code, {})
        assert capsys.readouterr().out.strip() == entry.problem.answer
    assert {entry.problem.family for entry in panel} == set(LEVELS[level])


def test_a_quarter_of_the_tiny_problems_need_the_tool():
    panel = [entry.problem for entry in entries("validation", Source(level="tiny"))]
    by_hand = {"zero": lambda a, b, m: 0, "one": lambda a, b, m: max(a, b), "division": lambda a, b, m: 0}
    easy = [problem for problem in panel if problem.family in EASY]
    assert len(easy) == 150
    for problem in easy:
        a, b, m = map(int, re.findall(r"\d+", problem.text))
        assert problem.answer == str(by_hand[problem.family](a, b, m)), problem.text
    answers = [problem.answer for problem in panel if problem.family == "remainder"]
    assert len(answers) == 50
    assert max(map(answers.count, answers)) < 8, "no guess is right often"


# Files


def test_the_same_problems_come_from_jsonl_json_and_parquet(tmp_path):
    rows = rows_of(60)
    lines = write(tmp_path / "set.jsonl", rows)
    (tmp_path / "set.json").write_text(json.dumps(rows))
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "set.parquet")
    for split in SPLITS:
        expected = asked(split, data=lines)
        assert asked(split, data=str(tmp_path / "set.json")) == expected
        assert asked(split, data=str(tmp_path / "set.parquet")) == expected


def test_a_hugging_face_dataset_is_read_by_its_splits(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl", rows_of(40))
    write(folder / "test.jsonl", rows_of(5, first=1000))
    assert set(asked("test", test_data=f"hf:{folder}")) == {row["problem"] for row in rows_of(5, first=1000)}
    assert {**asked("train", data=f"hf:{folder}"), **asked("validation", data=f"hf:{folder}")}.keys() <= {
        row["problem"] for row in rows_of(40)
    }
    assert set(asked("test", test_data=f"hf:{folder}::train")) == {row["problem"] for row in rows_of(40)}
    with pytest.raises(ValueError, match="no split 'dev'"):
        asked("test", test_data=f"hf:{folder}::dev")
    with pytest.raises(ValueError, match="cannot be loaded"):
        asked("test", test_data=f"hf:{tmp_path}/nothing")


@pytest.mark.parametrize(
    ("module", "data", "sentence"),
    [("pyarrow.parquet", "set.parquet", "needs pyarrow"), ("datasets", "hf:owner/name", "needs the package datasets")],
)
def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch, module, data, sentence):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=sentence):
        asked("train", data=data)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"problem": "x", "answer": 1}\n{"problem"', "line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: an object"),
        ("a.json", '{"problem": "x"}', "a list of problems"),
        ("a.jsonl", "", "holds no problem"),
        ("a.jsonl", '{"text": "x", "answer": "1"}\n', "none of the columns problem, question.*the file has: text"),
        ("a.jsonl", '{"problem": "x", "result": "1"}\n', "answer_column: none of the columns"),
        ("a.txt", "x", "ends in .jsonl, .json, .csv or .parquet"),
        ("a.parquet", "no parquet", "cannot be read as parquet"),
        ("a.jsonl", '["q", "1", "2"]\n', "line 1: .*a list of the two, was expected, not a list of 3"),
        ("a.jsonl", '"q"\n', "line 1: .*was expected, not str"),
        ("a.csv", "", "holds no problem"),
        ("a.csv", "text,answer\nq,1\n", "none of the columns problem, .*the file has: text, answer"),
        ("a.csv", 'problem,answer\nq,"' + "1" * 200_000, "not valid CSV: field larger"),
        (
            "a.jsonl",
            '{"problem": "p", "solution": "So it is 4."}\n',
            "an answer \\(solution, in a .*boxed.* or after ####",
        ),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "q"}]}\n', "an answer \\(messages, in a .*boxed"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        asked("train", data=str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_file_that_is_not_utf_8_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"problem": "\xff"}')
    with pytest.raises(ValueError, match=f"{name}: not valid UTF-8"):
        asked("train", data=str(tmp_path / name))


def test_a_missing_file_or_folder_is_one_sentence_that_says_what_to_set(spear, tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    for data, words in {"gsm8k": FOLDER, "no/such.jsonl": "there is no file"}.items():
        code, text = spear("eval", "expert", "--env", "tool_math", "--set", f"task.options.data={data}")
        assert code == 2
        assert words in text
        assert len(text.strip().splitlines()) == 1
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match=r"has none of dapo_math_17k\.parquet"):
        asked("train", data="dapo")


# Columns and habits


def test_columns_are_found_or_named():
    assert one({"question": "q", "final_answer": ["3"]}) == Problem("q", "3")
    assert one({"prompt": "q", "reward_model": {"ground_truth": 7}}) == Problem("q", "7")
    assert one({"id": "q", "answer": "1", "meta": {"right": 2.0}}, problem="id", answer="meta.right") == Problem(
        "q", "2"
    )
    assert one({"problem": "p", "question": "q", "answer": "1", "subject": "Algebra"}) == Problem("p", "1", "Algebra")
    with pytest.raises(ValueError, match="problem_column: there is no column 'text'"):
        one({"problem": "p", "answer": "1"}, problem="text")


def test_the_habits_of_the_known_sets_are_known():
    assert one({"question": "q", "answer": "3 * 400 = <<3*400=1200>>1200\n#### 1,200"}) == Problem("q", "1200")
    assert one({"problem": "p", "solution": "So $x = \\boxed{\\frac{1}{2}}$."}) == Problem("p", "\\frac{1}{2}")
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form ...\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    chat = [{"role": "user", "content": f"{before}What is\n\n2?{after}"}]
    assert one({"prompt": chat, "reward_model": {"ground_truth": "2"}}) == Problem("What is\n\n2?", "2")


@pytest.mark.parametrize(
    "row",
    [
        {"Problem": "q", "Answer": "3"},
        {"PROBLEM ": "q", "answer": "3"},
        {"Question": "q", "Final_Answer": 3},
        {"problem": "q", "Solution": "As \\boxed{2} is not, \\boxed{3} is."},
        {"problem": "q", "solution": "3"},
        {"Prompt": [{"role": "user", "content": "q"}], "Reward_Model": {"Ground_Truth": "3"}},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"},
                      {"role": "assistant", "content": "It is \\boxed{3}."}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so\n#### 3"}]},
        {"messages": [{"role": "user", "content": "q"}], "answer": "3"},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "\\boxed{3}"}]},
        ["q", "3"],
        ["q", 3],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\\boxed{3}"}],
    ],
)  # fmt: skip
@pytest.mark.parametrize("mark", ["", "\N{BYTE ORDER MARK}"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_row_of_any_usual_form_is_a_question_and_an_answer(tmp_path, row, mark, kind):
    path = tmp_path / f"set.{kind}"
    path.write_text(mark + json.dumps([row] if kind == "json" else row), encoding="utf-8")
    [entry] = entries("test", Source(test_data=str(path)))
    assert (entry.problem.text, entry.problem.answer) == ("q", "3")


@pytest.mark.parametrize("mark", ["", "\N{BYTE ORDER MARK}"])
def test_a_csv_file_is_read_by_its_first_line(tmp_path, mark):
    path = tmp_path / "set.CSV"
    text = f'{mark}Problem,Answer,Subject\n"What is\n1,000 + 1?","1,001",sums\n"a ""b""",2,words\n'
    path.write_text(text, encoding="utf-8")
    found = {entry.problem for entry in entries("test", Source(test_data=str(path)))}
    assert found == {Problem("What is\n1,000 + 1?", "1,001", "sums"), Problem('a "b"', "2", "words")}


@pytest.mark.parametrize("solution", ["We add 2 and 2 to get 4.", "\\boxed{4", "4 apples are left, so 4", ""])
def test_a_solution_without_a_box_is_no_answer(tmp_path, solution, caplog):
    path = write(
        tmp_path / "set.jsonl", [{"problem": "q", "solution": solution}, {"problem": "p", "solution": "\\boxed{5}"}]
    )
    [entry] = entries("test", Source(test_data=path))
    assert entry.problem == Problem("p", "5")
    assert "left out 1 rows" in caplog.text


def test_rows_without_question_or_answer_are_left_out_and_said(tmp_path, caplog):
    path = write(
        tmp_path / "holes.jsonl", [*rows_of(30), {"problem": "?", "answer": None}, {"problem": "", "answer": 1}]
    )
    assert sum(len(asked(split, data=path)) for split in SPLITS) == 30
    assert "left out 2 rows" in caplog.text


def test_copies_count_once_and_copies_that_disagree_not_at_all():
    kept, num_disputed = distinct(
        [Problem("a", "1"), Problem(" a\n", "1"), Problem("b", "1"), Problem("b", "2"), Problem("c", "025"),
         Problem("c", "25")]
    )  # fmt: skip
    assert ({problem.text for problem in kept}, num_disputed) == ({"a", "c"}, 1)


# Splits


@given(st.integers(0, 2**32))
def test_a_split_does_not_depend_on_the_order_or_the_neighbours_of_a_problem(tmp_path_factory, seed):
    folder, rng = tmp_path_factory.mktemp("sets"), random.Random(seed)
    rows = rows_of(80)
    whole = write(folder / "whole.jsonl", rows)
    part = write(folder / "part.jsonl", rng.sample(rows, 40))
    for split in SPLITS:
        few = {name.rpartition("/")[2] for name in asked(split, data=part).values()}
        assert few <= {name.rpartition("/")[2] for name in asked(split, data=whole).values()}


def test_splits_are_disjoint_complete_and_sorted_by_id(tmp_path):
    path = write(tmp_path / "set.jsonl", rows_of(300))
    ids = {split: [entry.id for entry in entries(split, Source(data=path))] for split in SPLITS}
    assert all(names == sorted(names) for names in ids.values())
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == 300
    assert 10 < len(ids["validation"]) < 50
    assert 10 < len(ids["test"]) < 50


def test_a_set_of_its_own_is_tested_on_whole_and_never_trained_on(tmp_path):
    train = write(tmp_path / "train.jsonl", rows_of(200))
    test = write(tmp_path / "held.jsonl", rows_of(30, first=190))
    tested, trained = asked("test", data=train, test_data=test), asked("train", data=train, test_data=test)
    validated = asked("validation", data=train, test_data=test)
    assert len(tested) == 30
    assert len(trained) + len(validated) == 190
    assert not tested.keys() & (trained.keys() | validated.keys())


def test_gsm8k_has_a_test_file_of_its_own(tmp_path, monkeypatch):
    write(tmp_path / "gsm8k_train.jsonl", [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(50)])
    write(tmp_path / "gsm8k_test.jsonl", [{"question": f"t{n}", "answer": f"#### {n}"} for n in range(5)])
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert set(asked("test", data="gsm8k")) == {f"t{n}" for n in range(5)}
    assert all(text.startswith("q") for text in {**asked("train", data="gsm8k"), **asked("validation", data="gsm8k")})
    tasks = tool_math.tasks("test", data="gsm8k")
    assert [task.demonstrate for task in tasks] == [None] * 5
    assert tasks[0].id.startswith("tool_math/gsm8k-test/")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_is_tested_on_whole_and_trained_on_only_where_that_is_said(tmp_path, monkeypatch, name):
    write(tmp_path / KNOWN[name][0].replace("/", "_"), rows_of(30))
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert len(asked("test", data=name)) == 30
    for split in ("train", "validation"):
        with pytest.raises(ValueError, match=f"data={name} is all for the split test; for {split} give other data"):
            tool_math.tasks(split, data=name)
    other = write(tmp_path / "other.jsonl", rows_of(5, first=90))
    parts = [asked(split, data=name, test_data=other) for split in SPLITS]
    assert [len(parts[0]) + len(parts[1]), len(parts[2])] == [30, 5]


def test_another_machine_has_the_same_manifest_and_a_changed_answer_shows(tmp_path, capsys):
    path = write(tmp_path / "set.jsonl", rows_of(60))
    command = [sys.executable, "-m", "spear_rl.envs.tool_math.manifest", "train", "--data", path]
    there = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7",
                           "PYTHONPATH": ":".join(sys.path)}).stdout  # fmt: skip
    (tmp_path / "manifest.json").write_text(there)
    verify = ["train", "--data", path, "--verify", str(tmp_path / "manifest.json")]
    assert manifest.main(verify) == 0
    assert "the same" in capsys.readouterr().out
    rows = rows_of(60)
    known = entries("train", Source(data=path))[0].problem
    for row in rows:
        row["answer"] = "7" if row["problem"] == known.text else row["answer"]
    write(tmp_path / "set.jsonl", rows)
    assert manifest.main(verify) == 1
    assert "another content" in capsys.readouterr().out
