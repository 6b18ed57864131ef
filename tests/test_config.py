"""The configuration: typed, checked, documented, and the same after a round trip."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from spear_rl.algorithms import (
    ALGORITHMS,
    BASES,
    Algorithm,
    Bonus,
    ClippedSurrogate,
    CovarianceClip,
    FixedLength,
    FlatGroups,
    GiGPO,
    Overlong,
    Repetitive,
    SelfImitation,
    distinct_tool_bonus,
)
from spear_rl.app import config as configuration
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import Config, documentation, load, presets, sections, to_toml, update
from spear_rl.errors import ConfigError
from spear_rl.functional import constant, cosine
from spear_rl.replay import ReplayBuffer, RewardHistory


@pytest.mark.parametrize("name", [None, *presets()])
def test_a_config_survives_the_round_trip_through_toml(name, tmp_path):
    config = load(name)
    path = tmp_path / "config.toml"
    for comments in (False, True):
        path.write_text(to_toml(config, comments=comments))
        assert load(str(path)) == config


def test_every_field_has_its_meaning_written_under_it():
    for path, section in sections(Config()):
        for name, text in documentation(type(section)).items():
            assert text or is_dataclass(getattr(section, name)), f"{path}.{name} has no description"


def test_there_are_fewer_than_150_fields():
    count = sum(
        not is_dataclass(getattr(section, f.name)) for _, section in sections(Config()) for f in fields(section)
    )
    assert count < 150


def test_the_config_knows_every_algorithm():
    assert set(ALGORITHMS) == set(BASES) | {f"spear-{name}" for name in BASES}
    for name in ALGORITHMS:
        assert load(None, [f"algorithm.name={name}"]).algorithm.name == name


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_named_algorithm_with_default_settings_is_the_librarys(name):
    """What depends on the run is said: the schedules' steps and the longest row."""
    run = ["run.steps=200", "algorithm.max_length=1024"]
    assert algorithm_of(load(None, [f"algorithm.name={name}", *run])) == ALGORITHMS[name]()


def test_every_switch_reaches_the_algorithm():
    settings = """
        name=spear-dr-bot-gigpo clip_low=0.11 clip_high=0.33 dual_clip=5 entropy_bonus=0.01 kl=0.02 max_length=77
        divide_by_std=true discount=0.5 step_weight=0.7 invalid_penalty=0.3 format_bonus=0.4 keep_groups=0.5
        bonus.mode=constant bonus.count=distinct imitation.weight=0.6 imitation.warm_steps=10 imitation.fraction=0.9
        imitation.schedule=steps imitation.baseline=percentile
        imitation.capacity=12 imitation.max_age=3 imitation.history=44 imitation.percentile=25 imitation.per_family=true
        imitation.draw=when_full imitation.gate=new imitation.update=separate imitation.reweight=0.2
        imitation.require_tool=true imitation.age_decay=0.8 imitation.keep_step_part=true covariance.fraction=0.05
        imitation.skip_invalid=false imitation.scale_by_rows=false imitation.unit=turns imitation.divide_by_std=false
        covariance.joint_means=true anchor=text filters.void=false filters.unreadable=false
        covariance.low=3 covariance.high=30 covariance.on_policy=kl
    """
    algorithm = algorithm_of(load(None, [f"algorithm.{setting}" for setting in settings.split()]))
    clip = CovarianceClip(kind="kl", fraction=0.05, low=3, high=30)
    loss = ClippedSurrogate(
        clip_low=0.11, clip_high=0.33, dual_clip=5.0, entropy_bonus=0.01, kl=0.02, reduction=FixedLength(77)
    )
    advantages = GiGPO(divide_by_std=True, discount=0.5, step_weight=0.7, anchor="text")
    assert algorithm == Algorithm(
        bonus=Bonus(of=distinct_tool_bonus, weight=constant(1.0)),
        invalid_penalty=0.3,
        format_bonus=0.4,
        filters=(Overlong(), Repetitive(), FlatGroups(keep=0.5)),
        advantages=advantages,
        loss=replace(loss, covariance=clip),
        imitation=SelfImitation(
            buffer=ReplayBuffer(capacity=24, max_age=3),
            history=RewardHistory(size=44),
            loss=replace(loss, entropy_bonus=0.0, covariance=replace(clip, kind="clip", joint_means=True)),
            weight=cosine(0.0, 0.6, 10),
            fraction=0.9,
            draw_when="when_full",
            full_size=12,
            unit="turns",
            divide_by_std=False,
            gate="new",
            percentile=25.0,
            reweight=0.2,
            admission=replace(advantages, step_weight=0.0),
            skip_invalid=False,
            scale_by_rows=False,
            require_tool=True,
            age_decay=0.8,
            update="separate",
            step_parts=replace(advantages, episode_weight=0.0),
            families={},
        ),
    )
    assert algorithm_of(load(None, ["algorithm.imitation.admit_by_score=true"])).imitation.admission is None
    for name, divides in (("spear-grpo", True), ("spear-gigpo", True), ("spear-dr-grpo", False)):
        assert algorithm_of(load(None, [f"algorithm.name={name}"])).imitation.divide_by_std == divides
    assert {name: load(name).algorithm.imitation.unit for name in presets() if name.startswith("paper-")} == {
        "paper-alfworld": "turns",
        "paper-math": "episodes",  # a row of the authors' is a whole trajectory there
        "paper-sokoban": "turns",
        "paper-webshop": "turns",
    }


def test_the_papers_values_are_in_its_preset():
    config = load("paper-alfworld")
    assert (config.rollout.num_tasks, config.rollout.group_size, config.rollout.max_turns, config.run.steps) == (
        32,
        8,
        50,
        200,
    )
    assert (config.algorithm.bonus.steps, config.algorithm.imitation.warm_steps) == (200, 100)
    imitation, covariance = config.algorithm.imitation, config.algorithm.covariance
    assert (imitation.capacity, imitation.history, imitation.max_age, imitation.percentile) == (2048, 10240, 5, 50.0)
    assert (covariance.fraction, covariance.low, covariance.high) == (0.02, 2.0, 60.0)
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (config.algorithm.entropy_bonus, config.eval.temperature) == (0.001, 0.4)


def test_every_row_of_the_paper_index_says_what_the_presets_hold():
    text = (Path(__file__).parents[1] / "docs" / "paper_index.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    named = [row for row in rows if len(row) == 6 and re.fullmatch(r"`[a-z_.]+`", row[1])]
    assert len(named) > 30
    for _, key, *values, _ in named:
        for preset, shown in zip(("paper-alfworld", "paper-webshop", "paper-math"), values, strict=True):
            value = configuration.value_of(load(preset), key.strip("`"))
            written = "unset" if value is None else str(value).lower() if isinstance(value, bool) else value
            assert (float(shown) if isinstance(value, float) else shown) == (
                written if isinstance(value, float) else str(written)
            ), (preset, key)


def test_paper_math_is_evaluated_on_both_aime_sets_with_32_samples_each():
    config = load("paper-math")
    assert config.task.options["test_data"] == "aime24,aime25"
    assert (config.eval.split, config.eval.tasks, config.eval.samples, config.eval.top_p) == ("test", 60, 32, 0.6)
    assert "household" not in presets()["paper-alfworld"]


def test_schedules_that_depend_on_the_run_are_resolved_once():
    config = load(None, ["run.steps=80"])
    assert (config.algorithm.bonus.steps, config.algorithm.imitation.warm_steps) == (80, 40)
    assert config.algorithm.max_length == config.rollout.max_new_tokens * config.rollout.max_turns
    longer = replace(config, run=replace(config.run, steps=200))
    assert configuration.resolved(longer).algorithm.bonus.steps == 80


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.clip_low=low", "algorithm.clip_low takes a number"),
        ("run.resume=3", "run.resume takes true, false or auto; got 3"),
        ("run.resume=perhaps", "run.resume takes true, false or auto; got 'perhaps'"),
        ("rollout.stop=x", "rollout.stop takes a list"),
        ("task.options=3", "task.options takes keys of its own"),
        ("algorithm.imitation.percentile=101", "must be 0 or more and at most 100 (it is 101.0)"),
        ("rollout.temperature=0", "must be 0.001 or more"),
    ],
)
def test_wrong_values_name_the_field(override, message):
    with pytest.raises(ConfigError) as error:
        load(None, [override])
    assert message in str(error.value)


def test_broken_toml_is_named(tmp_path):
    (tmp_path / "x.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(str(tmp_path / "x.toml"))


def test_a_setting_whose_dots_are_in_quotes_is_told_to_lose_them():
    with pytest.raises(ConfigError) as error:
        update(Config(), {"algorithm.name": "grpo"})
    assert '"algorithm.name" in quotes is one name with a dot in it: write algorithm.name without' in str(error.value)
