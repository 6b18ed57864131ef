"""Algorithms as records: what wrapping changes and what it does not; self-imitation against a diary kept by hand."""

from __future__ import annotations

import dataclasses
import io
import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import references
from references import Tokens, episode, group, loss_inputs, random_tokens, turn
from spear_rl.algorithms import (
    ALGORITHMS,
    BASES,
    Algorithm,
    Bonus,
    ClippedSurrogate,
    CovarianceClip,
    SelfImitation,
    TokenMean,
    answered_tool_bonus,
    distinct_tool_bonus,
    dr_bot,
    dr_grpo,
    gigpo,
    grpo,
    rloo,
    spear,
    tool_bonus,
    with_covariance_clip,
    with_settings,
)
from spear_rl.algorithms.base import Replay
from spear_rl.functional import LossInputs, clipped_surrogate, constant, cosine
from spear_rl.replay import ReplayBuffer, RewardHistory
from spear_rl.replay.buffer import Running
from spear_rl.types import Group, Stop, Trajectory

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
base_makers = list(BASES.values())


def fields(algorithm: Algorithm) -> dict[str, Any]:
    return {f.name: getattr(algorithm, f.name) for f in dataclasses.fields(Algorithm)}


def expected_loss(tokens: Tokens, *, high: float, dual: float | None = None, length: int | None = None) -> float:
    names = ("logprobs", "old_logprobs", "advantages")
    values = references.each(tokens, references.surrogate, *names, low=0.2, high=high, dual=dual)
    if length is None:
        return references.token_mean(values, tokens)
    return references.fixed_length_mean(values, tokens, length)


# -- records and wrappers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_named_algorithm_builds_and_takes_a_step(name):
    algorithm = ALGORITHMS[name]()
    groups = algorithm.shaped([group(0.0, 1.0), group(episode(turn(1.0, state="a"), turn(state="a")), 2.0)], step=0)
    advantages, dropped = algorithm.advantages(groups), algorithm.dropped(groups)
    assert [len(row) for row in advantages] == [len(row) for row in dropped] == [1, 1, 2, 1]
    assert algorithm.loss(loss_inputs(random_tokens(1))).loss.isfinite()
    assert (algorithm.imitation is not None) == (algorithm.bonus is not None) == name.startswith("spear-")


def test_every_base_has_its_spear():
    assert set(ALGORITHMS) == {*BASES, *(f"spear-{name}" for name in BASES)}


def test_two_algorithms_of_one_name_share_no_memory():
    first, second = ALGORITHMS["spear-grpo"](), ALGORITHMS["spear-grpo"]()
    first.imitation.observe([group(0.0, 1.0)])
    first.imitation.keep([group(0.0, 1.0)], [[-1.0], [1.0]], 0)
    assert len(second.imitation.buffer) == len(second.imitation.history) == 0
    assert first.generators[0] is not second.generators[0]


@pytest.mark.parametrize("make", base_makers)
def test_spear_with_everything_off_is_the_base_itself(make):
    base = make()
    assert fields(spear(base, bonus=None, imitation=None)) == fields(base)


@pytest.mark.parametrize("make", base_makers)
def test_spear_changes_neither_advantages_nor_the_on_policy_loss(make):
    base = make()
    changed = {name for name, value in fields(spear(base)).items() if value != fields(base)[name]}
    assert changed == {"bonus", "imitation"}
    changed = {name for name, value in fields(spear(base, imitation=None)).items() if value != fields(base)[name]}
    assert changed == {"bonus"}
    changed = {name for name, value in fields(spear(base, bonus=None)).items() if value != fields(base)[name]}
    assert changed == {"imitation"}


@quick
@given(references.groups, seeds)
def test_a_spear_computes_what_its_base_computes_to_the_bit(groups, seed):
    inputs = loss_inputs(random_tokens(seed))
    for make in base_makers:
        base = make()
        wrapped = spear(base)
        assert wrapped.advantages(groups) == base.advantages(groups)
        assert wrapped.dropped(groups) == base.dropped(groups)
        assert torch.equal(wrapped.loss(inputs).loss, base.loss(inputs).loss)


def test_the_papers_schedules_are_the_default():
    algorithm = spear(grpo())
    assert [algorithm.bonus.weight(t) for t in (0, 200, 300)] == [1.0, 0.0, 0.0]
    assert algorithm.bonus.weight(100) == pytest.approx(0.5)
    assert [algorithm.imitation.weight(t) for t in (0, 100, 300)] == [0.0, 1.0, 1.0]
    assert algorithm.imitation.weight(50) == pytest.approx(0.5)
    assert algorithm.imitation.buffer.max_age == 5
    assert algorithm.imitation.percentile == 50.0
    assert algorithm.imitation.update == "joint"


def test_a_coefficient_is_a_number_or_a_schedule():
    algorithm = spear(grpo(), bonus=0.3, imitation=cosine(0, 2, 4))
    assert algorithm.bonus.weight(7) == 0.3
    assert algorithm.imitation.weight(4) == 2


@quick
@given(seeds)
def test_plain_bases_clip_symmetrically_and_average_over_tokens_or_as_grpo_over_sequences(seed):
    tokens = random_tokens(seed)
    names = ("logprobs", "old_logprobs", "advantages")
    values = references.each(tokens, references.surrogate, *names, low=0.2, high=0.2, dual=None)
    for base in (dr_grpo(), rloo(), gigpo(), grpo(reduction=TokenMean())):
        got = base.loss(loss_inputs(tokens)).loss.item()
        assert got == pytest.approx(references.token_mean(values, tokens), rel=1e-10, abs=1e-12)
    for loss in (grpo().loss, spear(grpo(), covariance=None).imitation.loss):
        got = loss(loss_inputs(tokens)).loss.item()
        assert got == pytest.approx(references.sequence_mean(values, tokens), rel=1e-10, abs=1e-12)


@quick
@given(seeds, st.sampled_from([1, 64, 1024]))
def test_dr_bot_clips_higher_and_twice_and_divides_by_a_constant(seed, length):
    tokens = random_tokens(seed)
    expected = expected_loss(tokens, high=0.28, dual=10.0, length=length)
    for base in (grpo(), gigpo()):
        got = dr_bot(base, max_length=length).loss(loss_inputs(tokens)).loss.item()
        assert got == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_dr_bot_has_no_term_towards_a_reference():
    with_kl = dataclasses.replace(grpo(), loss=ClippedSurrogate(kl=0.5))
    tokens = random_tokens(4)
    assert with_kl.loss(loss_inputs(tokens)).loss.item() != pytest.approx(expected_loss(tokens, high=0.28))
    expected = expected_loss(tokens, high=0.28, dual=10.0, length=1024)
    assert dr_bot(with_kl).loss(loss_inputs(tokens)).loss.item() == pytest.approx(expected)


@quick
@given(references.groups, seeds)
def test_spear_over_dr_bot_over_gigpo_is_all_three(groups, seed):
    algorithm, tokens = spear(dr_bot(gigpo(), max_length=32)), random_tokens(seed)
    expected = references.gigpo(groups, discount=0.95, step_weight=1.0, divide_by_std=False)
    for got, row in zip(algorithm.advantages(groups), expected, strict=True):
        assert got == pytest.approx(row, rel=1e-7, abs=1e-8)
    assert algorithm.loss(loss_inputs(tokens)).loss.item() == pytest.approx(
        expected_loss(tokens, high=0.28, dual=10.0, length=32), rel=1e-10, abs=1e-12
    )
    assert algorithm.bonus.of(episode(turn(tool=True), 0.0)) == pytest.approx(0.1)
    assert algorithm.imitation is not None


def test_spear_over_dr_bot_drops_what_dr_bot_drops():
    spoilt = episode(
        turn(truncated=True), turn(invalid="no_action"), turn(tokens=[3] * 40), turn(text="\ufffd"), turn(1.0)
    )
    algorithm = spear(dr_bot(gigpo(), keep_groups=0.5))
    groups = [group(spoilt, 0.0), group(0.0, 0.5)]
    reasons = [["overlong", "void", "repetitive", "unreadable", ""], [""], ["flat_group"], ["flat_group"]]
    assert algorithm.dropped(groups) == reasons


# -- the loss of replayed episodes --------------------------------------------------------------------------------


def one_candidate(log_ratio: float) -> LossInputs:
    """Ten tokens; the first has covariance 16.2, this log-ratio and all the advantage; the others are no candidates."""
    blank = [[0.0] * 10]
    logprobs, old = [[-1.0] + [-3.0] * 9], [[-1.0 - log_ratio] + [-3.0] * 9]
    tokens = Tokens(logprobs, old, [[10.0] + [0.0] * 9], [[True] * 10], blank, blank)
    assert references.covariances(tokens)[0, 0] == pytest.approx(16.2)
    assert references.covariances(tokens)[0, 1] == pytest.approx(0.2)
    return loss_inputs(tokens)


def test_the_replay_loss_is_the_bases_with_covariance_clipping():
    for base in (grpo(), gigpo(), dr_bot(grpo())):
        algorithm = spear(base)
        assert base.loss(one_candidate(0.0)).loss.item() < 0
        assert algorithm.loss(one_candidate(0.0)).loss.item() < 0
        assert algorithm.imitation.loss(one_candidate(0.0)).loss.item() == 0.0


def test_covariance_clipping_knows_the_clip_of_its_loss():
    """A ratio of 1.25 is clipped at 0.2 and not at 0.28: only there may covariance clipping drop the token."""
    inputs = one_candidate(math.log(1.25))
    assert spear(grpo()).imitation.loss(inputs).metrics["covariance_clip_fraction"].item() == 0.0
    assert spear(dr_bot(grpo())).imitation.loss(inputs).metrics["covariance_clip_fraction"].item() == pytest.approx(0.1)
    assert spear(grpo(clip=0.3)).imitation.loss(inputs).metrics["covariance_clip_fraction"].item() == pytest.approx(0.1)


def test_the_bounds_and_the_fraction_of_the_clip_are_the_callers():
    narrow = spear(grpo(), covariance=CovarianceClip(low=17, high=60))
    assert narrow.imitation.loss(one_candidate(0.0)).loss.item() == pytest.approx(-1.0)
    default = CovarianceClip()
    assert (default.fraction, default.low, default.high) == (0.02, 2.0, 60.0)


@quick
@given(seeds)
def test_without_covariance_clipping_the_replay_loss_is_the_bases(seed):
    inputs = loss_inputs(random_tokens(seed))
    for base in (grpo(), dr_bot(gigpo())):
        replayed = spear(base, covariance=CovarianceClip(kind="none")).imitation.loss
        assert torch.equal(replayed(inputs).loss, base.loss(inputs).loss)


def test_kl_cov_in_the_replay_loss_adds_its_penalty():
    inputs = one_candidate(math.log(1.1))
    with_penalty = spear(grpo(), covariance=CovarianceClip(kind="kl", beta=3.0)).imitation.loss(inputs).loss.item()
    assert with_penalty - grpo().loss(inputs).loss.item() == pytest.approx(3.0 * math.log(1.1) / 10)


def test_imitation_is_not_paid_for_being_random():
    base = with_settings(grpo(), entropy_bonus=0.5)
    inputs = loss_inputs(random_tokens(9))
    algorithm = spear(base, covariance=CovarianceClip(kind="none"))
    assert torch.equal(algorithm.imitation.loss(inputs).loss, grpo().loss(inputs).loss)
    assert torch.equal(algorithm.loss(inputs).loss, base.loss(inputs).loss)


def test_on_policy_covariance_clipping_is_a_switch_of_its_own():
    clipped = with_covariance_clip(grpo(), CovarianceClip())
    assert clipped.loss(one_candidate(0.0)).loss.item() == 0.0
    assert len(clipped.generators) == 1
    after = with_covariance_clip(spear(grpo(), covariance=CovarianceClip(kind="none")), CovarianceClip())
    assert after.loss(one_candidate(0.0)).loss.item() == 0.0
    assert after.imitation.loss(one_candidate(0.0)).loss.item() < 0
    assert len(after.generators) == 2


@pytest.mark.parametrize("on_policy", ["clip", "kl"])
@pytest.mark.parametrize("replayed", ["clip", "kl", "none"])
def test_what_is_clipped_on_policy_does_not_leak_into_the_replay_loss(on_policy, replayed):
    inputs, covariance = one_candidate(math.log(1.1)), CovarianceClip(kind=replayed)
    inside = spear(with_covariance_clip(grpo(), CovarianceClip(kind=on_policy, beta=5.0)), covariance=covariance)
    alone = spear(grpo(), covariance=covariance)
    assert inside.imitation.loss(inputs).loss.item() == pytest.approx(alone.imitation.loss(inputs).loss.item())


def test_on_policy_covariance_clipping_inside_or_outside_dr_bot_is_the_same():
    inputs = one_candidate(math.log(1.25))
    outside = with_covariance_clip(dr_bot(grpo()), CovarianceClip()).loss(inputs)
    inside = dr_bot(with_covariance_clip(grpo(), CovarianceClip())).loss(inputs)
    assert outside.metrics["covariance_clip_fraction"].item() == pytest.approx(0.1)
    assert inside.metrics["covariance_clip_fraction"].item() == pytest.approx(0.1)


# -- bonus and format terms ---------------------------------------------------------------------------------------


@quick
@given(st.lists(st.booleans(), max_size=25), references.rewards)
def test_the_tool_bonus_is_a_tenth_a_tool_turn_and_at_most_one(used, reward):
    played = episode(*(turn(reward, tool=tool) for tool in used))
    number = 0
    for tool in used:
        number += 1 if tool else 0
    assert tool_bonus(played) == pytest.approx(number / 10 if number < 10 else 1.0)
    assert tool_bonus(played) <= 1.0


@quick
@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdefghijklmno")), max_size=40))
def test_the_distinct_bonus_pays_the_same_call_once(calls):
    played = episode(*(turn(tool=tool, text=text) for tool, text in calls))
    seen = []
    for tool, text in calls:
        if tool and text not in seen:
            seen.append(text)
    assert distinct_tool_bonus(played) == pytest.approx(min(len(seen) / 10, 1.0))


@quick
@given(st.lists(st.booleans(), max_size=25), st.booleans(), st.sampled_from(["", "format"]), st.sampled_from(Stop))
def test_the_answered_bonus_pays_as_usual_where_an_episode_ends_with_a_valid_answer_and_else_nothing(
    used, last, invalid, stop
):
    played = episode(*(turn(tool=tool) for tool in used), turn(tool=last, invalid=invalid), stop=stop)
    has_answer = stop == "done" and not last and invalid == ""
    assert answered_tool_bonus(played) == (tool_bonus(played) if has_answer else 0.0)
    assert answered_tool_bonus(episode(stop=stop)) == 0.0


@quick
@given(references.groups, st.integers(0, 30), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_shaping_fills_in_bonus_and_penalty_and_leaves_rewards_alone(groups, step, penalty, format_bonus, has_bonus):
    algorithm = dataclasses.replace(
        spear(grpo(), bonus=cosine(1, 0, 20), imitation=None) if has_bonus else grpo(),
        invalid_penalty=penalty,
        format_bonus=format_bonus,
    )
    weight = (1 + math.cos(math.pi * step / 20)) / 2 if has_bonus and step < 20 else 0.0
    shaped = algorithm.shaped(groups, step)
    assert [g.task_id for g in shaped] == [g.task_id for g in groups]
    for after, before in zip(shaped, groups, strict=True):
        for new, old in zip(after.trajectories, before.trajectories, strict=True):
            tools = sum(1 for u in old.turns if u.used_tool)
            invalid = [u.invalid != "" for u in old.turns]
            expected = weight * min(1.0, 0.1 * tools) + (0.0 if any(invalid) else format_bonus)
            assert new.bonus == pytest.approx(expected, abs=1e-12)
            assert [u.shaping for u in new.turns] == [-penalty if bad else 0.0 for bad in invalid]
            assert new.reward == old.reward
            assert [u.reward for u in new.turns] == [u.reward for u in old.turns]
            assert new.score == pytest.approx(old.reward + expected - penalty * sum(invalid), abs=1e-9)
            assert [dataclasses.replace(u, shaping=0.0) for u in new.turns] == [
                dataclasses.replace(u, shaping=0.0) for u in old.turns
            ]


@quick
@given(references.groups, st.integers(0, 30))
def test_shaping_twice_is_shaping_once(groups, step):
    algorithm = dataclasses.replace(spear(grpo(), bonus=cosine(1, 0, 20)), invalid_penalty=0.1, format_bonus=0.1)
    once = algorithm.shaped(groups, step)
    assert algorithm.shaped(once, step) == once


def test_the_bonus_counts_in_advantages_while_its_weight_lasts():
    algorithm = spear(dr_grpo(), bonus=cosine(1.0, 0.0, 10))
    groups = [group(episode(turn(0.0, tool=True)), episode(turn(0.0)))]
    assert algorithm.advantages(algorithm.shaped(groups, 0)) == [[pytest.approx(0.05)], [pytest.approx(-0.05)]]
    assert algorithm.advantages(algorithm.shaped(groups, 10)) == [[0.0], [0.0]]


def test_a_custom_bonus_is_used_as_given():
    algorithm = dataclasses.replace(grpo(), bonus=Bonus(of=lambda t: 7.0 * len(t.turns), weight=constant(0.5)))
    [shaped] = algorithm.shaped([group(episode(0.0, 0.0))], 3)
    assert shaped.trajectories[0].bonus == 7.0


# -- self-imitation -----------------------------------------------------------------------------------------------


def imitation(*, capacity: int = 1000, max_age: int = 5, history: int = 1000, **options: Any) -> SelfImitation:
    """Plays everything that qualifies unless told otherwise."""
    return SelfImitation(
        buffer=ReplayBuffer(capacity, max_age),
        history=RewardHistory(history),
        loss=clipped_surrogate,
        **{"weight": constant(1.0), "fraction": 1e6, **options},
    )


def tagged(trajectory: Trajectory, tag: int) -> Trajectory:
    """The same episode, recognisable by its prompts."""
    return dataclasses.replace(trajectory, turns=[dataclasses.replace(u, prompt_ids=[tag]) for u in trajectory.turns])


def tag_of(trajectory: Trajectory) -> int:
    return trajectory.turns[0].prompt_ids[0]


def draw(memory: SelfImitation, step: int, seed: int = 0, num_played: int = 1) -> Replay:
    return memory.draw(step, random.Random(seed), num_played=num_played)


def live(memory: SelfImitation, groups: Sequence[Group], step: int, algorithm: Algorithm | None = None) -> None:
    """One step of observing and keeping, with Dr. GRPO's advantages unless another algorithm is given."""
    memory.observe(groups)
    memory.keep(groups, (algorithm or dr_grpo()).advantages(groups), step)


history_of_steps = st.lists(references.groups, min_size=1, max_size=5)


def exact_advantages(groups):
    """Scores less their group's mean, as fractions: nothing is lost below a large number."""
    found = []
    for g in groups:
        scores = [
            sum(map(Fraction, [t.bonus, *(x for u in t.turns for x in (u.reward, u.shaping))])) for t in g.trajectories
        ]
        found += [score - sum(scores) / len(scores) for score in scores]
    return found


@settings(max_examples=60, deadline=None)
@given(
    history_of_steps,
    st.sampled_from(["both", "old", "new"]),
    st.sampled_from([1000, 3]),
    st.sampled_from([0, 2, 5]),
    st.sampled_from([0.0, 25.0, 50.0, 100.0]),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([1000, 2]),
    st.booleans(),
)
def test_what_is_replayed_is_what_a_diary_says(
    steps, gate, capacity, max_age, percentile, require_tool, age_decay, history, skip_invalid
):
    memory = imitation(
        capacity=capacity,
        max_age=max_age,
        history=history,
        gate=gate,
        percentile=percentile,
        require_tool=require_tool,
        age_decay=age_decay,
        skip_invalid=skip_invalid,
    )
    diary: list[tuple[int, int, float, int]] = []  # tag, step, reward, number of turns
    group_means: list[float] = []
    tag = 0
    for step, groups in enumerate(steps):
        named = []
        for g in groups:
            named.append(dataclasses.replace(g, trajectories=[]))
            for t in g.trajectories:
                named[-1].trajectories.append(tagged(t, tag))
                tag += 1
        live(memory, named, step)

        values, labels = references.scores(named)
        advantages = references.group_relative(values, labels, divide_by_std=False)
        assume(
            all(a == 0 or abs(a) > 1e-9 for a in [*advantages, *exact_advantages(named)])
        )  # rounding decides nothing
        n = 0
        for g in named:
            task_rewards = []
            for t in g.trajectories:
                reward = sum(u.reward for u in t.turns)
                task_rewards.append(reward)
                used_tool = any(u.used_tool for u in t.turns)
                is_better = advantages[n] > 0
                is_fit = any(not skip_invalid or not (u.invalid or u.completion.truncated) for u in t.turns)
                if (gate == "new" or is_better) and (used_tool or not require_tool) and is_fit:
                    diary.append((tag_of(t), step, reward, len(t.turns)))
                n += 1
            group_means.append(references.mean(task_rewards))
        diary = diary[-capacity:]

        baseline = references.percentile(group_means[-history:], percentile)
        expected = {}
        for name, born, reward, num_turns in diary:
            today = reward - baseline
            if step - born <= max_age and (gate == "old" or today > 1e-9):
                expected[name] = [today * age_decay ** (step - born)] * num_turns
        replay = draw(memory, step)
        got = {tag_of(t): a for t, a in zip(replay.trajectories, replay.turn_advantages, strict=True)}
        assert len(got) == len(replay.trajectories)
        near_the_gate = {k for k, a in got.items() if abs(a[0]) <= 1e-9}  # equal but for rounding
        assert got.keys() - near_the_gate == expected.keys() - near_the_gate
        for name in got.keys() & expected.keys():
            assert got[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9)


def test_only_better_than_its_siblings_is_admitted():
    memory = imitation()
    live(memory, [group(1.0, 0.0, 0.5), group(3.0, 3.0), group(9.0)], 0)
    assert [s.reward for s in memory.buffer.items] == [1.0]


def test_the_mean_over_turns_decides_admission():
    memory, played = imitation(), group(episode(0.0, 0.0), episode(1.0, 0.0))
    memory.keep([played], [[3.0, -2.0], [2.0, -2.0]], 0)
    assert [s.item.turn_advantages for s in memory.buffer.items] == [[3.0, -2.0]]


def test_an_episode_of_a_flat_group_is_never_admitted():
    memory = imitation()
    early, late = episode(1.0, -0.1, -0.1, -0.1), episode(-0.1, -0.1, -0.1, 1.0)
    live(memory, [group(0.1, 0.1, 0.1), group(early, late)], 0)
    assert len(memory.buffer) == 0


def test_an_episode_without_a_tool_is_refused_where_tools_are_required():
    memory = imitation(require_tool=True)
    live(memory, [group(episode(turn(1.0)), episode(turn(1.0), turn(tool=True)), 0.0)], 0)
    assert [s.item.trajectory.num_tool_turns for s in memory.buffer.items] == [1]


def test_an_episode_of_which_nothing_trained_is_not_admitted():
    memory, played = imitation(), group(episode(1.0, 1.0), episode(1.0, 1.0), episode(0.0))
    memory.observe([played])
    memory.keep([played], [[1.0, 1.0], [1.0, 1.0], [-1.0]], 0, dropped=[["void", "overlong"], ["void", ""], [""]])
    assert [s.item.dropped for s in memory.buffer.items] == [["void", ""]]
    assert draw(memory, 0).dropped == [["void", ""]]


def test_the_baseline_sees_the_task_reward_only_and_every_group():
    memory = imitation()
    paid = episode(turn(1.0, shaping=-0.5), bonus=4.0)
    memory.observe([group(paid, 0.0), group(2.0, 2.0), group(7.0), Group("lost", [], num_failed=3)])
    assert list(memory.history.means) == [0.5, 2.0, 7.0]


def test_bonus_and_format_terms_never_reach_the_buffer():
    algorithm = dataclasses.replace(
        spear(dr_grpo(), bonus=1.0, imitation=1.0, fraction=1.0), invalid_penalty=0.1, format_bonus=0.2
    )
    memory = algorithm.imitation
    played = [group(episode(turn(1.0, tool=True), turn(invalid="inadmissible")), episode(turn(tool=True)), 0.0)]
    shaped = algorithm.shaped(played, 0)
    live(memory, shaped, 0, algorithm)
    assert memory.history.median() == pytest.approx(1 / 3)
    [stored] = memory.buffer.items
    assert stored.reward == 1.0
    assert stored.item.trajectory == played[0].trajectories[0]
    [row] = draw(memory, 0, num_played=3).turn_advantages
    assert row == pytest.approx([1 - 1 / 3] * 2)


def test_every_turn_of_a_replayed_episode_gets_reward_minus_baseline():
    memory = imitation()
    live(memory, [group(episode(1.0, 0.0, 2.0), 0.0), group(0.0, 0.0), group(1.0, 1.0)], 0)
    memory.observe([group(0.5), group(2.5)])
    assert draw(memory, 1).turn_advantages == [[2.0] * 3]


def test_an_episode_that_no_longer_beats_the_baseline_waits():
    memory = imitation()
    live(memory, [group(1.0, 0.0)], 0)
    assert draw(memory, 0).turn_advantages == [[0.5]]
    memory.observe([group(1.0), group(2.0)])
    assert draw(memory, 1).trajectories == []
    assert len(memory.buffer) == 1
    memory.observe([group(0.0)] * 4)
    assert draw(memory, 2).turn_advantages == [[1.0]]


def test_gates_ask_for_one_advantage_or_the_other_or_both():
    """Of three groups and a baseline of 2, the old gate lets the winners pass and the new one whoever beats 2."""
    drawn = {}
    for gate in ("old", "new", "both"):
        memory = imitation(gate=gate)
        live(memory, [group(3.0, 0.0), group(1.0, 0.0), group(2.0, 2.5)], 0)
        memory.history.load_state_dict({"means": [2.0]})
        replay = draw(memory, 0)
        drawn[gate] = sorted((t.reward, a[0]) for t, a in zip(replay.trajectories, replay.turn_advantages, strict=True))
    assert drawn["both"] == [(2.5, 0.5), (3.0, 1.0)]
    assert drawn["new"] == [(2.5, 0.5), (3.0, 1.0)]
    assert drawn["old"] == [(1.0, -1.0), (2.5, 0.5), (3.0, 1.0)]
    memory = imitation(gate="new")
    live(memory, [group(3.0, 4.0)], 0)
    memory.history.load_state_dict({"means": [2.0]})
    assert sorted(t.reward for t in draw(memory, 0).trajectories) == [3.0, 4.0]


def test_reweighting_uses_the_advantage_of_admission():
    memory = imitation(reweight=0.25)
    live(memory, [group(episode(2.0, 1.0), 1.0)], 0)
    memory.observe([group(100.0)] * 5)
    assert draw(memory, 1).turn_advantages == [[0.25, 0.25]]


def test_the_percentile_moves_the_baseline():
    for percentile, baseline in ((0.0, 0.0), (50.0, 1.0), (75.0, 1.5), (100.0, 2.0)):
        memory = imitation(percentile=percentile)
        live(memory, [group(3.0, 1.0)], 0)
        memory.observe([group(0.0), group(1.0)])
        assert draw(memory, 0).turn_advantages == [[3.0 - baseline]]


def test_an_older_episode_weighs_less_where_age_decays():
    memory = imitation(age_decay=0.5)
    memory.observe([group(0.0)])
    memory.keep([group(1.0)], [[1.0]], 2)
    assert [draw(memory, step).turn_advantages for step in (2, 3, 5)] == [[[1.0]], [[0.5]], [[0.125]]]


def test_an_episode_is_replayed_until_the_age_limit_and_not_after():
    memory = imitation(max_age=5)
    memory.observe([group(0.0)])
    memory.keep([group(1.0)], [[1.0]], 10)
    assert len(draw(memory, 15).trajectories) == 1
    assert len(draw(memory, 16).trajectories) == 0
    assert len(memory.buffer) == 0


def stocked(memory: SelfImitation, number: int, *, reward: float = 1.0, step: int = 0, first_tag: int = 0) -> None:
    """`number` more episodes in the buffer, against a baseline of 0."""
    memory.history.load_state_dict({"means": [0.0]})
    episodes = [tagged(episode(reward), first_tag + n) for n in range(number)]
    memory.keep([group(*episodes)], [[1.0]] * number, step)


@quick
@given(st.integers(0, 12), st.integers(0, 40), st.sampled_from([0.0, 0.1, 0.25, 1.0]), seeds)
def test_every_step_draws_a_share_of_what_was_played(number, num_played, fraction, seed):
    memory = imitation(fraction=fraction)
    stocked(memory, number)
    replay = draw(memory, 0, seed, num_played=num_played)
    drawn = [tag_of(t) for t in replay.trajectories]
    assert len(set(drawn)) == len(drawn)
    if len(drawn) < number:
        assert abs(len(drawn) - fraction * num_played) <= 0.5
    else:
        assert fraction * num_played >= number - 0.5
    assert len(memory.buffer) == number


def test_a_quarter_is_drawn_by_default():
    memory = SelfImitation(
        buffer=ReplayBuffer(100, 5), history=RewardHistory(10), loss=clipped_surrogate, weight=constant(1.0)
    )
    stocked(memory, 50)
    assert len(draw(memory, 0, num_played=64).trajectories) == 16


@pytest.mark.parametrize("capacity", [2, 3, 4, 7])
def test_when_full_waits_for_more_than_one_and_a_half_times_its_size(capacity):
    enough = math.floor(1.5 * capacity) + 1
    for number in range(2 * capacity + 1):
        algorithm = spear(grpo(), imitation=1.0, capacity=capacity, draw_when="when_full", admit_by_score=True)
        stocked(algorithm.imitation, number)
        replay = draw(algorithm.imitation, 0, num_played=1)
        assert replay.metrics["replay/fired"] == float(number >= enough)
        if number >= enough:
            assert len({tag_of(t) for t in replay.trajectories}) == len(replay.trajectories) == capacity
            assert len(algorithm.imitation.buffer) == 0
        else:
            assert replay.trajectories == []
            assert len(algorithm.imitation.buffer) == number


def test_when_full_counts_only_what_qualifies_today():
    memory = imitation(draw_when="when_full", full_size=4)
    stocked(memory, 6)
    stocked(memory, 20, reward=-1.0, first_tag=100)
    assert draw(memory, 0).trajectories == []
    stocked(memory, 1, first_tag=200)
    assert len(draw(memory, 0).trajectories) == 4
    assert len(memory.buffer) == 0


def test_when_full_draws_at_random():
    drawn = set()
    for seed in range(40):
        memory = imitation(draw_when="when_full", full_size=2)
        stocked(memory, 4)
        drawn |= {tag_of(t) for t in draw(memory, 0, seed).trajectories}
    assert drawn == {0, 1, 2, 3}


def test_nothing_is_drawn_while_the_weight_is_zero():
    for draw_when in ("every_step", "when_full"):
        memory = imitation(weight=cosine(0, 1, 10), draw_when=draw_when, full_size=2)
        stocked(memory, 8)
        assert draw(memory, 0).trajectories == []
        assert len(memory.buffer) == 8
        assert draw(memory, 1).metrics["replay/fired"] == 1.0


def test_the_first_steps_of_a_run_draw_from_nothing():
    replay = draw(imitation(), 0)
    assert replay.trajectories == replay.turn_advantages == replay.dropped == []
    assert replay.metrics["replay/fired"] == replay.metrics["replay/buffer_size"] == 0.0


def test_a_draw_tells_what_it_did():
    memory = imitation(fraction=1.0)
    stocked(memory, 3, reward=2.0, step=1)
    stocked(memory, 2, reward=-1.0, step=1)
    metrics = draw(memory, 4, num_played=2).metrics
    assert metrics == {
        "replay/buffer_size": 5.0,
        "replay/eligible": 3.0,
        "replay/weight": 1.0,
        "replay/baseline": 0.0,
        "replay/fired": 1.0,
        "replay/trajectories": 2.0,
        "replay/age": 3.0,
        "replay/advantage": 2.0,
        "replay/reward": 2.0,
        "replay/group_success": 0.0,
    }


def test_each_family_has_a_baseline_of_its_own_where_asked():
    easy, hard = group(9.0, 8.0, family="easy"), group(1.0, 0.0, family="hard")
    drawn = {}
    for per_family in (False, True):
        algorithm = spear(dr_grpo(), imitation=1.0, fraction=1e6, baseline_per_family=per_family)
        live(algorithm.imitation, [easy, hard], 0)
        replay = draw(algorithm.imitation, 0)
        drawn[per_family] = {t.reward: a for t, a in zip(replay.trajectories, replay.turn_advantages, strict=True)}
    assert drawn == {False: {9.0: [9.0 - 4.5]}, True: {9.0: [0.5], 1.0: [0.5]}}


def test_the_step_part_is_left_out_unless_asked_for():
    long = episode(turn(0.0, state="hall"), turn(4.0, state="kitchen"))
    short = episode(turn(1.0, state="hall"))
    base = gigpo(gamma=0.5, divide_by_std=False)
    for keep_step_part, part in ((False, 0.0), (True, 0.5)):
        algorithm = spear(base, imitation=1.0, fraction=1e6, keep_step_part=keep_step_part)
        live(algorithm.imitation, [group(long, short)], 0, algorithm)
        assert draw(algorithm.imitation, 0).turn_advantages == [[1.5 + part, 1.5]]


@quick
@given(references.groups, st.booleans())
def test_a_kept_step_part_is_what_the_formula_says(groups, divide_by_std):
    """With the task's own rewards: bonus and format terms are left out of the episodes here."""
    plain = [
        dataclasses.replace(
            g,
            trajectories=[
                dataclasses.replace(t, bonus=0.0, turns=[dataclasses.replace(u, shaping=0.0) for u in t.turns])
                for t in g.trajectories
            ],
        )
        for g in groups
    ]
    base = gigpo(divide_by_std=divide_by_std, step_weight=0.7)
    algorithm = spear(base, imitation=1.0, fraction=1e6, keep_step_part=True, gate="new", skip_invalid=False)
    live(algorithm.imitation, plain, 0, algorithm)
    expected = references.gigpo(plain, discount=0.95, step_weight=0.7, episode_weight=0.0, divide_by_std=divide_by_std)
    for stored, row in zip(algorithm.imitation.buffer.items, expected, strict=True):
        assert stored.item.step_parts == pytest.approx(row, rel=1e-7, abs=1e-7)


def test_format_terms_stay_out_of_a_kept_step_part():
    """Two visits to the hall, equal but for a penalty that is ours: the task's reward sees no difference."""
    fine, clumsy = episode(turn(0.0, state="hall"), 1.0), episode(turn(0.0, state="hall", invalid="no_action"), 1.0)
    algorithm = dataclasses.replace(
        spear(gigpo(divide_by_std=False), imitation=1.0, fraction=1e6, keep_step_part=True), invalid_penalty=0.1
    )
    shaped = algorithm.shaped([group(fine, clumsy, episode(0.0)), group(0.0)], 0)
    live(algorithm.imitation, shaped, 0, algorithm)
    assert draw(algorithm.imitation, 0).turn_advantages == [[pytest.approx(2 / 3)] * 2] * 2


def test_keeping_a_step_part_needs_a_base_that_has_one():
    assert spear(dr_bot(gigpo()), keep_step_part=True).imitation.step_parts is not None
    with pytest.raises(ValueError, match="gigpo"):
        spear(grpo(), keep_step_part=True)


@pytest.mark.parametrize("make", base_makers)
def test_auto_keeps_the_step_part_of_every_base_that_has_one(make):
    base = make()
    kept = spear(base, keep_step_part="auto").imitation.step_parts
    try:
        assert kept == spear(base, keep_step_part=True).imitation.step_parts
    except ValueError:
        assert kept is None


# -- checkpoints --------------------------------------------------------------------------------------------------


def stories(seed: int, step: int) -> list[Group]:
    rng = random.Random(f"{seed} {step}")

    def one(tag: int) -> Trajectory:
        length = rng.randint(1, 3)
        turns = [
            turn(
                rng.choice([0.0, 0.0, 1.0, -0.1]),
                state=rng.choice("abc"),
                tool=rng.random() < 0.5,
                text=rng.choice(["é", "fine", "\ufffd"]),
            )
            for _ in range(length)
        ]
        return tagged(episode(*turns), tag)

    return [
        group(*(one(1000 * step + 10 * g + i) for i in range(4)), family=rng.choice(["", "easy", "hard"]), step=step)
        for g in range(4)
    ]


def lived(algorithm: Algorithm, seed: int, steps: range) -> list[tuple[Replay, float, float]]:
    """Steps of a training run: what each replayed, and the losses of both terms on a fixed mini-batch."""
    out, inputs = [], loss_inputs(random_tokens(3, log_ratios=(0.0, 0.1), scale=4.0, max_rows=9, max_columns=9))
    for step in steps:
        groups = algorithm.shaped(stories(seed, step), step)
        advantages, dropped = algorithm.advantages(groups), algorithm.dropped(groups)
        algorithm.imitation.observe(groups)
        replay = algorithm.imitation.draw(step, random.Random(step), num_played=16)
        algorithm.imitation.keep(groups, advantages, step, dropped=dropped)
        losses = [
            part.loss(dataclasses.replace(inputs, generator=part.generator)).loss.item()
            for part in (algorithm, algorithm.imitation)
        ]
        out.append((replay, losses[0], losses[1]))
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("per_family", [False, True])
@pytest.mark.parametrize("draw_when", ["every_step", "when_full"])
def test_a_restored_algorithm_goes_on_exactly_like_the_first(seed, per_family, draw_when):
    def fresh() -> Algorithm:
        base = with_covariance_clip(dr_bot(gigpo()), CovarianceClip(low=0.1, fraction=0.1), seed=5)
        return dataclasses.replace(
            spear(
                base,
                imitation=cosine(0.5, 1, 10),
                capacity=12 if draw_when == "every_step" else 6,
                baseline_per_family=per_family,
                keep_step_part=True,
                covariance=CovarianceClip(low=0.1, fraction=0.1),
                draw_when=draw_when,
            ),
            invalid_penalty=0.1,
        )

    first, second = fresh(), fresh()
    lived(first, seed, range(4))
    lived(second, seed + 77, range(3))  # whatever it held is replaced
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    later = lived(first, seed, range(4, 8))
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert lived(second, seed, range(4, 8)) == later
    assert any(replay.trajectories for replay, _, _ in later)
    assert len({loss for _, loss, _ in later}) > 1  # the covariance draws go on, they do not repeat


def test_a_restored_episode_is_the_one_that_was_saved():
    memory, copy = imitation(), imitation()
    played = dataclasses.replace(
        episode(turn(1.0, state="s", tool=True, invalid="inadmissible", text="ü", truncated=True), 2.0), success=True
    )
    memory.observe([group(0.0, family="f")])
    memory.keep([group(played, family="f")], [[1.0, 2.0]], 3, dropped=[["overlong", ""]])
    copy.load_state_dict(memory.state_dict())
    assert copy.buffer.items == memory.buffer.items
    assert copy.buffer.items[0].item.trajectory == played


def test_families_met_after_a_checkpoint_are_forgotten_when_it_is_restored():
    algorithm = spear(grpo(), baseline_per_family=True)
    algorithm.imitation.observe([group(1.0, family="old")])
    saved = algorithm.state_dict()
    algorithm.imitation.observe([group(5.0, family="new")])
    algorithm.load_state_dict(saved)
    assert set(algorithm.imitation.families) == {"old"}


def test_a_base_without_memory_has_an_empty_checkpoint():
    saved = grpo().state_dict()
    grpo().load_state_dict(saved)
    assert saved == {"imitation": None, "generators": [], "running": Running().state_dict()}
