"""Algorithms as data: they print, compare and change by `replace`; wrappers wrap or refuse; one name, one algorithm."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import statistics
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import outside_package.algorithms as outside
from references import episode, group, loss_inputs, random_tokens, turn
from spear_rl import algorithms, functional, replay
from spear_rl.algorithms import (
    ALGORITHMS,
    OURS,
    Algorithm,
    ByEntropy,
    BySuccess,
    ClippedSurrogate,
    CovarianceClip,
    FixedLength,
    GroupRelative,
    SelfImitation,
    SequenceMean,
    SettingError,
    TokenMean,
    dr_bot,
    dr_grpo,
    gigpo,
    grpo,
    named,
    rloo,
    spear,
    with_settings,
)
from spear_rl.algorithms.base import Remembered
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load, presets
from spear_rl.errors import ConfigError
from spear_rl.functional import clipped_surrogate, constant, cosine, fixed_length_mean, keep_low_covariance
from spear_rl.integrations.verl import launch
from spear_rl.replay import RewardHistory
from spear_rl.settings.names import ALGORITHM_NAMES, BASES, split_name

ROOT = Path(__file__).parent.parent
quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**32 - 1)
SAME_RUN = ["run.steps=200", "algorithm.max_length=1024"]


# -- records ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_an_algorithm_prints_is_all_of_it(name):
    algorithm = ALGORITHMS[name]()
    assert eval(repr(algorithm), vars(functional) | vars(algorithms) | vars(replay)) == algorithm


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_of_one_name_are_equal_and_a_changed_setting_makes_them_differ(name):
    algorithm = ALGORITHMS[name]()
    assert algorithm == ALGORITHMS[name]()
    for changed in (
        dataclasses.replace(algorithm, invalid_penalty=0.25),
        with_settings(algorithm, clip_low=0.05),
        with_settings(algorithm, covariance=CovarianceClip(low=0.5)),
        with_settings(algorithm, reduction=FixedLength(7)),
    ):
        assert changed != algorithm
        assert repr(changed) != repr(algorithm)


def test_different_names_are_different_algorithms():
    """But for Dr.BoT over Dr. GRPO, which is Dr.BoT over GRPO: the first has no std left to take away."""
    made = [(name, ALGORITHMS[name]()) for name in ALGORITHMS if "dr-bot-dr-grpo" not in name]
    for index, (_, one) in enumerate(made):
        assert all(one != other for _, other in made[index + 1 :])
    assert ALGORITHMS["dr-bot-dr-grpo"]() == ALGORITHMS["dr-bot-grpo"]()


def test_schedules_compare_by_value():
    assert cosine(1, 0, 200) == cosine(1.0, 0.0, 200) != cosine(1, 0, 201)
    assert constant(0.5) == functional.as_schedule(0.5) != constant(0.4)


@quick
@given(seeds, st.floats(0.01, 0.5), st.floats(0.01, 0.5), st.sampled_from([None, 3.0]), st.sampled_from(["clip", "kl"]))
def test_a_loss_record_computes_what_the_functions_compute_to_the_bit(seed, low, high, dual, kind):
    inputs = loss_inputs(random_tokens(seed, log_ratios=(0.0, 0.1), scale=4.0))
    record = ClippedSurrogate(
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
        covariance=CovarianceClip(kind=kind, fraction=0.2, low=0.1, high=9.0, beta=0.7),
        entropy_bonus=0.3,
        kl=0.2,
        reduction=FixedLength(13),
    )
    bounds = {"clip_low": low, "clip_high": high}
    draw = partial(keep_low_covariance, fraction=0.2, low=0.1, high=9.0, **bounds)
    penalty = partial(functional.high_covariance_penalty, fraction=0.2, beta=0.7)
    expected = clipped_surrogate(
        inputs,
        **bounds,
        dual_clip=dual,
        keep=partial(draw, generator=torch.Generator().manual_seed(5)) if kind == "clip" else None,
        penalty=penalty if kind == "kl" else None,
        entropy_bonus=0.3,
        kl_coefficient=0.2,
        reduce=partial(fixed_length_mean, length=13),
    )
    got = record(dataclasses.replace(inputs, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(got.loss, expected.loss)
    assert got.metrics.keys() == expected.metrics.keys()
    assert all(torch.equal(got.metrics[name], expected.metrics[name]) for name in got.metrics)


@quick
@given(seeds)
def test_three_reductions_weigh_tokens_sequences_and_nothing(seed):
    rng = random.Random(seed)
    rows = [[(rng.gauss(0, 1), rng.random() < 0.6) for _ in range(5)] for _ in range(rng.randint(1, 4))]
    values, mask = (torch.tensor([[cell[i] for cell in row] for row in rows]) for i in range(2))
    kept = [[value for value, on in row if on] for row in rows]
    every = [value for row in kept for value in row]
    assert TokenMean()(values, mask).item() == pytest.approx(sum(every) / max(len(every), 1), abs=1e-6)
    means = [sum(row) / max(len(row), 1) for row in kept]
    assert SequenceMean()(values, mask).item() == pytest.approx(statistics.fmean(means), abs=1e-6)
    assert FixedLength(7)(values, mask).item() == pytest.approx(sum(every) / (7 * len(rows)), abs=1e-6)


def test_leave_one_out_does_not_pretend_to_divide_by_a_deviation():
    with pytest.raises(ValueError, match="divide_by_std"):
        GroupRelative(leave_one_out=True)


def test_random_streams_are_state_and_no_part_of_a_comparison():
    one, other = spear(grpo(), seed=1), spear(grpo(), seed=2)
    assert one == other
    assert [stream.initial_seed() for stream in one.generators] == [1]
    assert "Generator" not in repr(one)


def test_no_code_looks_inside_a_partial_or_asks_whether_a_word_is_in_a_name():
    forbidden = re.compile(
        r"\.keywords\b|\.func\b|isinstance\([^()]*,\s*(?:functools\.)?partial\)"
        r"|[\"'](?:gigpo|grpo|rloo|dr-bot|dr-grpo|spear)-?[\"'] (?:not )?in (?!wrappers\b)\S*name"
    )
    sources = [p for p in (ROOT / "src").rglob("*.py") if not {"sandbox", "envs", "rollout"} & set(p.parts)]
    found = [f"{path.name}: {m[0]}" for path in sources for m in forbidden.finditer(path.read_text("utf-8"))]
    assert not found
    assert len(sources) > 60


# -- wrappers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantages", [outside.above_median, lambda groups: [], partial(outside.above_median)])
def test_dr_bot_refuses_advantages_whose_division_it_cannot_switch_off(advantages):
    base = Algorithm(advantages=advantages, loss=ClippedSurrogate())
    with pytest.raises(ValueError, match=r"^dr_bot sets divide_by_std of the advantages, which .* does not have: pass"):
        dr_bot(base)


@pytest.mark.parametrize("loss", [outside.reinforce, clipped_surrogate, partial(clipped_surrogate, clip_low=0.1)])
def test_dr_bot_refuses_a_loss_that_it_cannot_set(loss):
    with pytest.raises(ValueError, match=r"^dr_bot sets clip_low, .* of the loss, which .* ClippedSurrogate\(\)$"):
        dr_bot(Algorithm(advantages=GroupRelative(), loss=loss))


def test_dr_bot_wraps_a_record_from_outside_that_has_the_field():
    base = Algorithm(advantages=outside.AboveMedian(divide_by_std=True), loss=ClippedSurrogate())
    assert dr_bot(base).advantages == outside.AboveMedian(divide_by_std=False)


def test_wrappers_in_the_wrong_order_or_twice_are_refused():
    with pytest.raises(ConfigError, match=r"spear\(dr_bot\(base\)\)"):
        dr_bot(spear(grpo()))
    with pytest.raises(ValueError, match="wrap it once"):
        spear(spear(grpo(), bonus=None), bonus=None)
    with pytest.raises(ValueError, match="bonus of its own"):
        spear(outside.with_bonus())
    assert spear(outside.with_bonus(), bonus=None).bonus == outside.with_bonus().bonus


def test_spear_wraps_any_advantages():
    base = outside.half_plain()
    wrapped = spear(base, imitation=1.0, fraction=1.0)
    assert wrapped.advantages is base.advantages
    played = [group(0.0, 1.0, 3.0)]
    wrapped.imitation.observe(played)
    wrapped.imitation.keep(played, wrapped.advantages(played), 0)
    assert [t.reward for t in wrapped.imitation.draw(0, random.Random(0), num_played=3).trajectories] == [3.0]


def test_spear_over_a_plain_loss_needs_covariance_off_or_a_loss_for_replay():
    base = outside.plain()
    with pytest.raises(SettingError, match=r"outside_package\.algorithms:reinforce has none"):
        spear(base)
    for off in (None, CovarianceClip(kind="none")):
        assert spear(base, covariance=off).imitation.loss is outside.reinforce
    given_loss = ClippedSurrogate(clip_low=0.1)
    assert spear(base, replay_loss=given_loss).imitation.loss == given_loss
    assert spear(base, imitation=None).bonus is not None  # the bonus alone needs nothing of the loss


def test_a_setting_goes_to_the_record_that_has_it_and_is_refused_where_none_has():
    assert with_settings(gigpo(), discount=0.5, kl=0.1, format_bonus=0.2) == dataclasses.replace(
        gigpo(gamma=0.5), loss=ClippedSurrogate(kl=0.1), format_bonus=0.2
    )
    with pytest.raises(SettingError, match=r"^discount: neither its advantages \(GroupRelative\)"):
        with_settings(grpo(), discount=0.5)
    with pytest.raises(SettingError, match="leave_one_out"):
        with_settings(rloo(), divide_by_std=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gate": "bth"}, r"^gate cannot be 'bth'; did you mean both\?"),
        ({"draw_when": "always"}, "^draw_when cannot be 'always'"),
        ({"unit": "turn"}, "^unit cannot be 'turn'"),
        ({"baseline": "median"}, "^baseline cannot be 'median'"),
        ({"update": "later"}, "^update cannot be 'later'"),
        ({"percentile": 101}, "^percentile must be 0 or more and at most 100"),
        ({"percentile": math.nan}, "^percentile must be"),
        ({"fraction": -0.1}, "^fraction must be 0 or more"),
        ({"fraction": "0.5"}, "^fraction takes a number; got '0.5'"),
        ({"age_decay": 1.5}, "^age_decay must be"),
        ({"reweight": -1.0}, "^reweight must be"),
        ({"capacity": 0}, "^capacity must be 1 or more"),
        ({"max_age": -1}, "^max_age must be 0 or more"),
        ({"history_size": 0}, "^size must be 1 or more group means"),
        ({"imitation": -1.0}, "^imitation must be 0 or more"),
        ({"imitation": "1"}, "^imitation takes a number"),
        ({"bonus": math.nan}, "^bonus must be 0 or more"),
        ({"priority": "newest"}, "^priority: there is no 'newest'"),
        ({"priority": ["fresh", "newest"]}, "^priority: there is no 'newest'"),
        ({"max_second_moment": 0.5}, "^max_second_moment must be 1 or more, or 0"),
        ({"covariance": "clip"}, r"^covariance: pass CovarianceClip\(...\) or None, not 'clip'"),
    ],
)
def test_a_value_that_self_imitation_does_not_know_is_one_sentence(options, says):
    with pytest.raises(ValueError, match=says):
        spear(grpo(), **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dr_bot(grpo(), keep_groups=1.5), "^keep must be 0 or more and at most 1"),
        (lambda: dr_bot(grpo(), max_length=0), "^length must be above 0"),
        (lambda: gigpo(gamma=1.5), "^discount must be"),
        (lambda: with_settings(gigpo(), anchor="room"), "anchor cannot be 'room'"),
        (lambda: grpo(clip=-0.1), "^clip_low must be 0 or more"),
        (lambda: with_settings(grpo(), dual_clip=1.0), "dual_clip must be above 1"),
        (lambda: CovarianceClip(kind="cov"), "^kind must be clip, kl or none"),
        (lambda: CovarianceClip(fraction=1.1), "^fraction must be from 0 to 1"),
        (lambda: CovarianceClip(low=40, high=1), "^low must be below high, 1"),
        (lambda: BySuccess(0.0, 1.0, target=0.0), "^target must be above 0"),
        (lambda: ByEntropy(1.0, share=1.5), "^share must be"),
    ],
)
def test_a_value_that_a_record_does_not_know_is_one_sentence(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_scalars_of_numpy_and_torch_are_numbers_and_one_word_is_a_priority():
    odd = spear(grpo(), fraction=numpy.float32(0.5), percentile=torch.tensor(40.0), imitation=numpy.float64(2.0))
    assert odd == spear(grpo(), fraction=0.5, percentile=40.0, imitation=2.0)
    assert spear(grpo(), priority="rare") == spear(grpo(), priority=["rare"])


# -- one name, one algorithm --------------------------------------------------------------------------------------


def test_a_new_base_is_one_line_and_has_every_wrapper():
    assert {base for _, base in map(split_name, ALGORITHM_NAMES)} == set(BASES)
    assert len(ALGORITHM_NAMES) == len(set(ALGORITHM_NAMES)) == 4 * len(BASES)
    assert list(ALGORITHMS) == ALGORITHM_NAMES


def test_names_are_wrappers_in_their_order():
    assert ALGORITHMS["spear-dr-bot-gigpo"]() == spear(dr_bot(gigpo()), **OURS)
    assert ALGORITHMS["dr-grpo"]() == dr_grpo()
    assert named("spear-outside_package.algorithms:record") == spear(outside.record(), **OURS)
    assert named("spear-dr-bot-outside_package.algorithms:record") == spear(dr_bot(outside.record()), **OURS)


def test_a_factorys_keywords_are_its_settings():
    made = ALGORITHMS["spear-dr-bot-grpo"](
        settings={"clip_high": 0.3}, dr_bot_options={"keep_groups": 0.5}, spear_options={"max_age": 9}
    )
    assert made == spear(with_settings(dr_bot(grpo(), keep_groups=0.5), clip_high=0.3), **OURS | {"max_age": 9})


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if "ppo" not in name])
def test_verl_is_given_the_same_algorithm(name):
    config = launch.config_of({"algorithm": {"name": name, "max_length": 1024}, "run": {"steps": 200}})
    algorithm = algorithm_of(config)
    assert algorithm == ALGORITHMS[name]()
    config.engine.model = "some/model"
    keys, actor = launch.verl_settings(config, Path("runs"), {}), "actor_rollout_ref.actor"
    loss = algorithm.loss
    assert (keys[f"{actor}.clip_ratio_low"], keys[f"{actor}.clip_ratio_high"]) == (loss.clip_low, loss.clip_high)
    assert keys[f"{actor}.loss_scale_factor"] == (1024 if loss.reduction == FixedLength(1024) else None)
    assert (keys[f"{actor}.entropy_coeff"], keys[f"{actor}.kl_loss_coef"]) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["plain", "spear-plain"])
def test_verl_refuses_a_loss_that_it_cannot_be_set_to(name):
    full = name.replace("plain", "outside_package.algorithms:plain")
    with pytest.raises(ConfigError, match="verl needs a ClippedSurrogate"):
        launch.config_of({"algorithm": {"name": full, "covariance": {"replay": "none"}}})


@pytest.mark.parametrize("preset", presets())
def test_every_preset_goes_with_every_algorithm_one_switch_apart(preset):
    for name in ALGORITHMS:
        assert algorithm_of(load(preset, [f"algorithm.name={name}"])).loss is not None


# -- a user's own, by name ----------------------------------------------------------------------------------------


def own(name: str, *overrides: str) -> Algorithm:
    wrappers, base = split_name(name)
    full = "".join(f"{wrapper}-" for wrapper in wrappers) + f"outside_package.algorithms:{base}"
    return algorithm_of(load(None, [f"algorithm.name={full}", *SAME_RUN, *overrides]))


def test_an_algorithm_from_outside_keeps_its_own_values_until_a_setting_changes_them():
    assert own("record") == outside.record()
    assert own("plain") == outside.plain()
    changed = own("record", "algorithm.invalid_penalty=0.2", "algorithm.clip_low=0.15", "algorithm.divide_by_std=true")
    assert changed == Algorithm(
        invalid_penalty=0.2,
        advantages=outside.AboveMedian(divide_by_std=True),
        loss=ClippedSurrogate(clip_low=0.15, clip_high=0.25),
    )


def test_wrappers_by_name_wrap_what_is_from_outside_like_ours():
    assert own("spear-record") == spear(outside.record(), **OURS)
    assert own("dr-bot-record") == dr_bot(outside.record())
    assert own("spear-dr-bot-record") == spear(dr_bot(outside.record()), **OURS)
    assert own("spear-half_plain") == spear(outside.half_plain(), **OURS)
    assert own("spear-plain", "algorithm.covariance.replay=none") == spear(outside.plain(), covariance=None, **OURS)


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("dr-bot-plain", [], "dr_bot sets divide_by_std of the advantages"),
        ("spear-dr-bot-half_plain", [], "dr_bot sets divide_by_std of the advantages"),
        ("spear-plain", [], "set algorithm.covariance.replay=none"),
        ("spear-with_bonus", [], "set algorithm.bonus.mode=none"),
        ("plain", ["algorithm.covariance.on_policy=kl"], "algorithm.covariance.on_policy=kl"),
        ("plain", ["algorithm.discount=0.9"], "algorithm.discount=0.9: neither"),
        ("plain", ["algorithm.kl=0.1"], "algorithm.kl=0.1: neither"),
        ("spear-record", ["algorithm.imitation.keep_step_part=true"], "algorithm.imitation.keep_step_part=true: "),
        ("returns_a_loss", [], "returned ClippedSurrogate, not a spear_rl.algorithms.Algorithm"),
        ("raises", [], "calling it raised RuntimeError: no luck today"),
        ("wants_arguments", [], "calling it raised TypeError"),
        ("without_a_loss", [], "the loss of its Algorithm cannot be called"),
        ("no_such_function", [], "has no no_such_function"),
    ],
)
def test_what_cannot_be_wrapped_or_set_is_said_in_one_sentence(name, overrides, sentence):
    with pytest.raises(ConfigError) as error:
        own(name, *overrides)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("algorithm.discount=0.9", "algorithm.discount=0.9: neither its advantages (GroupRelative)"),
        ("algorithm.step_weight=2", "algorithm.step_weight=2.0"),
        ("algorithm.name=no_such_package.at_all:make", "there is no module no_such_package"),
        ("algorithm.name=spear-dr-bot-no_such_package:make", "there is no module no_such_package"),
    ],
)
def test_a_setting_that_the_algorithm_does_not_have_is_refused(override, sentence):
    with pytest.raises(ConfigError) as error:
        algorithm_of(load(None, ["algorithm.name=spear-grpo", override]))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [("spear-drbot-grpo", "spear-dr-bot-grpo"), ("dr-bot-spear-grpo", "spear-grpo"), ("GRPO2", ""), ("spear-", "")],
)
def test_an_unknown_name_is_one_sentence_with_the_nearest_known(name, near):
    with pytest.raises(ConfigError, match=f"^algorithm.name cannot be '{name}'") as error:
        load(None, [f"algorithm.name={name}"])
    assert near in str(error.value)
    assert "package.module:function" in str(error.value)


SMALL = [
    *("lookup", "engine.model=tiny-xs", "run.steps=3", "sft.episodes=16", "sft.epochs=1", "eval.tasks=4"),
    *("rollout.num_tasks=4", "algorithm.imitation.warm_steps=1"),
]


@pytest.mark.parametrize("name", ["plain", "spear-plain", "spear-dr-bot-record"])
def test_an_outside_package_brings_an_algorithm_by_name_and_trains_with_it(spear, tmp_path, name):
    wrappers, base = split_name(name)
    full = "".join(f"{wrapper}-" for wrapper in wrappers) + f"outside_package.algorithms:{base}"
    off = ["algorithm.covariance.replay=none"] if name == "spear-plain" else []
    code, text = spear("train", *SMALL, f"run.dir={tmp_path / 'run'}", f"algorithm.name={full}", *off)
    assert code == 0, text
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    assert ("policy/logprob" in rows[-1]) == (base == "plain")
    assert ("replay/weight" in rows[-1]) == ("spear" in wrappers)
    code, text = spear("train", f"run.dir={tmp_path / 'run'}", "run.resume=true", "run.steps=4")
    assert code == 0, text


def test_a_refused_algorithm_ends_before_anything_is_written(spear, tmp_path):
    name = "algorithm.name=dr-bot-outside_package.algorithms:plain"
    code, text = spear("train", *SMALL, f"run.dir={tmp_path / 'run'}", name)
    assert code == 2
    assert "error: algorithm.name=dr-bot-outside_package.algorithms:plain: dr_bot sets divide_by_std" in text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


# -- what the command line shows ----------------------------------------------------------------------------------


def test_show_algorithm_prints_the_record_field_by_field(spear):
    code, text = spear(
        "show", "algorithm", "spear-dr-bot-gigpo", "algorithm.discount=0.5", "algorithm.bonus.target=0.25"
    )
    assert code == 0
    lines = text.splitlines()
    rows = dict(line.split(None, 1) for line in lines)
    assert rows["algorithm"] == "spear-dr-bot-gigpo"
    assert (rows["advantages"], rows["advantages.discount"], rows["advantages.divide_by_std"]) == (
        "GiGPO",
        "0.5",
        "false",
    )
    assert (rows["loss.clip_high"], rows["loss.covariance"], rows["imitation.loss.covariance.low"]) == (
        "0.28",
        "none",
        "2.0",
    )
    assert (rows["bonus.weight"], rows["bonus.weight.target"], rows["filters.FlatGroups.keep"]) == (
        "BySuccess",
        "0.25",
        "0.75",
    )
    columns = {len(line) - len(line.split(None, 1)[1]) for line in lines}
    assert len(columns) == 1, "aligned"


def test_show_algorithm_takes_a_preset_and_names_functions_by_where_they_are(spear):
    assert re.search(r"imitation\.history\.size +10240", spear("show", "algorithm", "paper-alfworld")[1])
    code, text = spear("show", "algorithm", "outside_package.algorithms:plain")
    assert code == 0
    assert re.search(r"^loss +outside_package\.algorithms:reinforce$", text, re.MULTILINE)


def test_show_says_what_it_does_not_know(spear):
    code, text = spear("show", "algorithm", "gpro")
    assert (code, "did you mean grpo?" in text) == (2, True)
    code, text = spear("show", "quickstart", "grpo")
    assert (code, "spear show algorithm NAME" in text) == (2, True)


# -- the draw -----------------------------------------------------------------------------------------------------


class Counted(RewardHistory):
    sorted_times = 0

    def percentile(self, percent: float) -> float:
        type(self).sorted_times += 1
        return super().percentile(percent)


def stocked(seed: int, *, per_family: bool, history: RewardHistory, **options) -> SelfImitation:
    rng = random.Random(seed)
    options = {"imitation": 1.0, "fraction": 0.5, "baseline_per_family": per_family} | options
    memory = dataclasses.replace(spear(grpo(), **options).imitation, history=history)
    for step in range(3):
        played = [
            group(*(episode(turn(rng.choice([0.0, 0.3, 1.0, 2.5]))) for _ in range(4)), family=rng.choice("abc"))
            for _ in range(5)
        ]
        memory.observe(played)
        memory.keep(played, grpo().advantages(played), step)
    return memory


@pytest.mark.parametrize("gate", ["both", "old", "new"])
def test_the_baseline_is_sorted_once_per_draw(gate):
    memory = stocked(1, per_family=False, history=Counted(50), gate=gate)
    assert len({stored.item.family for stored in memory.buffer.items}) == 3
    Counted.sorted_times = 0
    memory.draw(3, random.Random(0), num_played=20)
    assert Counted.sorted_times == 1


@quick
@given(seeds, st.booleans(), st.sampled_from(["both", "old", "new"]), st.sampled_from([None, 0.5]))
def test_a_draw_is_what_asking_episode_by_episode_gives_to_the_bit(seed, per_family, gate, reweight):
    memory = stocked(seed, per_family=per_family, history=RewardHistory(50), gate=gate, reweight=reweight)

    def today(item: Remembered, reward: float) -> float:
        if reweight is not None:
            return reweight * item.advantage
        window = memory.families[item.family] if per_family else memory.history
        return (reward - window.percentile(50.0)) / (statistics.median(window.stds) + 1e-6)

    stored = [s for s in memory.buffer.items if gate == "old" or today(s.item, s.reward) > 0]
    chosen = random.Random(seed).sample(stored, min(10, len(stored)))
    drawn = memory.draw(2, random.Random(seed), num_played=20)
    assert drawn.turn_advantages == [[today(s.item, s.reward)] for s in chosen]
    assert drawn.trajectories == [s.item.trajectory for s in chosen]
    assert drawn.metrics["replay/eligible"] == len(stored)


# -- the page that says how -------------------------------------------------------------------------------------


def test_the_algorithms_of_the_page_train_as_it_says(spear, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "new_algorithm.md").read_text("utf-8")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
        path = tmp_path / "mid_range.py"
        path.write_text((path.read_text() if number else "") + code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mid_range", raising=False)  # of another test of the same page
    commands = re.findall(r"^spear (.+?)(?: +#.*)?$", page, re.MULTILINE)
    assert sum(command.startswith("train") for command in commands) >= 3
    for number, command in enumerate(commands):
        verb, *words = command.split()
        extra = [*SMALL[1:], f"run.dir={tmp_path / str(number)}"] if verb == "train" else []
        code, text = spear(verb, *words, *extra)
        assert code == (2 if "dr-bot-mid_range:plain" in command else 0), text
    for sentence in re.findall(r"^> (error: .+)$", page, re.MULTILINE):
        assert sentence in spear("show", "algorithm", "dr-bot-mid_range:plain")[1]
