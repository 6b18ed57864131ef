"""`spear show RUN`: which episodes it finds, what it says of them, and the files that make it possible."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import logged
from spear_rl.app.config import load
from spear_rl.app.show import Selection, Words, episodes_text, run_overview
from spear_rl.app.train import train_from
from spear_rl.train import episode_files
from spear_rl.train.episode_files import write_evaluation
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

STEPS = 6
SETTINGS = [
    "run.threads=1", "run.checkpoint_every=2", "run.trajectories_every=2", "run.trajectories_format=jsonl",
    "sft.episodes=160", "eval.tasks=6",
    "eval.every=3", "algorithm.imitation.warm_steps=2", "algorithm.bonus.steps=6",
]  # fmt: skip


def trained(folder: Path, *extra: str) -> Path:
    train_from(load("lookup", [f"run.dir={folder}", *SETTINGS, *extra]))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of six steps in which replay fires."""
    return trained(tmp_path_factory.mktemp("shown") / "run", f"run.steps={STEPS}")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def played(run: Path) -> list[dict]:
    """Every episode that was dumped, newest step first."""
    return [row for path in sorted((run / "trajectories").glob("step_*"), reverse=True) for row in rows(path)]


def chosen(run: Path, **options) -> list[dict]:
    given = {"failed": False, "solved": False, "replayed": False, "evaluated": False, "task": "", "step": ""}
    given |= {"family": "", "split": "", "limit": 10_000}
    text = episodes_text(run, Selection.of(**given | options), Words(), as_json=True)
    return [json.loads(line) for line in text.splitlines()]


def written_files(run: Path) -> dict[str, str]:
    found = [run / "draws.jsonl", *(run / "trajectories").iterdir(), *(run / "evaluations").iterdir()]
    return {str(path.relative_to(run)): path.read_text() for path in found}


# --- what is kept


def test_the_draws_of_a_step_are_what_its_metrics_say(run):
    metrics = {row["step"]: row for row in logged(run)}
    drawn = {row["step"]: row["draws"] for row in rows(run / "draws.jsonl")}
    assert drawn, "replay never fired"
    for step, row in metrics.items():
        draws = drawn.get(step, [])
        assert len(draws) == row["replay/trajectories"]
        if draws:
            assert fmean(draw["age"] for draw in draws) == pytest.approx(row["replay/age"])
            assert fmean(draw["advantage_today"] for draw in draws) == pytest.approx(row["replay/advantage"])
            assert fmean(draw["reward"] for draw in draws) == pytest.approx(row["replay/reward"])
        for draw in draws:
            assert draw["played"] == step - draw["age"] >= 0
            assert draw["advantage"] > 0, "it beat its siblings when it was played"
            assert 0 < draw["turns_replayed"] <= draw["turns"]


def test_a_draw_has_the_text_of_the_episode_that_was_played(run):
    """Where a step was dumped as well, its line there is the same episode."""
    num_compared = 0
    for draw in chosen(run, replayed=True):
        assert draw["turns"], draw
        step, number = map(int, draw["episode"].split("/"))
        dump = run / "trajectories" / f"step_{step:06d}.jsonl"
        if dump.is_file():
            episode = rows(dump)[number]
            num_compared += 1
            for name in ("task", "family", "reward", "success", "stop", "tool_turns", "last_observation"):
                assert draw[name] == episode[name], name
            assert [turn["text"] for turn in draw["turns"]] == [turn["text"] for turn in episode["turns"]]
    assert num_compared


def test_the_text_of_a_replayed_episode_is_written_once(run):
    names = [row["episode"] for path in (run / "trajectories").glob("replayed_*") for row in rows(path)]
    assert len(names) == len(set(names))
    draws = [draw["episode"] for row in rows(run / "draws.jsonl") for draw in row["draws"]]
    assert set(names) == set(draws)
    assert len(draws) > len(names), "some are drawn again, or this shows nothing"


def test_an_episode_ends_with_the_environments_last_answer(run):
    for episode in played(run):
        if episode["stop"] == "done":
            assert episode["last_observation"] == ("right" if episode["success"] else "wrong")


def test_evaluation_episodes_are_those_of_the_rates(run):
    for row in rows(run / "eval.jsonl"):
        episodes = rows(run / "evaluations" / f"step_{row['step']:06d}.jsonl")
        assert len(episodes) == row["episodes"]
        assert fmean(episode["success"] for episode in episodes) == row["success"]
        assert {episode["task"] for episode in episodes} == set(row["solved"])
        assert {episode["split"] for episode in episodes} == {"validation"}


def test_a_resumed_run_has_the_same_files_as_one_that_never_stopped(run, tmp_path):
    whole = written_files(run)
    assert written_files(trained_again(run, tmp_path / "early", steps=4)) == whole
    # What a killed run wrote after its checkpoint is cut off, also where nothing is written in its place.
    later = tmp_path / "later"
    shutil.copytree(run, later)
    shutil.rmtree(later / "checkpoints" / "step_000006")
    for name in (
        "trajectories/step_000005.jsonl",
        "trajectories/replayed_000009.jsonl",
        "evaluations/step_000005.jsonl",
    ):
        (later / name).write_text('{"task": "of another life", "turns": []}\n')
    with (later / "draws.jsonl").open("a") as file:
        file.write('{"step": 7, "draws": []}\n{"step": 8, "dr')
    train_from(load("lookup", [f"run.dir={later}", *SETTINGS, f"run.steps={STEPS}", "run.resume=true"]))
    assert written_files(later) == whole


def trained_again(run: Path, folder: Path, *, steps: int) -> Path:
    trained(folder, f"run.steps={steps}")
    train_from(load("lookup", [f"run.dir={folder}", *SETTINGS, f"run.steps={STEPS}", "run.resume=true"]))
    extra = folder / "evaluations" / f"step_{steps:06d}.jsonl"  # the end of the first part
    extra.unlink()
    return folder


def test_without_dumps_the_draws_are_numbers_alone_and_show_says_so(tmp_path, spear):
    folder = trained(tmp_path / "run", "run.steps=4", "run.trajectories_every=0")
    assert not (folder / "trajectories").exists()
    assert not (folder / "evaluations").exists()
    assert rows(folder / "draws.jsonl")
    code, text = spear("show", folder, "--replayed", "--limit", 1)
    assert code == 0
    assert re.search(r"played at step \d, age \d, A [\d.]+ \(then\), A' [\d.]+ \(now\), \d of \d turns replayed", text)
    assert "its text was not kept" in text
    for option in ("--failed", "--eval"):
        assert "run.trajectories_every" in spear("show", folder, option)[1]


def test_a_large_evaluation_is_cut_and_says_by_how_much(tmp_path, monkeypatch, spear):
    monkeypatch.setattr(episode_files, "MAX_EVALUATION", 3000)
    turn = Turn([], Completion([], []), observation="x" * 700, text="y")
    groups = [Group(f"t{n}", [Trajectory([turn], Stop.DONE)], info={"family": ""}) for n in range(9)]
    path = tmp_path / "eval.jsonl"
    write_evaluation(path, groups, step=3, split="test")
    assert path.stat().st_size < 3100
    *kept, last = rows(path)
    assert last == {"left_out": 9 - len(kept)}
    code, text = spear("show", path)
    assert code == 0
    assert f"{9 - len(kept)} more were not kept" in text


# --- what is shown


@pytest.mark.parametrize(("option", "success"), [("failed", False), ("solved", True)])
def test_failed_and_solved_are_all_there_are_of_each_newest_first(run, option, success):
    expected = [episode for episode in played(run) if episode["success"] is success]
    assert expected
    assert chosen(run, **{option: True}) == expected
    assert all(a["step"] >= b["step"] for a, b in pairwise(expected))


def test_filters_can_be_combined_for_every_kind_of_episode(run):
    for kind in ({}, {"replayed": True}, {"evaluated": True}):
        everything = chosen(run, **kind)
        assert everything
        families = {episode["family"] for episode in everything}
        for family in families:
            for step in {episode["step"] for episode in everything}:
                for option, success in (("solved", True), ("failed", False)):
                    found = chosen(run, **kind, **{option: True}, family=family.upper(), step=str(step))
                    wanted = {"family": family, "step": step, "success": success}
                    assert found == [e for e in everything if wanted.items() <= e.items()]
        task = everything[-1]["task"]
        assert chosen(run, **kind, task=task) == [e for e in everything if e["task"] == task]


def test_a_task_is_found_by_its_id_by_whole_words_of_it_and_by_a_pattern(run):
    everything = chosen(run)
    number = everything[0]["task"].rpartition("/")[2]
    assert chosen(run, task=number) == [e for e in everything if e["task"].endswith(f"/{number}")]
    assert chosen(run, task=number[:-1]) == []
    assert chosen(run, task=f"lookup/*/{number}") == chosen(run, task=number)
    assert chosen(run, task="train") == everything
    assert chosen(run, task=".") == [], "it is no regular expression"


def test_steps_can_be_a_range(run):
    assert {e["step"] for e in chosen(run, step="1-3")} == {2}
    assert {e["step"] for e in chosen(run, replayed=True, step="3-4")} <= {3, 4}
    assert {e["step"] for e in chosen(run, evaluated=True, step="0-3")} == {0, 3}


def test_a_limit_keeps_the_newest_and_says_that_there_are_more(run, spear):
    assert chosen(run, limit=3) == played(run)[:3]
    code, text = spear("show", run, "--solved")
    assert code == 0
    assert text.count("last answer:") == 5
    assert "there are more: raise --limit, which is 5" in text
    assert spear("show", run, "--solved", "--limit", 2)[1].count("last answer:") == 2
    assert spear("show", run, "--episodes", 3)[1].count("last answer:") == 3


def test_an_episode_reads_turn_by_turn_with_tools_rewards_and_advantages(run, spear):
    episode = next(e for e in played(run) if e["success"] and e["tool_turns"])
    code, text = spear("show", run, "--task", episode["task"], "--step", episode["step"], "--limit", 100)
    assert code == 0
    lines = text.splitlines()
    head = f"{episode['task']} at step {episode['step']}: solved, reward 1 (done)"
    at = lines.index(head)
    assert lines[at + 1].startswith(f"  family {episode['family']}, turns 2, tool turns 1")
    first, second = episode["turns"]
    assert lines[at + 2] == f"  {first['observation']}"
    assert lines[at + 3] == f"  > look    [advantage {first['advantage']:.3g}; tool]"
    assert lines[at + 4] == f"  {second['observation']}"
    assert lines[at + 5] == f"  > {second['text']}    [advantage {second['advantage']:.3g}; reward 1]"
    assert lines[at + 6] == "  last answer: right"


def test_a_replayed_episode_shows_age_and_both_advantages(run, spear):
    draw = rows(run / "draws.jsonl")[-1]["draws"][0]
    code, text = spear("show", run, "--replayed", "--limit", 1)
    assert code == 0
    assert f"{draw['task']} replayed at step {STEPS - 1}: solved, reward 1" in text
    about = f"played at step {draw['played']}, age {draw['age']}, A {draw['advantage']:.3g} (then), "
    assert about + f"A' {draw['advantage_today']:.3g} (now), {draw['turns_replayed']} of {draw['turns']}" in text


def test_what_is_not_there_is_said_with_what_there_is(run, spear, tmp_path):
    assert "there are steps 0, 2, 4" in spear("show", run, "--step", 3)[1]
    assert "families blue, gold, green, red" in spear("show", run, "--family", "nix")[1]
    assert "splits validation" in spear("show", run, "--split", "nix")[1]
    (tmp_path / "config.toml").touch()
    assert "has no replayed episode" in spear("show", tmp_path, "--replayed")[1]
    for arguments, reason in {
        (run, "--failed", "--solved"): "exclude each other",
        (run, "--replayed", "--eval"): "give one of them",
        (run, "--step", "x"): "--step must be a step or a range",
        (run, "--step", "5-3"): "--step must be a step or a range",
        (run, "--limit", -1): "--limit must be",
        ("lookup", "--failed"): "no run folder",
        ("config", "--json"): "no run folder",
        (tmp_path / "none.jsonl",): "does not exist",
        (tmp_path.parent, "--solved"): "no config.toml",
    }.items():
        code, text = spear("show", *arguments)
        assert (code, reason in text) == (2, True), text


def test_long_texts_are_wrapped_and_shortened_unless_full(tmp_path):
    words = " ".join(f"word{n}" for n in range(400))
    many = "\n".join(f"line {n}" for n in range(50))
    turn = {"observation": words, "text": many, "reward": 0.0}
    path = one_episode(tmp_path, {"task": "t", "step": 0, "success": True, "reward": 1, "turns": [turn]})
    short = episodes_text(path, Selection(), Words(80))
    assert max(map(len, short.splitlines())) <= 80
    assert "word0 " in short
    assert "word399" in short
    assert "word150" not in short
    assert "  > line 0\n    line 1\n" in short
    assert short.count("--full shows them") == 2
    full = episodes_text(path, Selection(), Words(80, full=True))
    assert all(f"word{n}" in full for n in range(400))
    assert all(f"line {n}" in full for n in range(50))
    assert "--full" not in full


def one_episode(folder: Path, *episodes: object) -> Path:
    """A run folder with these lines in its newest dump."""
    (folder / "config.toml").touch()
    (folder / "trajectories").mkdir(exist_ok=True)
    lines = [line if isinstance(line, str) else json.dumps(line) for line in episodes]
    (folder / "trajectories" / "step_000007.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_an_episode_of_an_older_version_is_shown_with_what_it_does_not_say(tmp_path, spear):
    old = {"task": "t", "step": 7, "success": True, "reward": 1.0, "bonus": 0.0, "stop": "done"}
    old["turns"] = [{"observation": "seen", "text": "said", "reward": 1.0, "advantage": 0.5}]
    one_episode(tmp_path, old)
    code, text = spear("show", tmp_path, "--solved")
    assert code == 0
    assert "t at step 7: solved, reward 1 (done)" in text
    assert "family unknown, turns 1, tool turns unknown" in text
    assert "  last answer: unknown" in text
    assert "no episode is as asked for" in spear("show", tmp_path, "--family", "x")[1]


def test_damaged_lines_are_named_and_the_others_shown(run, tmp_path, spear):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = max((copy / "trajectories").glob("step_*"))
    lines = newest.read_text().splitlines()
    wanted = len([e for e in chosen(copy, limit=10_000) if e["step"] == 4])
    newest.write_text("\n".join(["{", *lines, "[]", '{"turns": 3}', '{"turns": [4]}', lines[0][:50]]))
    code, text = spear("show", copy, "--step", 4, "--limit", 10_000)
    assert code == 0
    for number in (1, len(lines) + 2, len(lines) + 3, len(lines) + 4, len(lines) + 5):
        assert f"{newest.name}, line {number} is damaged or was cut off" in text
    assert text.count("last answer:") == wanted
    draws = copy / "draws.jsonl"
    content = draws.read_text().splitlines()
    draws.write_text("\n".join(["rubbish", *content, '{"step": 90, "draws": 7}', '{"step": 91, "draws": [1, {}]}']))
    code, text = spear("show", copy, "--replayed", "--limit", 10_000)
    assert code == 0
    assert "draws.jsonl, line 1 is not valid JSON" in text
    assert text.count("replayed at step") == sum(len(json.loads(line)["draws"]) for line in content)


def test_a_run_goes_on_after_its_draws_were_damaged(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    strange = '{"step": 1, "draws": [{"episode": [1], "played": 0, "text": 1}, 5]}'
    (copy / "draws.jsonl").write_text(f'x\n{strange}\n{{"step": 2, "draws": {{}}}}\n')
    train_from(load("lookup", [f"run.dir={copy}", *SETTINGS, "run.steps=7", "run.resume=true"]))
    assert rows(copy / "draws.jsonl")[-1]["step"] == 6
    assert (copy / "draws.jsonl.damaged").read_text() == "x\n"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
NAMES = [
    "task", "family", "step", "success", "reward", "bonus", "stop", "tool_turns", "turns", "last_observation", "split",
    "metrics", "observation", "text", "advantage", "tool", "invalid", "truncated", "dropped", "left_out", "replayed",
]  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(NAMES), ANYTHING)


@settings(deadline=None)
@given(st.lists(FIELDS.flatmap(lambda e: st.lists(FIELDS, max_size=3).map(lambda t: e | {"turns": t})), max_size=4))
def test_whatever_the_lines_hold_show_prints_harmless_text(tmp_path_factory, episodes):
    folder = one_episode(tmp_path_factory.mktemp("any"), *episodes)
    for selection in (Selection(limit=100), Selection(limit=100, solved=False, family="a", task="b", steps=(0, 9))):
        text = episodes_text(folder, selection, Words())
        bad = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")}
        assert not bad
    run_overview(folder)


@settings(deadline=None)
@given(st.text(), st.text(), st.text())
def test_no_line_of_a_policy_or_environment_looks_like_one_of_ours(tmp_path_factory, seen, said, last):
    turn = {"observation": f"a\n{seen}", "text": f"b\n{said}", "dropped": f"c\n{last}", "reward": 0.0}
    episode = {"task": f"t\n{seen}", "family": f"f\n{said}", "step": 1, "success": True, "reward": 1.0}
    episode |= {"stop": f"s\n{last}", "turns": [turn], "last_observation": f"l\n{last}"}
    text = episodes_text(one_episode(tmp_path_factory.mktemp("any"), episode), Selection(), Words(full=True))
    assert [line[:8] for line in text.split("\n") if not line.startswith("    ") and line] == [
        text[:8], "  family", "  a", "  > b", "  last a",
    ]  # fmt: skip


# --- evaluations by `spear eval`


def test_eval_keeps_its_episodes_beside_the_result_and_in_the_run(run, tmp_path, spear):
    copy, out = tmp_path / "run", tmp_path / "result.json"
    shutil.copytree(run, copy)
    code, text = spear("eval", copy, "--split", "test", "--tasks", 3, "--episodes", 2, "--out", out)
    assert code == 0, text
    beside, inside = tmp_path / "result.episodes.jsonl", copy / "evaluations" / "eval_test_step_000006.jsonl"
    for path in (beside, inside):
        assert f"episodes are in {path}" in text
        assert len(rows(path)) == 6
    result = json.loads(out.read_text())
    assert fmean(row["success"] for row in rows(beside)) == result["success"]
    assert {row["task"] for row in rows(beside)} == set(result["tasks"])
    assert chosen(copy, split="test") == rows(inside) == chosen(beside)
    assert {(e["step"], e["split"]) for e in chosen(copy, split="test")} == {(6, "test")}
    others = {path.name for path in (copy / "evaluations").iterdir()} - {inside.name}
    assert others == {path.name for path in (run / "evaluations").iterdir()}


def test_a_run_that_cannot_be_written_to_is_evaluated_all_the_same(run, tmp_path, spear):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "evaluations")
    (copy / "evaluations").write_text("in the way")
    code, text = spear("eval", copy, "--tasks", 2)
    assert code == 0
    assert "episodes are not kept" in text
    assert "mean reward" in text


def test_the_experts_episodes_are_kept_beside_its_result_alone(tmp_path, spear, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _ = spear("eval", "expert", "--env", "lookup", "--tasks", 4, "--out", "expert.json")
    assert code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expert.episodes.jsonl", "expert.json"]
    code, text = spear("show", "expert.episodes.jsonl", "--limit", 2)
    assert code == 0
    assert "evaluated on validation" in text
