"""The plans in experiments/: every cell's settings are valid, and its arms differ only in what the plan is about."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from spear_rl.app.config import Config, flat, load

FOLDER = Path(__file__).parents[1] / "experiments"
PLANS = sorted(FOLDER.glob("*.toml"))
MORE_UPDATES = {"base_twice": ("optim.epochs", 2)}
"""Controls, and the one setting in which each differs from the base."""


def read(plan: Path) -> dict[str, Any]:
    return tomllib.loads(plan.read_text("utf-8"))


def joined(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Tables as one; of two values the later one."""
    whole: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            whole[key] = joined(whole.get(key, {}), value) if isinstance(value, Mapping) else value
    return whole


def cells(plan: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, Config]]:
    """Block, arm and settings, in the order of precedence of the format."""
    axes = plan.get("blocks", {})
    for block in product(*axes.values()):
        choices = [axes[axis][choice] for axis, choice in zip(axes, block, strict=True)]
        for arm, table in plan["arms"].items():
            budget = {"run": {"steps": plan["budget"]["steps"]} if "budget" in plan else {}}
            settings = joined(plan.get("settings", {}), budget, *choices, table)
            preset = settings.pop("preset", plan.get("preset"))
            yield block, arm, load(preset, block=settings)


@pytest.fixture(params=PLANS, ids=lambda path: path.stem)
def plan(request: pytest.FixtureRequest) -> dict[str, Any]:
    return read(request.param)


def test_there_are_the_three_plans():
    assert {path.stem for path in PLANS} >= {"cpu_tasks", "ablations", "alfworld_smollm2"}


def test_arms_play_as_many_episodes_and_take_as_many_optimizer_steps_as_the_reference(plan):
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for block, arm, config in cells(plan):
        found.setdefault(block, {})[arm] = flat(config)
        assert config.algorithm.imitation.update == "joint", "replayed rows would take optimizer steps of their own"
        assert config.algorithm.name.startswith("spear-"), "a base is SPEAR with its parts off"
    for arms in found.values():
        reference = arms[plan["reference"]]
        for arm, settings in arms.items():
            control = MORE_UPDATES.get(arm, ("", None))[0]
            different = {key for key in settings if settings[key] != reference[key]}
            parts = ("algorithm.bonus.", "algorithm.imitation.", "algorithm.covariance.", "algorithm.entropy_floor")
            parts += ("rollout.return_", "rollout.restart_")  # other tasks, as many episodes
            parts += ("rollout.layout",) if "transcript" in plan["arms"] else ()  # other prompts
            assert {key for key in different if not key.startswith(parts)} == ({control} if control else set()), arm
            assert different or arm == plan["reference"], f"{arm} is {plan['reference']} again"


def test_a_control_is_the_base_in_all_but_its_own_setting():
    by_cell = {(block, arm): flat(config) for block, arm, config in cells(read(FOLDER / "cpu_tasks.toml"))}
    for (block, arm), settings in by_cell.items():
        if arm in MORE_UPDATES:
            key, value = MORE_UPDATES[arm]
            base = by_cell[block, "base"]
            assert {k for k in settings if settings[k] != base[k]} == {key}
            assert settings[key] == value


def test_the_base_has_no_part_of_spear_and_bonus_and_imitation_have_one_each(plan):
    expected = {"base": (False, False), "bonus": (True, False), "imitation": (False, True), "paper": (True, True)}
    for _, arm, config in cells(plan):
        has = config.algorithm.bonus.mode != "none", config.algorithm.imitation.enabled
        assert has == expected.get(arm, has), arm


def test_the_papers_arm_has_the_papers_curricula_over_the_run_and_its_own_rules(plan):
    for _, arm, config in cells(plan):
        bonus, imitation, steps = config.algorithm.bonus, config.algorithm.imitation, config.run.steps
        if arm == "paper":
            assert (bonus.mode, bonus.steps, bonus.count) == ("cosine", steps, "turns")
            assert (imitation.weight, imitation.warm_steps) == (1.0, steps // 2)
            assert (imitation.percentile, imitation.gate, imitation.max_age) == (50.0, "both", 5)
            assert (imitation.admit_by_score, imitation.scale_by_rows, imitation.skip_invalid) == (True, False, False)
            assert (imitation.per_family, imitation.require_tool, imitation.reweight) == (False, False, None)
            assert (imitation.schedule, imitation.baseline, imitation.priority) == ("steps", "percentile", [])
            assert (imitation.keep_step_part, config.algorithm.entropy_floor) == (False, 0)
            assert config.algorithm.covariance.replay == "clip"


def test_ours_on_alfworld_is_the_preset():
    plan, preset = read(FOLDER / "alfworld_smollm2.toml"), flat(load("alfworld-smollm2"))
    chosen = {f"algorithm.imitation.{k}": v for k, v in plan["arms"]["ours"]["algorithm"]["imitation"].items()}
    assert chosen | {"algorithm.entropy_floor": 0.06} == {k: preset[k] for k in [*chosen, "algorithm.entropy_floor"]}


def test_every_cell_is_evaluated_four_to_six_times_after_the_start(plan):
    for _, _, config in cells(plan):
        assert config.run.steps % config.eval.every == 0
        assert 4 <= config.run.steps // config.eval.every <= 6


def test_the_cpu_plan_crosses_five_tasks_with_four_bases_and_six_arms():
    plan = read(FOLDER / "cpu_tasks.toml")
    assert [len(choices) for choices in plan["blocks"].values()] == [5, 4]
    assert {"base", "bonus", "imitation", "paper", "ours", "base_twice"} == set(plan["arms"])
    assert not set(plan["seeds"]) & {900, 901, 902}, "the tasks were sized on these"
    assert not set(plan["seeds"]) & set(read(FOLDER / "cpu_tuning.toml")["seeds"]), "values were chosen on these"


def test_the_tasks_of_the_ablations_are_those_of_the_cpu_plan():
    whole, part = read(FOLDER / "cpu_tasks.toml"), read(FOLDER / "ablations.toml")
    assert len(part["blocks"]["task"]) == 2
    for name, task in part["blocks"]["task"].items():
        assert task == whole["blocks"]["task"][name]
