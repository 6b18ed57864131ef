"""tool_math with the real sandbox, through the rollout, the rows, the step, and the presets as they are shipped."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

from conftest import RecordingEngine
from spear_rl.algorithms import ALGORITHMS
from spear_rl.app.build.training import algorithm_of, tasks_of
from spear_rl.app.config import load
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.envs import tool_math
from spear_rl.envs.tool_math.calls import call_text
from spear_rl.rollout import ChatRenderer, collect_groups
from spear_rl.rollout.workers.other_venv import tasks_from_other_venv
from spear_rl.rollout.workers.pool import Pool
from spear_rl.testing import check_tasks
from spear_rl.train.evaluate import pass_at, sampled
from spear_rl.train.step import collate, train_step
from spear_rl.types import Stop


@pytest.fixture(scope="module")
def tasks():
    return tool_math.tasks("validation", level="small", seconds=2.0, prompt="short")


@pytest.fixture(scope="module")
def math_tokenizer(tasks):
    texts = [
        tasks[0].instructions,
        *(text for task in tasks for text in (task.make_env().reset().text, *task.demonstrate(0))),
    ]
    return tiny_tokenizer(texts)


def played(tasks, tokenizer, said, **options):
    engine = RecordingEngine(tokenizer, said)
    return collect_groups(
        tasks, group_size=1, generator=engine, renderer=ChatRenderer(tokenizer), max_turns=8, step=0, **options
    )


def test_an_episode_runs_its_code_in_the_sandbox_and_keeps_its_variables(tasks, math_tokenizer):
    problem = next(task for task in tasks if task.family == "product")
    code, answer = [json.loads(text[11:-12])["arguments"]["code"] if "tool_call" in text else text
                    for text in problem.demonstrate(0)]  # fmt: skip
    said = [
        call_text(f"kept = {code[6:-1]}"),
        call_text("import os\nprint(os.listdir('/'))"),
        call_text("kept"),
        answer,
    ]
    [group] = played([problem], math_tokenizer, said)
    [trajectory] = group.trajectories
    assert trajectory.success
    assert (trajectory.num_tool_turns, trajectory.stop) == (3, Stop.DONE)
    silent, refused, shown = [turn.observation for turn in trajectory.turns[1:]]
    assert "printed nothing" in silent
    assert "Error" in refused
    assert shown == f"<tool_response>\n{answer[7:-1]}\n</tool_response>"


def test_code_that_never_ends_is_answered_in_time(tasks, math_tokenizer):
    [group] = played(tasks[:1], math_tokenizer, [call_text("while True: pass"), "\\boxed{0}"])
    [trajectory] = group.trajectories
    assert trajectory.turns[0].used_tool
    assert "2" in trajectory.turns[1].observation
    assert "second" in trajectory.turns[1].observation


def test_only_what_the_policy_said_trains_and_all_turns_share_a_row(tasks, math_tokenizer):
    said = [call_text("print(12345)"), "hm", "\\boxed{12345}"]
    [group] = played(tasks[:1], math_tokenizer, said)
    [trajectory] = group.trajectories
    batch = collate([trajectory], [[1.0, 1.0, 1.0]], pad_id=0)
    assert batch.input_ids.shape[0] == 1
    written = math_tokenizer.decode(batch.input_ids[batch.mask]).replace("<|end|>", "|")
    assert written == "|".join(said) + "|"
    everything = math_tokenizer.decode(batch.input_ids[0])
    assert "<tool_response>\n12345\n</tool_response>" in everything
    assert everything.startswith(f"<|system|>{tasks[0].instructions}<|end|><|user|>")
    without_void = collate([trajectory], [[1.0, 1.0, 1.0]], pad_id=0, dropped=[["", "void", ""]])
    kept = math_tokenizer.decode(without_void.input_ids[without_void.mask]).replace("<|end|>", "|")
    assert kept == f"{said[0]}|{said[2]}|"
    assert torch.equal(without_void.input_ids, batch.input_ids)


def test_the_step_pays_the_bonus_for_calls_and_keeps_it_out_of_the_baseline(tasks, math_tokenizer):
    engine = RecordingEngine(math_tokenizer, [call_text("print(1)"), "\\boxed{0}", "\\boxed{0}", "\\boxed{1}"])
    algorithm = ALGORITHMS["spear-dr-bot-grpo"]()

    def collect(step):
        return collect_groups(
            tasks[:1], group_size=2, generator=engine, renderer=ChatRenderer(math_tokenizer), max_turns=8, step=step
        )

    metrics = train_step(0, collect=collect, algorithm=algorithm, engine=engine, rng=random.Random(0))
    assert metrics["rollout/tool_turns"] == 0.5
    assert metrics["rollout/bonus"] == pytest.approx(0.05)
    assert metrics["rollout/reward"] == -1.0
    assert algorithm.imitation.history.percentile(50.0) == -1.0


def test_a_pool_of_workers_gives_the_same_episodes(tasks, math_tokenizer):
    said = [call_text("import random\nprint(random.random(), [*{'a', 'b', 'c'}])"), "\\boxed{1}"]
    here = played(tasks[:2], math_tokenizer, said[:1] * 2 + said[1:] * 2)
    with Pool(num_workers=2) as pool:
        there = played(tasks[:2], math_tokenizer, said[:1] * 2 + said[1:] * 2, envs=pool)
    observations = [
        [turn.observation for g in groups for t in g.trajectories for turn in t.turns] for groups in (here, there)
    ]
    assert observations[0] == observations[1]
    assert any("0." in text for text in observations[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"level": "tiny", "prompt": "short"}, {"level": "medium"}])
def test_the_whole_check_finds_no_fault(options):
    assert check_tasks(tool_math.tasks, options=options, num_tasks=2) == []


# Presets


def test_the_papers_settings_are_the_papers():
    config = load("paper-math")
    rollout, algorithm = config.rollout, config.algorithm
    assert (rollout.num_tasks, rollout.group_size, rollout.max_turns, rollout.max_new_tokens) == (128, 16, 8, 16384)
    assert (config.optim.learning_rate, config.optim.num_minibatches, rollout.layout) == (1e-6, 2, "chat")
    assert (algorithm.name, algorithm.invalid_penalty, algorithm.entropy_bonus) == ("spear-dr-bot-grpo", 0.0, 0.0)
    assert (algorithm.bonus.mode, algorithm.bonus.steps, algorithm.imitation.warm_steps) == ("cosine", 200, 300)
    imitation, covariance = algorithm.imitation, algorithm.covariance
    assert (imitation.capacity, imitation.history, imitation.max_age, imitation.percentile) == (2048, 10240, 5, 50.0)
    assert imitation.require_tool
    assert (covariance.fraction, covariance.low, covariance.high) == (0.02, 1.0, 40.0)
    loss = algorithm_of(config).loss
    assert (loss.clip_low, loss.clip_high, loss.dual_clip, algorithm.keep_groups) == (0.2, 0.28, 10, 0.75)


@pytest.mark.parametrize("preset", ["math-tiny", "math-smollm2"])
def test_the_small_presets_have_problems_and_demonstrations_for_them(preset):
    config = load(preset)
    panel = tasks_of(config, "train")
    assert len(panel) == 2000
    assert all(task.demonstrate(0) for task in panel[:20])
    assert config.rollout.max_turns == config.task.options["max_turns"]
    assert config.algorithm.imitation.require_tool


@pytest.mark.slow
def test_the_tiny_preset_trains_from_end_to_end_with_the_real_sandbox(spear, tmp_path):
    small = ["sft.episodes=40", "run.steps=2", "eval.tasks=4", "rollout.num_tasks=2", "rollout.group_size=4"]
    code, text = spear("train", "math-tiny", f"run.dir={tmp_path / 'run'}", *small)
    assert code == 0, text
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/episodes"] for row in rows] == [8.0, 8.0]
    assert all(-1.0 <= row["rollout/reward"] <= 1.0 and row["rollout/failed_episodes"] == 0 for row in rows)
    evals = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert set(evals[-1]["metrics"]) == {"tool_turns"}


def test_tasks_from_another_virtual_environment_keep_their_role_and_their_price():
    [task, *_] = tasks_from_other_venv(
        "test", python=sys.executable, name="spear_rl.envs.tool_math:tasks", level="tiny"
    )
    assert (task.instructions_role, task.unfinished_reward) == ("system", -1.0)
    assert task.make_env().reset().text.endswith("=?")


# mean@k and pass@k


def test_pass_at_k_is_the_share_of_draws_with_a_solved_episode():
    from itertools import combinations

    for played_ in range(1, 7):
        for solved in range(played_ + 1):
            episodes = [True] * solved + [False] * (played_ - solved)
            for k in range(1, played_ + 1):
                draws = [any(draw) for draw in combinations(episodes, k)]
                assert pass_at(k, solved=solved, played=played_) == pytest.approx(sum(draws) / len(draws))
    with pytest.raises(ValueError, match="is undefined"):
        pass_at(3, solved=1, played=2)


def test_mean_and_pass_at_k_come_with_intervals_over_tasks():
    sure = sampled([(4, 4), (0, 4)] * 10, 4).rates
    assert list(sure) == ["mean@4", "pass@1", "pass@2", "pass@4"]
    assert [rate["rate"] for rate in sure.values()] == [0.5] * 4
    # Twenty coins thrown once, whatever the number of episodes: those of one task all say the same.
    assert {(round(rate["low"], 3), round(rate["high"], 3)) for rate in sure.values()} == {(0.299, 0.701)}
    even = sampled([(2, 4)] * 20, 4).rates
    assert even["mean@4"]["rate"] == even["pass@1"]["rate"] == 0.5
    assert even["mean@4"]["high"] - even["mean@4"]["low"] < sure["mean@4"]["high"] - sure["mean@4"]["low"]
    assert even["pass@4"]["rate"] == 1.0
    assert even["pass@4"]["low"] < 0.9
    lost = sampled([(4, 4), (1, 3)], 4).rates
    assert (lost["pass@4"]["tasks"], lost["pass@4"]["rate"]) == (1, 1.0)
    assert sampled([(1, 3)], 4).rates["mean@4"] == {"rate": 0.0, "low": 0.0, "high": 1.0, "tasks": 0}


def test_eval_prints_and_writes_them_when_asked_for_and_nothing_new_otherwise(spear, tmp_path):
    out = tmp_path / "eval.json"
    code, text = spear("eval", "expert", "--env", "lookup", "--samples", 4, "--out", out)
    assert code == 0
    assert "pass@4 " in text
    assert "mean@4 " in text
    written = json.loads(out.read_text())
    assert (written["k"], written["episodes_per_task"], written["episodes"]) == (4, 4, 64)
    solved = list(written["solved"].values())
    assert written["samples"]["mean@4"]["rate"] == pytest.approx(written["success"])
    assert written["samples"]["pass@4"]["rate"] == pytest.approx(sum(share > 0 for share in solved) / 16)
    code, text = spear("eval", "expert", "--env", "lookup", "--out", out)
    assert "@" not in text
    assert not {"k", "samples", "counts"} & json.loads(out.read_text()).keys()
    assert spear("eval", "expert", "--env", "lookup", "--samples", -1)[0] == 2
