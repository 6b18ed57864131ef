"""What enters the replay buffer, what of it trains again and how much it weighs: through the training step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import references
from conftest import RecordingEngine
from references import episode, group, turn
from spear_rl.algorithms import (
    BASES,
    ClippedSurrogate,
    CovarianceClip,
    ToolBonus,
    dr_bot,
    dr_grpo,
    gigpo,
    grpo,
    rloo,
    spear,
)
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load
from spear_rl.functional import LossInputs, token_covariance
from spear_rl.integrations.verl.rows import with_clipped_replay
from spear_rl.train.step import minibatches, train_step
from spear_rl.types import Group, Metrics

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
NOTHING = [group(0.0, 0.0)]
"""A step without a win, in which replay has the buffer to itself."""


def lived(algorithm, *steps: Sequence[Group], num_minibatches: int = 1) -> tuple[list[list], list[Metrics]]:
    """One training step per list of groups: the terms of all updates of each step, and its metrics."""
    engine, rng, terms, metrics = RecordingEngine(None, [""]), random.Random(0), [], []
    for number, played in enumerate(steps):
        before = len(engine.updates)
        options = {"collect": lambda _, now=played: list(now), "num_minibatches": num_minibatches}
        metrics.append(train_step(number, algorithm=algorithm, engine=engine, rng=rng, **options))
        terms.append([term for update in engine.updates[before:] for term in update])
    return terms, metrics


def replayed(terms) -> list:
    return [term for term in terms if term.name == "replay"]


def trained_tokens(terms) -> list[int]:
    """The tokens of all rows that train, each turn's being its own."""
    return sorted(int(token) for term in terms for token in term.batch.input_ids[term.batch.mask])


def stored_rewards(algorithm) -> list[float]:
    return [stored.reward for stored in algorithm.imitation.buffer.items]


def all_in(base, **options):
    """Everything that qualifies is replayed in every step, at full weight."""
    return spear(base, **{"imitation": 1.0, "fraction": 100.0, "scale_by_rows": False, **options})


# -- admission ----------------------------------------------------------------------------------------------------

clumsy_win = episode(turn(invalid="no_action"), turn(1.0))
wins = [episode(turn(1.0)), clumsy_win, episode(turn(tool=True), turn(1.0, tool=True))]


@pytest.mark.parametrize("name", BASES)
def test_a_group_that_won_every_time_is_not_admitted_for_its_penalties_or_tools(name):
    made = spear(replace(BASES[name](), invalid_penalty=0.5), bonus=1.0, imitation=1.0)
    lived(made, [group(*wins)])
    assert stored_rewards(made) == []


def test_a_tidy_loss_is_no_win_and_a_clumsy_win_is_one():
    """Four mistakes cost more than the win pays: the score would store the loss."""
    clumsy = episode(*[turn(invalid="no_action")] * 4, turn(1.0))
    for base, by_reward, by_score in ((dr_grpo, [1.0], [0.0]), (grpo, [1.0], [0.0]), (gigpo, [1.0], [0.0])):
        for options, expected in (({}, by_reward), ({"admit_by_score": True}, by_score)):
            made = spear(replace(base(), invalid_penalty=0.5), bonus=None, imitation=1.0, **options)
            lived(made, [group(clumsy, episode(0.0))])
            assert stored_rewards(made) == expected


@quick
@given(
    references.groups, st.sampled_from([0.0, 0.1, 3.0]), st.sampled_from([0.0, 1.0, 20.0]), st.sampled_from(list(BASES))
)
def test_what_is_admitted_beat_its_siblings_by_the_tasks_reward(groups, penalty, bonus, name):
    made = all_in(replace(BASES[name](), invalid_penalty=penalty, filters=()), bonus=bonus, skip_invalid=False)
    lived(made, groups)
    expected = []
    for played in groups:
        rewards = [t.reward for t in played.trajectories]
        above = [r - references.mean(rewards) for r in rewards]
        assume(all(a == 0 or abs(a) > 1e-9 for a in above))
        assume(len(set(rewards)) == 1 or max(rewards) - min(rewards) > 1e-6)
        expected += [reward for reward in rewards if reward - references.mean(rewards) > 1e-9 and len(set(rewards)) > 1]
    assert stored_rewards(made) == expected


def test_gigpos_discounted_steps_do_not_tell_equal_wins_apart():
    quick_win, slow_win = episode(turn(1.0, state="hall")), episode(turn(state="hall"), turn(1.0, state="yard"))
    made = spear(gigpo(), bonus=None, imitation=1.0)
    assert made.advantages([group(quick_win, slow_win)])[0][0] > 0
    lived(made, [group(quick_win, slow_win)])
    assert stored_rewards(made) == []


# -- turns that do not train again --------------------------------------------------------------------------------

UNFIT = {"invalid": {"invalid": "no_action"}, "refused": {"invalid": "inadmissible"}, "cut": {"truncated": True}}
mixed_win = episode(
    turn(tokens=[11]), *(turn(tokens=[12], **unfit) for unfit in UNFIT.values()), turn(1.0, tokens=[13])
)


@pytest.mark.parametrize("base", [grpo, dr_grpo, rloo, gigpo])
def test_turns_the_environment_could_not_act_on_train_when_played_and_not_when_replayed(base):
    made = all_in(base(), bonus=None)
    terms, _ = lived(made, [group(mixed_win, 0.0)], NOTHING)
    assert trained_tokens(terms[0]) == [1, 2, 3, 11, 12, 12, 12, 13]
    assert trained_tokens(replayed(terms[1])) == [11, 13]


def test_such_turns_are_replayed_where_asked():
    terms, _ = lived(all_in(grpo(), bonus=None, skip_invalid=False), [group(mixed_win, 0.0)], NOTHING)
    assert trained_tokens(replayed(terms[1])) == [11, 12, 12, 12, 13]


def test_what_dr_bot_dropped_is_not_replayed_either_way():
    repetitive = turn(tokens=[5] * 40)
    for skip in (True, False):
        made = all_in(dr_bot(grpo()), bonus=None, skip_invalid=skip)
        terms, _ = lived(made, [group(episode(repetitive, turn(1.0, tokens=[13])), 0.0)], NOTHING)
        assert trained_tokens(replayed(terms[1])) == [13]


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_a_win_without_a_turn_worth_imitating_is_not_stored(unfit):
    made = all_in(grpo(), bonus=None)
    lived(made, [group(episode(turn(1.0, **unfit)), 0.0)])
    assert stored_rewards(made) == []


# -- how much a draw weighs ---------------------------------------------------------------------------------------


def test_one_replayed_row_weighs_a_sixty_fourth_of_sixty_four():
    first, later = [group(*[1.0] * won, *[0.0] * (64 - won)) for won in (1, 63)], [group(*[0.0] * 64)]
    for played, share in zip(first, (1 / 64, 63 / 64), strict=True):
        made = spear(dr_grpo(), bonus=None, imitation=0.5, fraction=1.0)
        terms, _ = lived(made, [played], later)
        assert replayed(terms[1])[0].weight == pytest.approx(0.5 * share)
        plain = spear(dr_grpo(), bonus=None, imitation=0.5, fraction=1.0, scale_by_rows=False)
        terms, _ = lived(plain, [played], later)
        assert replayed(terms[1])[0].weight == 0.5


@quick
@given(st.integers(1, 5), st.integers(6, 12), st.integers(1, 3), seeds)
def test_replay_weighs_by_episodes_drawn_over_wanted_however_many_turns_they_have(won, played, num_turns, seed):
    rng = random.Random(seed)
    winners = [
        episode(*[turn(tokens=[n + 1]) for n in range(rng.randint(0, num_turns))], turn(1.0)) for _ in range(won)
    ]
    made = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0)
    terms, metrics = lived(made, [group(*winners, 0.0)], [group(*[0.0] * played)])
    assert metrics[1]["replay/trajectories"] == won
    [term] = replayed(terms[1])
    assert term.weight == pytest.approx(won / played)


def test_a_draw_of_as_many_as_wanted_has_its_full_weight():
    won = [group(*[1.0] * 4, *[0.0] * 4)] * 2
    for options in ({"fraction": 0.5}, {"draw_when": "when_full", "capacity": 5}):
        for num_minibatches in (1, 2, 3):
            made = spear(dr_grpo(), bonus=None, imitation=0.7, **options)
            terms, _ = lived(made, won, [group(*[0.0] * 16)], num_minibatches=num_minibatches)
            assert {term.weight for term in replayed(terms[1])} == {0.7}


@quick
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), seeds)
def test_a_replayed_row_weighs_the_same_however_many_come_with_it(won, num_minibatches, num_turns, seed):
    """A mean over r rows times its weight gives each weight / r: the share of a row in a mini-batch drawn in full."""
    winner = episode(*[turn(tokens=[n]) for n in range(num_turns - 1)], turn(1.0))
    made = spear(dr_grpo(), bonus=None, imitation=1.0, fraction=1.0)
    terms, _ = lived(
        made, [group(*[winner] * won, *[0.0] * (41 - won))], [group(*[0.0] * 48)], num_minibatches=num_minibatches
    )
    in_full = 48 * num_turns // num_minibatches
    for term in replayed(terms[1]):
        assert term.weight / len(term.batch) == pytest.approx(1 / max(in_full, len(term.batch)))


def test_a_term_that_wants_no_number_keeps_its_weight():
    _, metrics = lived(grpo(), [group(1.0, 0.0)])
    terms, _ = lived(grpo(), [group(1.0, 0.0)])
    assert [term.weight for update in minibatches(terms[0], 5, random.Random(0)) for term in update] == [1.0, 1.0]
    assert metrics[0]["policy/turns_trained"] == 2


# -- who pays for an invalid turn ---------------------------------------------------------------------------------


def advantages_of(base, *trajectories):
    made = replace(base, invalid_penalty=0.1)
    return made.advantages(made.shaped([group(*trajectories)], 0))


def test_with_grpo_every_turn_of_the_episode_pays_for_an_invalid_one():
    tidy, clumsy = episode(0.0, 0.0, 1.0), episode(turn(), turn(invalid="no_action"), turn(1.0))
    assert advantages_of(dr_grpo(), tidy, clumsy) == [[pytest.approx(0.05)] * 3, [pytest.approx(-0.05)] * 3]


@quick
@given(st.integers(0, 3), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_with_gigpo_the_step_part_charges_the_invalid_turn_and_discounted_those_before_it(at, discount):
    states = [turn(state=f"s{n}") for n in range(4)]
    clumsy = [turn(state=f"s{n}", invalid="no_action" if n == at else "") for n in range(4)]
    step_part = replace(gigpo(gamma=discount, divide_by_std=False).advantages, episode_weight=0.0)
    base = replace(gigpo(), advantages=step_part)
    _, paid = advantages_of(base, episode(*states), episode(*clumsy))
    assert paid == pytest.approx([-0.05 * discount ** (at - n) if n <= at else 0.0 for n in range(4)])
    whole = gigpo(gamma=discount, divide_by_std=False)
    assert advantages_of(whole, episode(*states), episode(*clumsy))[1] == pytest.approx([p - 0.05 for p in paid])


def test_the_bonus_is_the_episodes_and_no_turns():
    base = replace(gigpo(), advantages=replace(gigpo(divide_by_std=False).advantages, episode_weight=0.0))
    made = spear(base, bonus=1.0, bonus_of=ToolBonus(), imitation=None)
    played = [group(episode(turn(state="s", tool=True)), episode(turn(state="s")))]
    assert made.advantages(made.shaped(played, 0)) == [[0.0], [0.0]]


# -- one scale for replayed and on-policy advantages --------------------------------------------------------------

dividing = {"grpo": grpo, "gigpo": gigpo}
plain = {
    "dr-grpo": dr_grpo,
    "rloo": rloo,
    "gigpo": lambda: gigpo(divide_by_std=False),
    "dr-bot": lambda: dr_bot(grpo()),
}


def advantage_of(terms) -> float:
    """The one advantage that all trained tokens of replay have."""
    [value] = {float(x) for term in replayed(terms) for x in term.batch.advantages[term.batch.mask]}
    return value


@pytest.mark.parametrize("name", dividing)
@pytest.mark.parametrize("reward", [1.0, 10.0, 0.003])
@pytest.mark.parametrize("won", [1, 3, 7])
def test_a_win_is_worth_the_same_replayed_as_when_played_if_the_baseline_is_its_groups_mean(name, reward, won):
    played = [group(*[reward] * won, *[0.0] * (8 - won))]
    made = all_in(dividing[name](), bonus=None)
    terms, metrics = lived(made, played, played)
    assert metrics[1]["replay/baseline"] == pytest.approx(reward * won / 8)
    assert advantage_of(terms[1]) == pytest.approx(made.advantages(played)[0][0], rel=1e-5)
    assert advantage_of(lived(all_in(dividing[name](), bonus=None, divide_by_std=False), played, played)[0][1]) == (
        pytest.approx(reward - reward * won / 8)
    )


@quick
@given(st.floats(0.01, 100), seeds)
def test_with_a_base_that_divides_rewards_in_other_units_replay_alike(unit, seed):
    rng = random.Random(seed)
    steps = [[[rng.choice([0.0, 0.2, 1.0]) for _ in range(4)] for _ in range(3)] for _ in range(3)]
    drawn = []
    for scale in (1.0, unit):
        made = all_in(grpo(), bonus=None)
        lived(made, *([group(*(scale * r for r in rewards)) for rewards in played] for played in steps))
        drawn.append(made.imitation.draw(3, random.Random(0), num_played=12))
    one, other = ([a for turns in replay.turn_advantages for a in turns] for replay in drawn)
    assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("name", plain)
def test_a_base_that_does_not_divide_replays_reward_less_baseline_to_the_bit(name):
    played = [group(10.0, 0.0, 0.3), group(0.1, 0.2, 0.7)]
    made = all_in(plain[name](), bonus=None, percentile=0.0)
    lived(made, played)
    replay = made.imitation.draw(1, random.Random(0), num_played=6)
    assert replay.turn_advantages
    assert sorted(replay.turn_advantages) == sorted(
        [t.reward - min(made.imitation.history.means)] for t in replay.trajectories
    )


def test_flat_groups_do_not_move_the_scale_and_none_but_flat_ones_leave_it_out():
    """Most groups of a late run are won every time; their standard deviation is 0 and says nothing."""
    made = all_in(grpo(), bonus=None, gate="new", percentile=0.0)
    lived(made, [group(3.0, 3.0), group(1.0, 1.0)])
    assert made.imitation.history.typical_std is None
    assert sorted(made.imitation.draw(1, random.Random(0), num_played=4).turn_advantages)[-1] == [
        pytest.approx(2.0, rel=1e-5)
    ]
    lived(made, [group(2.0, 0.0), *[group(1.0, 1.0)] * 20])
    assert made.imitation.history.typical_std == pytest.approx(2**0.5)


def test_one_odd_group_does_not_set_the_scale():
    made = all_in(grpo(), bonus=None)
    lived(made, [*[group(1.0, 0.0)] * 5, group(1.0, 1.0 - 1e-9), group(1000.0, 0.0)])
    assert made.imitation.history.typical_std == pytest.approx(0.5**0.5)


def test_each_family_has_a_scale_of_its_own_with_its_baseline():
    played = [group(10.0, 0.0, family="large"), group(1.0, 0.0, family="small")]
    made = all_in(grpo(), bonus=None, baseline_per_family=True)
    lived(made, played)
    replay = made.imitation.draw(1, random.Random(0), num_played=4)
    expected = made.advantages(played)
    assert sorted(replay.turn_advantages) == [[pytest.approx(expected[n][0], rel=1e-5)] for n in (2, 0)]


def test_the_scale_comes_back_with_a_checkpoint_and_one_without_it_still_loads():
    made, again = all_in(grpo(), bonus=None), all_in(grpo(), bonus=None)
    lived(made, [group(1.0, 0.0), group(5.0, 0.0)])
    again.load_state_dict(made.state_dict())
    assert again.imitation.history == made.imitation.history
    assert again.imitation.history.typical_std == made.imitation.history.typical_std
    old = made.state_dict()
    del old["imitation"]["history"]["stds"]
    old["imitation"]["buffer"]["items"] = [entry[:3] for entry in old["imitation"]["buffer"]["items"]]
    again.load_state_dict(old)
    assert stored_rewards(again) == [1.0, 5.0]
    assert again.imitation.draw(1, random.Random(0), num_played=4).turn_advantages


# -- capacity in turns --------------------------------------------------------------------------------------------


def long_win(number: int, num_turns: int):
    """A win whose turns say who they are."""
    turns = [turn(float(n == num_turns - 1), tokens=[100 * number + n + 1]) for n in range(num_turns)]
    return episode(*turns)


def test_when_full_fires_by_turns_where_turns_are_counted():
    """Ten wins of seven turns: more than 1.5 times 20 turns, and far from 20 episodes."""
    played = [group(*(long_win(n, 7) for n in range(10)), *[0.0] * 10)]
    for unit, fires in (("turns", 1.0), ("episodes", 0.0)):
        made = spear(grpo(), bonus=None, imitation=1.0, capacity=40, draw_when="when_full", unit=unit)
        terms, metrics = lived(made, played, NOTHING)
        assert metrics[1]["replay/fired"] == fires
        if unit == "turns":
            assert metrics[1]["replay/turns"] == 40
            tokens = trained_tokens(replayed(terms[1]))
            assert len(tokens) == len(set(tokens)) == 40
            assert replayed(terms[1])[0].weight == 1.0
            assert len(made.imitation.buffer) == 0


@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 12), seeds)
def test_when_full_takes_capacity_turns_once_more_than_half_as_many_again_qualify(lengths, capacity, seed):
    made = spear(grpo(), bonus=None, imitation=1.0, capacity=capacity, draw_when="when_full", unit="turns")
    made.imitation.observe(NOTHING)
    winners = [long_win(n, length) for n, length in enumerate(lengths)]
    made.imitation.keep([group(*winners, 0.0)], [[]] * (len(winners) + 1), 0)
    held = list(made.imitation.buffer.items)
    kept = sum(len(stored.item.trajectory.turns) for stored in held)
    assert kept <= 2 * capacity
    assert [s.item.trajectory for s in held] == winners[len(winners) - len(held) :]
    longer = lengths[len(lengths) - len(held) - 1] if len(held) < len(lengths) else 0
    assert not longer or kept + longer > 2 * capacity  # nothing is forgotten that fits
    replay = made.imitation.draw(1, random.Random(seed), num_played=1)
    taken = sum(why.count("") for why in replay.dropped)
    assert taken == (capacity if kept > 1.5 * capacity else 0)
    assert replay.metrics["replay/eligible_turns"] == kept


def test_turns_that_are_not_replayed_do_not_count():
    made = spear(grpo(), bonus=None, imitation=1.0, capacity=2, draw_when="when_full", unit="turns")
    clumsy = episode(*[turn(invalid="no_action")] * 9, turn(1.0, tokens=[7]))
    terms, metrics = lived(made, [group(clumsy, clumsy, clumsy, 0.0)], NOTHING)
    assert metrics[1]["replay/eligible_turns"] == 3
    terms, _ = lived(made, [group(*[clumsy] * 4, *[0.0] * 4)], NOTHING)
    assert trained_tokens(replayed(terms[1])) == [7, 7]


def test_a_step_of_the_papers_size_fills_its_preset():
    """32 tasks of 8 episodes; a third of them are won in 12 turns: after five steps the authors' code has fired."""
    made = algorithm_of(load("paper-alfworld", ["algorithm.imitation.draw=when_full", "algorithm.max_length=9"]))
    won = episode(*[turn()] * 11, turn(10.0))
    played = [group(*[won] * 3, *[0.0] * 5)] * 32
    _, metrics = lived(made, *[played] * 5)
    assert any(m["replay/fired"] for m in metrics)
    assert {m["replay/turns"] for m in metrics if m["replay/fired"]} == {2048}


# -- covariance about the means of all rows -----------------------------------------------------------------------


def rows(advantages: list[float], logprobs: list[float], **options) -> LossInputs:
    """One row per token."""
    column = torch.tensor(logprobs, dtype=torch.float64)[:, None]
    return LossInputs(
        column, column.clone(), torch.tensor(advantages, dtype=torch.float64)[:, None], column < 1, **options
    )


numbers = st.lists(st.tuples(st.floats(-5, 5), st.floats(-8, 0)), min_size=1, max_size=9)


@quick
@given(numbers, numbers)
def test_joint_means_are_those_of_all_rows_and_own_ones_of_ones_own(policy, replay):
    beside, both = rows(*map(list, zip(*policy, strict=True))), [*policy, *replay]
    own = rows(*map(list, zip(*replay, strict=True)), beside=beside)
    for joint, known in ((True, both), (False, replay)):
        advantage, logprob = (references.mean([pair[i] for pair in known]) for i in range(2))
        expected = [(a - advantage) * (x - logprob) for a, x in replay]
        assert token_covariance(own, joint=joint)[:, 0].tolist() == pytest.approx(expected, abs=1e-9)


def test_equal_advantages_are_clipped_only_about_joint_means():
    replay, beside = ([2.0] * 10, [-0.1] * 5 + [-4.0] * 5), rows([-3.0] * 10, [-2.0] * 10)
    for joint, some in ((False, 0.0), (True, 0.2)):
        clip = CovarianceClip(fraction=0.2, low=0.5, high=60.0, joint_means=joint)
        out = ClippedSurrogate(covariance=clip)(rows(*replay, beside=beside))
        assert float(out.metrics["covariance_clip_fraction"]) == pytest.approx(some)
        penalty = ClippedSurrogate(covariance=replace(clip, kind="kl"))(rows(*replay, beside=beside))
        assert penalty.loss.isfinite()


@pytest.mark.parametrize("joint", [False, True])
def test_the_engine_shows_replay_the_rows_it_shares_an_update_with_and_reports_what_was_clipped(make_engine, joint):
    clip = CovarianceClip(fraction=0.5, low=0.0, high=1e9, joint_means=joint)
    made = all_in(dr_grpo(), bonus=None, covariance=clip)
    words = [turn(1.0, tokens=[3, 4, 5]), turn(tokens=[6, 7]), turn(tokens=[4, 4])]
    played, engine, rng = [group(*map(episode, words), 0.0)], make_engine(learning_rate=0.0), random.Random(0)
    for step in range(2):
        metrics = train_step(step, collect=lambda _: played, algorithm=made, engine=engine, rng=rng)
    assert metrics["replay/trajectories"] == 1
    assert (metrics["replay/covariance_clip_fraction"] > 0) == joint


def test_verls_rows_are_clipped_about_the_same_means():
    clip = CovarianceClip(fraction=0.5, low=0.0, high=1e9, joint_means=True)
    made = all_in(dr_grpo(), bonus=None, covariance=clip)
    words = [turn(1.0, tokens=[3, 4, 5]), turn(tokens=[6, 7])]
    terms, _ = lived(made, [group(*map(episode, words), 0.0)], [group(*map(episode, words), 0.0)])
    spread = torch.linspace(-1.5, -0.5, terms[1][1].batch.mask.shape[1])
    scores = [torch.where(term.batch.mask, spread, 0.0) for term in replayed(terms[1])]
    [[policy, held]], metrics = with_clipped_replay([terms[1]], lambda _: scores)
    assert policy is terms[1][0]
    assert metrics["covariance_clip_fraction"] > 0
    alone, nothing = with_clipped_replay([replayed(terms[1])], lambda _: scores)
    assert nothing["covariance_clip_fraction"] == 0
    assert torch.equal(alone[0][0].batch.advantages, replayed(terms[1])[0].batch.advantages)
    assert not torch.equal(held.batch.advantages, replayed(terms[1])[0].batch.advantages)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_one_sentence_and_neither_trains_nor_is_stored(reward):
    algorithm = spear(grpo(), imitation=1.0)
    engine, broken = RecordingEngine(None, [""]), [group(1.0, 0.0), group(reward, 0.0)]
    with pytest.raises(ValueError, match="not all of them finite"):
        train_step(0, collect=lambda _: broken, algorithm=algorithm, engine=engine, rng=random.Random(0))
    assert not engine.updates
    assert not algorithm.imitation.buffer.items


@pytest.mark.parametrize("priority", [(), ("fresh",), ("confident", "rare")])
@pytest.mark.parametrize("off", [{"imitation": 0.0}, {"imitation": 1.0, "fraction": 0.0}])
def test_a_replay_of_nothing_takes_no_random_number_from_the_base(off, priority):
    """Mini-batches are drawn from the same stream."""
    played = [[group(1.0, 0.0, 0.5), group(0.25, 1.0, 0.0)] for _ in range(4)]
    (base, _), (own, _) = (
        lived(algorithm, *played, num_minibatches=3)
        for algorithm in (grpo(), spear(grpo(), bonus=None, priority=priority, **off))
    )
    assert [len(terms) for terms in own] == [len(terms) for terms in base]
    for one, other in zip(itertools.chain(*own), itertools.chain(*base), strict=True):
        assert torch.equal(one.batch.advantages, other.batch.advantages)
        assert torch.equal(one.batch.input_ids, other.batch.input_ids)


def test_a_checkpoint_holds_no_numbers_of_numpy(tmp_path):
    def above_half(groups):
        return [np.full(len(t.turns), t.score - 0.5) for g in groups for t in g.trajectories]

    algorithm = spear(replace(grpo(), advantages=above_half))
    lived(algorithm, [group(0.0, 1.0)])
    assert len(algorithm.imitation.buffer) == 1
    torch.save(algorithm.state_dict(), tmp_path / "state.pt")
    assert str(torch.load(tmp_path / "state.pt", weights_only=True)) == str(algorithm.state_dict())
