"""`spear eval` as a user meets it: reference policies, models, what is printed and what is written."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import partial

import pytest
from rich.console import Console

from conftest import logged
from spear_rl import cli
from spear_rl.envs.lookup import LookupEnv
from spear_rl.rollout import LAYOUTS, InProcess, Observation, StepResult, Task, collect_groups
from spear_rl.rollout.policies.reference import REFERENCES, ReferencePolicy
from spear_rl.rollout.rendering.renderer import MessageRenderer
from spear_rl.rollout.workers.progress import ProgressRunner
from spear_rl.rollout.workers.runner import Failure
from spear_rl.train.evaluate import evaluation, merged, wilson_interval

STARTER = ["--env", "household", "--set", "task.options.level=starter"]


@pytest.fixture
def result_of(spear, tmp_path):
    """Runs `spear eval` and reads what it wrote."""

    def call(*arguments: object) -> dict:
        out = tmp_path / "results" / "eval.json"
        code, text = spear("eval", *arguments, "--out", out)
        assert code == 0, text
        return json.loads(out.read_text())

    return call


def test_the_expert_solves_the_starter_panel_and_chance_does_not(result_of):
    best, chance = result_of("expert", *STARTER), result_of("random", *STARTER)
    assert (best["success"], best["episodes"], best["failed_episodes"]) == (1.0, 200, 0)
    assert best["low"] > 0.98
    assert best["stops"] == {"done": 200}
    assert 0 < chance["success"] < 0.3
    assert chance["invalid_turns"] == best["invalid_turns"] == 0.0
    assert chance["turns"] > 20 > 6 > best["turns"]


def test_an_expert_that_is_done_ends_its_episode_also_when_it_has_not_won(result_of):
    result = result_of("expert", "--env", "lookup", "--episodes", 4)
    # This demonstrator guesses in half of its episodes, so that imitating it leaves room to learn.
    assert 0.35 < result["success"] < 0.75
    clumsy = result_of("expert", *STARTER, "--set", "task.options.expert=clumsy", "--tasks", 40)
    assert 0.4 < clumsy["success"] < 0.8
    assert clumsy["turns"] < 15
    assert set(clumsy["stops"]) <= {"done", "max_turns"}


@pytest.mark.parametrize("policy", ["expert", "random"])
def test_the_same_seed_gives_the_same_result_and_another_seed_another(result_of, policy):
    run = partial(result_of, policy, "--env", "lookup", "--episodes", 3, "--seed")
    first = run(1)
    assert run(1) == first
    assert run(2)["solved"] != first["solved"]
    assert result_of(policy, "--env", "lookup", "--episodes", 3, "--seed", 1, "--set", "rollout.workers=2") == first


def test_an_episode_does_not_depend_on_how_many_others_are_played(result_of):
    few = result_of("random", *STARTER, "--tasks", 30)["solved"]
    many = result_of("random", *STARTER, "--tasks", 60)["solved"]
    assert {name: many[name] for name in few} == few


def test_the_written_result_says_what_it_is_a_result_of(result_of):
    result = result_of("random", *STARTER, "--tasks", 3, "--episodes", 2, "--split", "test", "--seed", 7)
    assert result["tasks"] == [f"household/starter/test/{number:05d}" for number in range(3)]
    assert set(result["solved"]) == set(result["tasks"])
    assert (result["policy"], result["model"], result["env"], result["split"]) == ("random",) * 2 + (
        "household",
        "test",
    )
    assert (result["options"], result["seed"], result["max_turns"]) == ({"level": "starter"}, 7, 30)
    assert (result["episodes_per_task"], result["episodes"]) == (2, 6)
    assert {"spear_rl", "python"} <= set(result["versions"])
    family = result["by_family"]["pick_and_place_simple"]
    assert family["low"] <= family["success"] <= family["high"]


def test_a_model_of_this_machine_plays_as_many_episodes_as_asked_for(spear, result_of):
    small = ["--env", "lookup", "--tasks", 4, "--set", "rollout.max_turns=3", "--set", "rollout.max_new_tokens=4"]
    one, two = result_of("tiny-xs", *small), result_of("tiny-xs", *small, "--episodes", 2, "--temperature", 0.9)
    assert (one["episodes"], two["episodes"], len(two["solved"])) == (4, 8, 4)
    assert (one["policy"], one["model"], one["temperature"], two["temperature"]) == ("model", "tiny-xs", 0.4, 0.9)
    assert {"torch", "transformers"} <= set(one["versions"])
    assert two == result_of("tiny-xs", *small, "--episodes", 2, "--temperature", 0.9)
    code, text = spear("eval", "tiny-xs", *small)
    assert code == 0
    assert "tiny-xs on lookup, validation: 4 tasks" in text


def test_settings_may_come_from_a_preset(result_of):
    result = result_of("random", "--config", "lookup", "--set", "rollout.max_turns=1")
    assert (result["env"], result["max_turns"]) == ("lookup", 1)
    assert result["turns"] == 1.0


MISTAKES = {
    ("expert", "--split", "valid_seen", "--env", "household"): "--split cannot be 'valid_seen' with household",
    ("expert", "--env", "atari"): "there is no environment 'atari'",
    ("expert", "--episodes", "0"): "--episodes must be 1 or more",
    ("expert", "--tasks", "-1"): "--tasks must be 1 or more, or 0 for all",
    ("expert", "--model", "gpt"): "are for an endpoint",
    ("expert", "--out", "/dev/null/x.json"): "--out: /dev/null/x.json cannot be written",
    ("expert", "--set", "rollout.max_turn=3"): "unknown setting rollout.max_turn; did you mean rollout.max_turns?",
    ("expert", "--config", "no-such"): "'no-such' is neither a preset nor a file",
    ("expert", "--env", "pool_games:none"): "has no none",
    ("tiny-xs", "--env", "lookup", "--temperature", "-1"): "eval.temperature must be 0 or more",
    ("no-such-model", "--env", "lookup"): "is no folder and no built-in model",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_sentence_and_exit_code_2(spear, arguments):
    code, text = spear("eval", *arguments)
    assert code == 2, text
    assert MISTAKES[arguments] in text
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1


def test_the_own_split_names_of_an_environment_are_understood(spear, tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    (tmp_path / "json_2.1.1").mkdir()
    code, text = spear("eval", "expert", "--env", "alfworld", "--split", "valid_unseen")
    assert code == 2
    assert "has no split valid_unseen" in text, "the name went through, and these games are not there"


def test_a_policy_that_an_environment_cannot_have_is_named(spear, tmp_path, monkeypatch):
    (tmp_path / "silent_game.py").write_text(
        "from functools import partial\n"
        "from spear_rl.rollout import Task\n"
        "from test_eval import Silent\n"
        "def tasks(split): return [Task(f'silent/{split}', Silent)]\n"
    )
    monkeypatch.chdir(tmp_path)
    code, text = spear("eval", "expert", "--env", "silent_game:tasks")
    assert (code, "task silent/validation has no expert" in text) == (2, True)
    code, text = spear("eval", "random", "--env", "silent_game:tasks")
    assert (code, "does not list its possible actions" in text) == (2, True)


class Silent:
    """Lists no possible action; a word wins."""

    def reset(self) -> Observation:
        return Observation("?")

    def step(self, action: str) -> StepResult:
        return StepResult(Observation("!"), reward=1.0, done=True)

    def close(self) -> None:
        pass


class Shaky(LookupEnv):
    """Breaks when told to look."""

    def step(self, action: str) -> StepResult:
        if action == "look":
            raise OSError("the light went out")
        return super().step(action)


def shaky_tasks(split: str) -> list[Task]:
    """One of the two never plays to the end."""
    demonstration = {"whole": ["1"], "broken": ["look", "1"]}
    return [
        Task(f"shaky/{name}", partial(Shaky, "red", "1"), demonstrate=partial(_said, actions))
        for name, actions in demonstration.items()
    ]


def _said(actions: list[str], seed: int) -> list[str]:
    return actions


def test_failed_episodes_are_left_out_counted_and_shown(spear, result_of):
    result = result_of("expert", "--env", "test_eval:shaky_tasks")
    assert (result["episodes"], result["failed_episodes"], result["success"]) == (1, 1, 1.0)
    assert result["solved"] == {"shaky/whole": 1.0}
    assert result["tasks"] == ["shaky/whole", "shaky/broken"]
    assert "episodes that failed and do not count: 1" in spear("eval", "expert", "--env", "test_eval:shaky_tasks")[1]


def test_a_terminal_sees_a_line_of_progress_and_a_file_does_not(spear, monkeypatch):
    quiet = spear("eval", "expert", "--env", "lookup")[1]
    assert "solved" not in quiet
    assert "\x1b" not in quiet
    monkeypatch.setattr(cli.look, "console", Console(force_terminal=True))
    assert "16/16" in spear("eval", "expert", "--env", "lookup")[1]


def test_reference_policies_need_neither_torch_nor_transformers():
    block = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'tokenizers', 'jinja2']))"
    command = "sys.argv = ['spear', 'eval', 'random', '--env', 'lookup']; from spear_rl.cli import main; main()"
    code = f"{block}; {command}"
    result = subprocess.run([sys.executable, "-c", code], env=os.environ, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_messages_are_kept_as_they_were_said():
    renderer = MessageRenderer()
    first = renderer.prompt([{"role": "user", "content": "code ?"}])
    longer = renderer.extended(first, renderer.answer(" look "), "code ?")
    assert renderer.messages(longer) == [
        {"role": "user", "content": "code ?"},
        {"role": "assistant", "content": " look "},
        {"role": "user", "content": "code ?"},
    ]
    assert longer == [0, 1, 0]
    assert renderer.parse(renderer.answer(" look ")) == "look"
    assert renderer.messages(renderer.prompt([{"role": "assistant", "content": "code ?"}]))[0]["role"] == "assistant"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reference_policy_plays_the_same_whatever_the_prompt_looks_like(layout):
    from spear_rl.envs.household import tasks

    renderer, watched = MessageRenderer(), ProgressRunner(InProcess())
    [group] = collect_groups(
        tasks("test", level="starter")[:1],
        group_size=3,
        generator=ReferencePolicy(REFERENCES["random"], watched, renderer, seed=0),
        renderer=renderer,
        max_turns=5,
        step=0,
        layout=LAYOUTS[layout],
        envs=watched,
    )
    said = [[turn.text for turn in trajectory.turns] for trajectory in group.trajectories]
    assert len({tuple(texts) for texts in said}) == 3, "every episode has dice of its own"
    assert all(text.startswith("<action>") for texts in said for text in texts)
    assert not any(turn.invalid for trajectory in group.trajectories for turn in trajectory.turns)
    roles = [message["role"] for message in renderer.messages(group.trajectories[0].turns[-1].prompt_ids)]
    assert roles == (["user", "assistant"] * 4 + ["user"] if layout == "chat" else ["user"])


def test_an_episode_whose_policy_is_lost_has_failed_and_the_tally_says_so():
    tallies = []
    watched = ProgressRunner(InProcess(), num_episodes=2, notice=lambda tally: tallies.append(vars(tally).copy()))
    for key in (0, 1):
        watched.open(key, Task(f"lookup/{key}", partial(LookupEnv, "red", "7")))
    assert [key for key, _ in watched.answers(2)] == [0, 1]
    watched.fail(0, TimeoutError("no answer"))
    watched.step(0, "7")
    watched.step(1, "7")
    assert len(watched) == 2
    (_, lost), (_, won) = watched.answers(2)
    assert isinstance(lost, Failure)
    assert won.success
    for key in (0, 1, 0, 1):
        watched.close(key)
    assert tallies[-1] == {"num_episodes": 2, "num_ended": 2, "num_solved": 1, "num_failed": 1, "num_turns": 1}


def panel_of(solved: list[int], played: int, families: list[str] | None = None):
    from spear_rl.types import Group, Stop, Trajectory

    won, lost = Trajectory([], Stop.DONE, success=True), Trajectory([], Stop.MAX_TURNS)
    names = families or [""] * len(solved)
    return [
        Group(str(number), [won] * count + [lost] * (played - count), info={"family": family})
        for number, (count, family) in enumerate(zip(solved, names, strict=True))
    ]


def test_more_samples_of_tasks_that_are_always_or_never_solved_make_no_interval_narrower():
    """Samples of one task are not independent: sixteen tasks stay sixteen trials."""
    once = evaluation(panel_of([1] * 6 + [0] * 10, 1))
    often = evaluation(panel_of([32] * 6 + [0] * 10, 32), k=32)
    assert (often.success, often.episodes) == (once.success, 512)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    assert often.samples["mean@32"]["low"] == pytest.approx(once.low)
    assert (once.low, once.high) == wilson_interval(6, 16)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_lies_between_that_of_the_tasks_and_that_of_the_episodes(seed):
    rng = random.Random(seed)
    solved = [rng.randint(0, 8) for _ in range(20)]
    result = evaluation(panel_of(solved, 8), k=8)
    rate = sum(solved) / 160
    tasks, episodes = wilson_interval(rate * 20, 20), wilson_interval(rate * 160, 160)
    assert tasks[0] < result.low < episodes[0] < rate < episodes[1] < result.high < tasks[1]
    assert result.samples["mean@8"]["rate"] == pytest.approx(rate)
    assert result.samples["pass@8"]["rate"] == sum(count > 0 for count in solved) / 20


def test_every_benchmark_of_a_panel_has_its_own_rates():
    groups = panel_of([4, 0, 2, 1], 4, ["aime24", "aime24", "aime25", "aime25"])
    result = evaluation(groups, k=4)
    assert {name: (rate["success"], rate["pass@4"]) for name, rate in result.by_family.items()} == {
        "aime24": (0.5, 0.5),
        "aime25": (0.375, 1.0),
    }
    assert "samples" in result.as_dict()
    assert "samples" not in evaluation(groups).as_dict()


@pytest.mark.parametrize(("num_tasks", "sizes"), [(3, [2, 2, 2, 1]), (8, [1] * 7), (1, [6, 1])])
def test_samples_are_played_together_up_to_the_episodes_of_a_training_step(
    spear, tmp_path, monkeypatch, num_tasks, sizes
):
    from spear_rl.app.build.rollout import Player

    plain, rounds = Player.groups, []

    def noted(self, tasks, generator, *, group_size, **settings):
        rounds.append(group_size)
        return plain(self, tasks, generator, group_size=group_size, **settings)

    monkeypatch.setattr(Player, "groups", noted)
    run, small = tmp_path / "run", ["run.steps=1", "rollout.num_tasks=2", "rollout.group_size=3", "sft.episodes=0"]
    code, text = spear("train", "lookup", f"run.dir={run}", *small, f"eval.tasks={num_tasks}", "eval.samples=7")
    assert code == 0, text
    assert rounds == sizes * 2
    for line in (run / "eval.jsonl").read_text().splitlines():
        assert json.loads(line)["episodes"] == 7 * num_tasks


def test_a_run_evaluates_every_task_as_often_as_eval_samples_says_and_so_does_spear_eval(spear, result_of, tmp_path):
    small = ["run.steps=1", "sft.episodes=0", "eval.tasks=3", "rollout.num_tasks=1", "rollout.group_size=2"]
    run = tmp_path / "run"
    code, text = spear("train", "lookup", f"run.dir={run}", *small, "eval.samples=4", "eval.top_p=0.7")
    assert code == 0, text
    last = logged(run, "eval.jsonl")[-1]
    assert (last["episodes"], len(last["solved"])) == (12, 3)
    assert set(last["samples"]) == {"mean@4", "pass@1", "pass@2", "pass@4"}
    assert last["samples"]["mean@4"]["rate"] == pytest.approx(last["success"])
    again = result_of(run, "--tasks", 3)
    assert (again["episodes"], again["k"], again["top_p"]) == (12, 4, 0.7)
    assert again["solved"] == last["solved"]
    once = result_of(run, "--tasks", 3, "--samples", 1, "--top-p", 0.5)
    assert (once["episodes"], once["top_p"]) == (3, 0.5)
    assert result_of("random", "--config", "lookup", "--set", "eval.samples=2", "--tasks", 3)["episodes"] == 6
    assert "k" not in result_of("random", "--config", "lookup", "--set", "eval.samples=2", "--episodes", 3)


def test_a_run_evaluates_on_further_splits_and_reports_them_by_name(spear, tmp_path):
    small = ["run.steps=4", "eval.every=2", "sft.episodes=40", "sft.epochs=1", "rollout.num_tasks=2", "eval.tasks=6"]
    alone, both = tmp_path / "alone", tmp_path / "both"
    code, text = spear("train", "lookup", f"run.dir={alone}", *small, "run.threads=1")
    assert code == 0, text
    code, text = spear("train", "lookup", f"run.dir={both}", *small, "run.threads=1", 'eval.also=["test", "train"]')
    assert code == 0, text
    rows = logged(both, "eval.jsonl")
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert [{k: v for k, v in row.items() if k != "also"} for row in rows] == logged(alone, "eval.jsonl")
    assert logged(both) == logged(alone)  # training is the same
    for row in rows:
        assert list(row["also"]) == ["test", "train"]
        for split, rate in row["also"].items():
            assert rate["episodes"] == 6
            assert rate["low"] <= rate["success"] <= rate["high"]
            assert f"{split} success {rate['success']:.1%} ({rate['low']:.1%} to {rate['high']:.1%})" in text
            path = both / "evaluations" / f"also_{split}_step_{row['step']:06d}.jsonl"
            episodes = [json.loads(line) for line in path.read_text().splitlines()]
            assert [(e["split"], e["step"]) for e in episodes] == [(split, row["step"])] * 6
            assert sum(e["success"] for e in episodes) / 6 == pytest.approx(rate["success"])
    summary = json.loads((both / "summary.json").read_text())
    assert summary["also_after"] == rows[-1]["also"]
    assert "also_after" not in json.loads((alone / "summary.json").read_text())
    code, text = spear("show", both, "--split", "test", "--step", "2")
    assert code == 0
    assert "step 2" in text
    assert [path.name for path in both.glob("evaluations/*_step_000004.jsonl")]
    code, text = spear("train", f"run.dir={both}", "run.resume=true", "run.steps=6", "eval.also=[]", "eval.every=0")
    assert code == 0, text
    assert "also" not in logged(both, "eval.jsonl")[-1]


def test_a_split_is_not_evaluated_twice_nor_one_that_the_environment_lacks(spear, tmp_path):
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", 'eval.also=["validation"]')
    assert (code, "eval.also: validation is evaluated already" in text) == (2, True)
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", 'eval.also=["valid_seen"]')
    assert (code, "eval.also cannot be 'valid_seen' with lookup" in text) == (2, True)
    assert not (tmp_path / "run").exists()


def test_evaluations_sample_with_their_own_top_p_or_with_that_of_training():
    from spear_rl.app.build.rollout import eval_sampling_of, sampling_of
    from spear_rl.app.config import load

    own = load(None, ["eval.top_p=0.6", "rollout.top_p=0.9", "eval.temperature=0.7"])
    assert (sampling_of(own).top_p, eval_sampling_of(own).top_p, eval_sampling_of(own).temperature) == (0.9, 0.6, 0.7)
    assert eval_sampling_of(load(None, ["rollout.top_p=0.9"])).top_p == 0.9


def test_rounds_of_the_same_tasks_become_one_group_a_task():
    from spear_rl.types import Group, Stop, Trajectory

    won, lost = Trajectory([], Stop.DONE, success=True), Trajectory([], Stop.MAX_TURNS)
    groups = merged([[Group("a", [won]), Group("b", [], num_failed=1)], [Group("a", [lost]), Group("b", [won])]])
    result = evaluation(groups)
    assert (result.episodes, result.failed_episodes, result.solved) == (3, 1, {"a": 0.5, "b": 1.0})
    assert result.stops == {"done": 2, "max_turns": 1}
