"""What enters the replay buffer, what of it trains again and how much it weighs: through the training step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import references
from conftest import RecordingEngine
from references import episode, group, turn
from spear_rl.algorithms import BASES, ToolBonus, dr_bot, dr_grpo, gigpo, grpo, rloo, spear
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
