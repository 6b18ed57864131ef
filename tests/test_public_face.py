"""What others build on: names that stay, imports that stay light, and a README that tells the truth."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import spear_rl

ROOT = Path(__file__).parent.parent

FACE = {
    "spear_rl.types": ["Turn", "Trajectory", "Group", "Completion", "Stop", "Metrics"],
    "spear_rl.functional": [
        *("group_relative", "gigpo", "recalibrate", "LossInputs", "LossOutput", "clipped_surrogate"),
        *("keep_low_covariance", "token_mean", "fixed_length_mean", "cosine", "constant"),
    ],
    "spear_rl.functional.advantages": ["group_relative", "gigpo", "recalibrate"],
    "spear_rl.functional.losses": [
        *("LossInputs", "LossOutput", "clipped_surrogate", "keep_low_covariance", "token_mean", "fixed_length_mean"),
    ],
    "spear_rl.functional.covariance": ["keep_low_covariance"],
    "spear_rl.functional.schedules": ["cosine", "constant"],
    "spear_rl.replay": ["ReplayBuffer", "RewardHistory"],
    "spear_rl.replay.buffer": ["ReplayBuffer", "RewardHistory"],
    "spear_rl.algorithms": ["ALGORITHMS", "Algorithm", "grpo", "dr_grpo", "rloo", "gigpo", "ppo", "dr_bot", "spear"],
    "spear_rl.algorithms.base": ["Algorithm"],
    "spear_rl.rollout": ["Environment", "Task", "Observation", "StepResult", "collect_groups"],
    "spear_rl.rollout.env": ["Environment", "Task", "Observation", "StepResult"],
    "spear_rl.engines.base": ["Engine", "Batch", "Term"],
    "spear_rl.train.step": ["train_step"],
    "spear_rl.envs": ["ENVIRONMENTS"],
    "spear_rl.train.trackers": ["TRACKERS"],
    "spear_rl.app.config": ["Config"],
    "spear_rl.app.train": ["train_from", "sft_from"],
}


@pytest.mark.parametrize("module", FACE)
def test_the_public_names_are_where_they_were(module):
    found = importlib.import_module(module)
    missing = [name for name in FACE[module] if not hasattr(found, name)]
    assert not missing


@pytest.mark.parametrize("name", sorted({name for names in FACE.values() for name in names} - {"gigpo"}))
def test_the_public_names_can_be_taken_from_the_package_itself(name):
    assert getattr(spear_rl, name) is not None


def test_every_file_the_documents_point_to_exists():
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
            assert (document.parent / target).exists(), f"{document.name} points to {target}"


def test_every_function_in_the_paper_index_exists():
    text = (ROOT / "docs" / "paper_index.md").read_text("utf-8")
    for name in re.findall(r"`((?:functional|algorithms|replay)\.\w+)", text):
        module, attribute = name.split(".")
        assert hasattr(importlib.import_module(f"spear_rl.{module}"), attribute), name


def test_every_config_field_in_the_documents_exists():
    from spear_rl.app.config import Config, value_of

    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for key in re.findall(
            r"\b((?:algorithm|rollout|optim|engine|run|eval|sft)\.[a-z_.]+[a-z])=", document.read_text("utf-8")
        ):
            value_of(Config(), key)
