"""What a run, a game, a server or a file name holds never steers the terminal: real processes, all they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.app.compare import compare
from spear_rl.io.escaping import indented, markdown, one_line, visible
from spear_rl.io.terminal import PlainConsole, PlainStream

ESC = "\x1b[31m\x1b]8;;http://evil\x07\x9b2J\u202e\u2066\u200f\u061c\u200b\u2028\x85\x7f\r[red][/red][link=http://evil]:bomb:"
GAME = """
import logging, warnings
from functools import partial
from spear_rl.rollout import Observation, StepResult, Task

ESC = {esc!r}

class Game:
    def __init__(self, number):
        self.number = number
    def reset(self):
        {reset}
        return Observation("seen " + ESC, state_key=ESC, choices=("look", ESC))
    def step(self, action):
        {step}
        return StepResult(Observation("over " + ESC), reward=1.0, done=True, invalid={invalid}, success=True,
                          metrics={{"m" + ESC: 1.0}})
    def close(self):
        pass

def tasks(split="train", **options):
    warnings.warn("warned " + ESC)
    logging.getLogger("game").warning("logged %s\\nerror: forged", ESC)
    return [Task(id=f"{{split}}/{{n}}" + ESC, make_env=partial(Game, n), family="family " + ESC,
                 instructions="say " + ESC, demonstrate=partial(demonstrated, n)) for n in range(4)]

def demonstrated(number, seed):
    return ["look"]
"""


def game(folder: Path, *, reset: str = "pass", step: str = "pass", invalid: str = "''") -> None:
    (folder / "hostile_game.py").write_text(GAME.format(esc=ESC, reset=reset, step=step, invalid=invalid))


def run(folder: Path, *arguments: object, code: int = 0, **variables: str) -> str:
    """All that a real process prints."""
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent.parent / 'src'}:{folder}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "spear_rl.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, cwd=folder, env=environment | variables, timeout=500)
    text = (done.stdout + done.stderr).decode("utf-8")
    assert done.returncode == code, text
    return text


def assert_harmless(text: str) -> None:
    bad = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")}
    assert not bad, text


def trained(folder: Path, name: str, *settings: str) -> str:
    tiny = ["run.steps=1", "rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.tasks=2"]
    tiny += ["engine.model=tiny-xs", "run.trajectories_format=jsonl", "rollout.max_turns=2"]
    return run(folder, "train", f"run.dir={name}", "task.env=hostile_game:tasks", "sft.episodes=0", *tiny, *settings)


@pytest.mark.slow
def test_a_hostile_game_can_be_trained_on_shown_compared_and_evaluated(tmp_path):
    game(tmp_path)
    name = re.sub("[\0-\x1f\x7f]", "", f"run{ESC}".replace("/", "|"))  # these are refused: run.dir takes none
    assert "run.dir must be a path without control characters" in run(tmp_path, "train", f"run.dir=x{ESC}", code=2)
    text = trained(tmp_path, name)
    assert_harmless(text)
    assert "-> run[31m]8;;http:||evil\\x9b2J\\u202e" in text.replace("\n", "")
    assert "[red][|red][link=http:||evil]:bomb:" in text.replace("\n", ""), "texts are no markup"
    assert "logged \\x1b[31m" in text
    assert not re.search("^error: forged", text, re.MULTILINE)
    stored = (tmp_path / name / "trajectories" / "step_000000.jsonl").read_text()
    assert json.loads(stored.splitlines()[0])["turns"][0]["observation"] == f"seen {ESC}", "files keep the exact text"
    for arguments in (
        ["show", name, "--episodes", 4],
        ["compare", name, "--out", f"out{ESC}".replace("/", "|")],
        ["eval", name, "--tasks", 2],
        ["eval", "expert", "--env", "hostile_game:tasks", "--tasks", 3, "--out", "x.json"],
        ["show", tmp_path / name / "config.toml"],
    ):
        text = run(tmp_path, *arguments)
        assert_harmless(text)
        assert "\\x9b" in text or "\\u009b" in text or "\\x1b" in text
    assert json.loads((tmp_path / "x.json").read_text())["tasks"][0] == f"validation/0{ESC}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_game_that_breaks_with_hostile_words_is_told_of_in_plain_ones(tmp_path, workers):
    game(tmp_path, step="raise RuntimeError('broken\\nerror: forged ' + ESC)", invalid="'why ' + ESC")
    settings = ["--set", f"rollout.workers={workers}"]
    text = run(tmp_path, "eval", "random", "--env", "hostile_game:tasks", "--tasks", 2, *settings, code=2)
    assert "all 2 episodes failed" in text
    assert "Traceback" not in text
    assert "\\x1b[31m" in text
    assert_harmless(text)
    text = run(tmp_path, "check-env", "hostile_game:tasks", "--tasks", 1, code=1)
    assert "\\x1b[31m" in text
    assert_harmless(text)
    assert not re.search("^error: forged", text, re.MULTILINE)


@pytest.mark.slow
def test_mistakes_with_hostile_names_are_plain_sentences(tmp_path):
    (tmp_path / f"folder{ESC}".replace("/", "|")).mkdir()
    name = f"folder{ESC}".replace("/", "|")
    surrogate = os.fsdecode(b"bad\xff\x1b]0;x\x07")
    (tmp_path / surrogate).mkdir()
    for arguments in (
        ["show", name],
        ["show", surrogate],
        ["compare", name],
        ["compare", surrogate],
        ["train", f"engine.model={ESC}"],
        ["train", f"no.such{ESC}=1"],
        ["train", f"task.env={ESC}:x"],
        ["eval", f"model{ESC}", "--env", "lookup"],
        ["eval", "http://127.0.0.1:9/v1\x1b", "--env", "lookup"],
        ["eval", "expert", "--env", "lookup", "--split", ESC],
        ["eval", "expert", "--tasks", f"no number {ESC}"],
        ["doctor", f"engine.model={name}"],
        ["check-env", f"module{ESC}:tasks"],
        ["shop", f"level={ESC}"],
        [f"command{ESC}"],
    ):
        assert_harmless(run(tmp_path, *arguments, code=2))


def hostile_run(folder: Path, *, algorithm: str = "grpo", **episode: object) -> Path:
    folder.mkdir()
    settings = [f"[algorithm]\nname = {json.dumps(algorithm)}", '[task]\nenv = "a$b$\\u001b[31m|`<b>"\nsplit = "x"']
    (folder / "config.toml").write_text("\n".join([*settings, "[run]\nseed = 0\nsteps = 1\n"]))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "rollout/reward": 1.0, f"metric{ESC}": 2.0}) + "\n")
    summary = {"steps": 1, "algorithm": ESC, "note": "raw \x7f and \u202e"}
    (folder / "summary.json").write_text(json.dumps(summary, ensure_ascii=False, indent=1))
    turn = {
        "observation": f"a{ESC}\n> b    [advantage 9]",
        "text": f"{ESC}\n  > forged",
        "dropped": ESC,
        "invalid": ESC,
    }
    whole = {"task": ESC, "step": 0, "success": True, "reward": 1.0, "stop": ESC, "turns": [turn]} | episode
    (folder / "trajectories").mkdir()
    (folder / "trajectories" / "step_000000.jsonl").write_text(json.dumps(whole) + "\n")
    return folder


def test_show_escapes_everything_of_a_run_and_no_line_of_an_episode_passes_for_one_of_ours(tmp_path):
    hostile_run(tmp_path / "run")
    text = run(tmp_path, "show", "run")
    assert_harmless(text)
    assert "metric\\x1b[31m" in text
    assert "did not train: \\x1b[31m" in text
    assert "\n    > b    [advantage 9]" in text
    assert not re.search(r"^  > (b|forged)", text, re.MULTILINE)
    with_colours = run(tmp_path, "show", "run", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b]" not in with_colours
    assert "\x1b[31m" not in with_colours


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", "[" * 200_000), ("metrics.jsonl", "7"), ("metrics.jsonl", "\x1b"),
        ("trajectories/step_000000.jsonl", "{}"), ("trajectories/step_000000.jsonl", '{"a":' * 100_000),
        ("trajectories/step_000000.jsonl", '{"task": 1, "step": 1, "success": 1, "reward": "x", "stop": 1}'),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_damaged_file_of_a_run_is_named_and_the_rest_is_shown(spear, tmp_path, name, content):
    (hostile_run(tmp_path / "run") / name).write_text(f"{content}\n")
    code, text = spear("show", tmp_path / "run")
    assert code == 0
    assert f"{Path(name).name}" in text
    assert "Traceback" not in text
    assert_harmless(text)


def test_a_comparison_of_hostile_runs_is_plain_text_plain_markdown_and_exact_json(tmp_path):
    labels = ["spear-grpo", f"evil{ESC}|cell`code`<script>![x](http://evil)$\\frac"]
    runs = [hostile_run(tmp_path / f"run{n}", algorithm=label) for n, label in enumerate(labels)]
    text = run(tmp_path, "compare", *runs)
    assert_harmless(text)
    found = compare(runs, tmp_path / "out")
    page = (tmp_path / "out" / "compare.md").read_text("utf-8")
    assert_harmless(page)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, "no text makes a cell of its own"
    assert not re.search(r"(?<!\\)[`<]", page)
    assert re.findall(r"(?<!\\)\[(\w*)", page) == ["Curves"]
    assert labels[1] in [arm["label"] for arm in json.loads((tmp_path / "out" / "compare.json").read_text())["arms"]]
    assert found.out == tmp_path / "out"


@given(st.text())
def test_visible_text_is_printable_or_a_newline_and_escaping_twice_changes_nothing(text):
    shown = visible(text)
    assert_harmless(shown)
    assert visible(shown) == shown
    assert "\n" not in one_line(text)
    assert_harmless(markdown(text))
    assert all(line.startswith("    ") for line in indented(text).split("\n")[1:])


@given(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Co"], exclude_characters="\n\t"))
def test_every_character_without_a_shape_is_written_out_as_python_would(character):
    assert visible(f"a{character}b") == f"a{repr(character)[1:-1]}b"


@given(st.text(alphabet=st.characters(categories=["L", "N", "P", "S", "Zs"])))
def test_ordinary_text_of_any_language_stays_as_it_is(text):
    shown = [c for c in text if visible(c) != c]
    assert all(c in "\u115f\u1160\u2800\u3164\uffa0" for c in shown), "but for letters that are blank"


def test_bidirectional_marks_zero_width_characters_and_tags_are_written_out():
    for code in [
        *range(0x200B, 0x2010),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        0x61C,
        0xFEFF,
        0xAD,
        0xE0041,
        0xFE0F,
    ]:
        assert visible(chr(code)) == chr(code).encode("unicode_escape").decode()
    assert visible("a\tb\r\nc") == "a    b\nc"


def test_a_console_shows_markup_links_and_codes_as_text(tmp_path):
    from rich.table import Table
    from rich.text import Text

    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        console = PlainConsole(file=file, force_terminal=True, color_system="truecolor", width=200)
        table = Table(ESC)
        table.add_row(ESC, style="bold")
        for shown in (
            ESC,
            Text(ESC),
            table,
            Text("x", style="link http://evil"),
            Text.from_ansi("\x1b]8;;http://a\x1b\\y"),
        ):
            console.print(shown, style="red")
        file.seek(0)
        text = file.read()
    assert re.sub(r"\x1b\[[\d;]*m", "", text).replace("\n", "").isprintable(), "only rich's own colours are left"
    assert "\x1b]" not in text
    assert "[link=http://evil]:bomb:" in text


def test_the_stream_for_tracebacks_escapes_and_breaks_lines_where_a_bar_returns(tmp_path):
    with (tmp_path / "err").open("w+", encoding="utf-8") as file:
        stream = PlainStream(file)
        assert print(f"1 %\r2 %\r\n{ESC}", file=stream, flush=True) is None
        assert not stream.isatty()
        assert stream.fileno() == file.fileno()
        file.seek(0)
        text = file.read()
    assert text.startswith("1 %\n2 %\n\\x1b[31m")
    assert_harmless(text)
