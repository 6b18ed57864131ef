"""Runs with agents and with episodes from files, through the command line."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.errors import ConfigError
from spear_rl.rollout.agents.records import read_records, record_of
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.rollout.rendering.renderer import without_thoughts
from spear_rl.rollout.tasks import tasks_in_file
from spear_rl.types import Completion, Stop, Trajectory, Turn
from test_chat_templates import FAMILIES, tokenizer_of

sys.path.insert(0, str(Path(__file__).parent))

SMALL = [
    "task.env=lookup", "task.agent=agent_examples:guesses", "engine.model=tiny-xs", "rollout.num_tasks=2",
    "rollout.group_size=2", "rollout.max_turns=3", "rollout.max_new_tokens=3", "eval.tasks=0", "run.threads=1",
    "run.checkpoint_every=1", "run.trajectories_every=1", 'run.trackers=["jsonl"]',
]  # fmt: skip


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_agent_trains_resumes_and_is_evaluated(spear, tmp_path):
    run = f"run.dir={tmp_path / 'run'}"
    code, printed = spear("train", *SMALL, "run.steps=1", run)
    assert code == 0, printed
    code, printed = spear("train", *SMALL, "run.steps=2", run, "run.resume=true")
    assert code == 0, printed
    metrics = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1]
    assert all(row["rollout/episodes"] == 4 and row["policy/turns"] > 0 for row in metrics)
    assert len(rows_of(tmp_path / "run" / "episodes" / "step_000001.jsonl")) == 4
    code, printed = spear("eval", str(tmp_path / "run"), "--split", "validation", "--tasks", "4")
    assert code == 0, printed


def test_the_agent_of_a_run_cannot_change(spear, tmp_path):
    run = f"run.dir={tmp_path / 'run'}"
    assert spear("train", *SMALL, "run.steps=1", run)[0] == 0
    code, printed = spear("train", "run.steps=2", run, "run.resume=true", "task.agent=agent_examples:one_call")
    assert code == 2
    assert "task.agent" in printed


@pytest.mark.parametrize("agent", ["never_calls", "raises", "returns_none", "nobody"])
def test_a_bad_agent_ends_a_run_with_one_sentence_and_its_checkpoints_stay(spear, tmp_path, agent):
    run = f"run.dir={tmp_path / 'run'}"
    code, printed = spear("train", *SMALL, "run.steps=1", run, f"task.agent=agent_examples:{agent}")
    assert code == 2
    assert f"agent_examples:{agent}" in printed
    assert "Traceback" not in printed


def test_recorded_episodes_cold_start_a_run_and_seed_the_buffer(spear, tmp_path):
    first = tmp_path / "first"
    assert spear("train", *SMALL, "run.steps=1", f"run.dir={first}", "rollout.group_size=16")[0] == 0
    file = first / "episodes" / "step_000000.jsonl"
    won = [row | {"success": True} for row in rows_of(file)]
    for row in won:
        row["turns"] = [turn | {"truncated": False, "reward": 1.0} for turn in row["turns"][:1]]
    file.write_text("".join(json.dumps(row) + "\n" for row in won))
    model = f"engine.model={first / 'checkpoints' / 'step_000001'}"
    code, printed = spear(
        "train", *SMALL, "run.steps=2", f"run.dir={tmp_path / 'second'}", model, f"sft.from={file}", "sft.epochs=1",
        "algorithm.name=spear-grpo", f"algorithm.imitation.from={file}", "algorithm.imitation.schedule=steps",
    )  # fmt: skip
    assert code == 0, printed
    assert "cold start" in printed
    metrics = rows_of(tmp_path / "second" / "metrics.jsonl")
    assert metrics[0]["replay/buffer_size"] == 32


def test_chats_cold_start_a_run_of_any_environment(spear, tmp_path):
    chats = [
        {"messages": [{"role": "user", "content": f"red code {n}"}, {"role": "assistant", "content": str(n)}]}
        for n in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    options = [setting for setting in SMALL if not setting.startswith("task.agent")]
    code, printed = spear(
        "sft", *options, f"sft.from={tmp_path / 'chats.jsonl'}", "sft.batch_size=4", "sft.epochs=2",
        f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert code == 0, printed
    assert "4/4" in printed


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1 is not valid JSON"),
        ("{}", "line 1 has neither messages nor turns"),
        ('{"messages": []}', "line 1: messages must be a list with at least one message"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no assistant message"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must not begin with an assistant"),
        ('{"turns": []}', "turns must be a list with at least one turn"),
        ('{"turns": [{"text": "x"}]}', "turns[0] lacks prompt_ids or token_ids"),
        ('{"turns": [{"prompt_ids": [1], "token_ids": [999999]}]}', "token ids from 0 to"),
        ('{"turns": [{"prompt_ids": [1], "token_ids": [1], "logprobs": []}]}', "turns[0].logprobs"),
        ('{"turns": [{"prompt_ids": [1], "token_ids": [1], "reward": "x"}]}', "turns[0].reward"),
        ("", "has no episode"),
    ],
)
def test_a_file_that_is_no_file_of_episodes_is_refused_by_its_line(tmp_path, tokenizer, line, sentence):
    path = tmp_path / "episodes.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError) as caught:
        read_records(str(path), AgentRenderer(tokenizer), key="sft.from")
    assert str(caught.value).startswith("sft.from: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_episode_with_a_token_that_no_tokenizer_has_is_left_out(tmp_path, tokenizer):
    rows = [{"turns": [{"prompt_ids": [1], "token_ids": [last]}]} for last in (1, len(tokenizer), 2)]
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_records(str(path), AgentRenderer(tokenizer), key="sft.from")
    assert [recorded.trajectory.turns[0].completion.token_ids for recorded in found] == [[1], [2]]
    path.write_text(json.dumps(rows[1]))
    with pytest.raises(ConfigError, match="has no episode"):
        read_records(str(path), AgentRenderer(tokenizer), key="sft.from")


def test_a_file_that_is_missing_is_named(spear, tmp_path):
    code, printed = spear("train", *SMALL, "sft.from=nowhere.jsonl", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    assert "sft.from: nowhere.jsonl cannot be read" in " ".join(printed.split())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_recorded_episode_is_read_back_as_it_was(tmp_path_factory, tokenizer, seed):
    rng = random.Random(seed)

    def ids():
        return [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 6))]

    turns = []
    for _ in range(rng.randint(1, 4)):
        written = ids()
        completion = Completion(written, [-rng.random() * 9 for _ in written], rng.random() < 0.3)
        reward, invalid = rng.choice([0.0, 1.0, -0.25]), rng.choice(["", "malformed_call"])
        turns.append(
            Turn(
                ids(),
                completion,
                reward,
                used_tool=rng.random() < 0.5,
                invalid=invalid,
                text="é\u2028",
                observation="o",
            )
        )
    played = Trajectory(turns, rng.choice([Stop.DONE, Stop.OVERLONG]), success=rng.random() < 0.5)
    path = tmp_path_factory.mktemp("records") / "episodes.jsonl"
    path.write_text(json.dumps(record_of(played, task="t", family="f", step=3)) + "\n")
    [found] = read_records(str(path), AgentRenderer(tokenizer), key="sft.from")
    assert (found.trajectory, found.task, found.family, found.has_logprobs) == (played, "t", "f", True)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_is_one_growing_row_with_the_answers_as_a_policy_writes_them(tmp_path, family):
    from spear_rl.train.step import rows

    renderer = AgentRenderer(tokenizer_of(family))
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": chat * 3, "reward": 0.5}))
    [found] = read_records(str(path), renderer, key="sft.from")
    [row] = rows(found.trajectory, [1.0] * 3)
    assert [without_thoughts(renderer.parse(a.completion.token_ids)).strip() for a in row.answers] == ["two"] * 3
    assert (found.trajectory.reward, found.trajectory.success, found.has_logprobs) == (0.5, True, False)


def test_a_line_of_tasks_may_hold_a_unicode_line_separator(tmp_path):
    path = tmp_path / "tasks.jsonl"
    line = {"question": "one\u2028two\x85three"}
    path.write_text(json.dumps(line, ensure_ascii=False) + "\n", "utf-8")
    assert [dict(task.data) for task in tasks_in_file(str(path), "train")] == [line]


def test_tasks_come_from_a_file_by_split(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{"id": "a", "question": "?"}, {"split": "validation", "family": "easy"}, {"split": "train"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [(t.id, dict(t.data)) for t in tasks_in_file(str(path), "train")] == [("a", lines[0]), ("line 3", lines[2])]
    assert [(t.id, t.family) for t in tasks_in_file(str(path), "validation")] == [("line 2", "easy")]
    with pytest.raises(ConfigError, match=r"set task\.agent="):
        tasks_in_file(str(path), "train")[0].make_env()
    for content, sentence in (
        ("[]", "is no JSON object"),
        ("{", "not valid JSON"),
        ('{"id": 1}\n{"id": "1"}', "line 1"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=sentence):
            tasks_in_file(str(path), "train")


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([], "has tasks for an agent: set task.agent=package.module:function"),
        (["task.agent=agent_examples:one_call", "sft.episodes=8"], "set sft.from to a file of chats or episodes, or"),
    ],
)
def test_a_file_of_tasks_needs_an_agent_and_has_no_expert(spear, tmp_path, more, sentence):
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    options = [setting for setting in SMALL if not setting.startswith(("task.", "run.checkpoint_every"))]
    code, printed = spear(
        "train", *options, f"task.env={tmp_path / 'tasks.jsonl'}", f"run.dir={tmp_path / 'run'}", "run.steps=1", *more
    )
    assert code == 2
    assert sentence in " ".join(printed.split())


def test_a_first_agent_trains_on_a_file_of_tasks(spear, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n{"split": "validation"}\n')
    options = [setting for setting in SMALL if not setting.startswith(("task.", "eval.tasks"))]
    code, printed = spear(
        "train", *options, f"task.env={tmp_path / 'tasks.jsonl'}", "task.agent=agent_examples:one_call",
        f"run.dir={tmp_path / 'run'}", "run.steps=1", "eval.tasks=1",
    )  # fmt: skip
    assert code == 0, printed
    assert "success after" in printed


@pytest.mark.slow
def test_an_agent_with_the_openai_package_tools_two_turns_and_a_branch_doubles_its_success(
    spear, tmp_path, monkeypatch
):
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    monkeypatch.chdir(tmp_path)
    import agent_openai

    agent_openai.main()
    code, printed = spear(
        "train", "task.agent=agent_openai:solve", "task.env=tasks.jsonl", "sft.from=chats.jsonl", "sft.epochs=4",
        "sft.batch_size=4", "sft.learning_rate=2e-3", "engine.model=tiny-xs", "rollout.num_tasks=4",
        "rollout.group_size=8", "rollout.max_turns=4", "rollout.max_new_tokens=32", "optim.learning_rate=5e-4",
        "algorithm.name=grpo", "run.steps=14", "run.threads=1", "eval.tasks=64", "eval.temperature=1", "run.dir=run",
        "run.seed=1",
    )  # fmt: skip
    assert code == 0, printed
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = summary["success_before"]["success"], summary["success_after"]["success"]
    assert before > 0.05
    assert after > 2 * before
    for row in rows_of(tmp_path / "run" / "episodes" / "step_000010.jsonl"):
        first, name, say = row["turns"]
        whole = first["prompt_ids"] + first["token_ids"]
        assert name["prompt_ids"][: len(whole)] == say["prompt_ids"][: len(whole)] == whole
