"""A package of somebody else's: its environment, algorithm, tracker and model by name, together in one run."""

from __future__ import annotations

import pytest

from conftest import logged
from outside_package import environment
from spear_rl.testing import check_tasks

OUTSIDE = "outside_package"
PARTS = [
    f"task.env={OUTSIDE}.environment:tasks",
    f"engine.model={OUTSIDE}.model:make",
    f'run.trackers=["jsonl","{OUTSIDE}.trackers:recording"]',
]
SMALL = [
    *("run.steps=3", "run.threads=1", "eval.tasks=5", "sft.episodes=60", "sft.epochs=3", "sft.learning_rate=3e-3"),
    *("sft.batch_size=4", "rollout.num_tasks=5", "rollout.group_size=8", "rollout.max_turns=3", "rollout.detail=short"),
    *("rollout.max_new_tokens=4", "optim.learning_rate=1e-3", "algorithm.imitation.warm_steps=1"),
]


def test_the_outside_environment_passes_the_checks_for_authors():
    assert check_tasks(environment.tasks) == []


@pytest.mark.parametrize(
    ("wrappers", "base", "off"),
    [
        ("", "plain", []),
        ("spear-", "plain", ["algorithm.covariance.replay=none"]),
        ("dr-bot-", "record", []),
        ("spear-dr-bot-", "record", []),
    ],
)
def test_environment_algorithm_tracker_and_model_of_an_outside_package_train_together(
    spear, tmp_path, wrappers, base, off
):
    run = tmp_path / "run"
    name = f"algorithm.name={wrappers}{OUTSIDE}.algorithms:{base}"
    code, text = spear("train", *PARTS, *SMALL, name, *off, f"run.dir={run}")
    assert code == 0, text
    rows = logged(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert any(row["rollout/tool_turns"] > 0 for row in rows)
    assert all(("replay/buffer_size" in row) == wrappers.startswith("spear-") for row in rows)
    tracked = (run / "mine.txt").read_text().splitlines()
    assert [line.split()[:2] for line in tracked if line.startswith("step ")] == [["step", str(n)] for n in range(3)]


def test_a_wrapper_that_cannot_wrap_the_outside_algorithm_says_so_in_one_sentence(spear, tmp_path):
    run = tmp_path / "run"
    code, text = spear("train", *PARTS, *SMALL, f"algorithm.name=dr-bot-{OUTSIDE}.algorithms:plain", f"run.dir={run}")
    assert code == 2
    assert "dr_bot sets divide_by_std" in text
    assert "Traceback" not in text
    assert not run.exists()
