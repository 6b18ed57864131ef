"""Each reason not to train on a turn against a plain search for it."""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from references import episode, group, turn
from spear_rl.algorithms import dr_bot, dr_grpo, gigpo, grpo
from spear_rl.algorithms.base import Algorithm
from spear_rl.algorithms.filters import flat, overlong, repetitive, unreadable, void
from spear_rl.rollout.env import INADMISSIBLE
from spear_rl.types import Group, Turn

quick = settings(max_examples=60, deadline=None)


def turns_of(groups: list[Group]) -> list[list[Turn]]:
    return [t.turns for g in groups for t in g.trajectories]


@quick
@given(st.lists(st.lists(st.lists(st.booleans(), max_size=4), max_size=3), max_size=3))
def test_a_turn_that_hit_its_token_limit_is_overlong(pattern):
    groups = [group(*(episode(*(turn(truncated=cut) for cut in t)) for t in g)) for g in pattern]
    assert overlong(groups) == [["overlong" if cut else "" for cut in t] for g in pattern for t in g]


@quick
@given(references.groups)
def test_a_turn_without_a_well_formed_action_is_void(groups):
    expected = [["void" if u.invalid == "no_action" else "" for u in played] for played in turns_of(groups)]
    assert void(groups) == expected


def test_an_action_the_world_refused_is_not_void():
    played = episode(turn(), turn(invalid=INADMISSIBLE), turn(invalid="unclosed_tag"))
    assert void([group(played)]) == [["", "", "void"]]


# -- repetition ---------------------------------------------------------------------------------------------------


def most_frequent_run(ids: list[int], length: int) -> int:
    best = 0
    for start in range(len(ids) - length + 1):
        times = 0
        for other in range(len(ids) - length + 1):
            if ids[start : start + length] == ids[other : other + length]:
                times += 1
        best = max(best, times)
    return best


@quick
@given(st.lists(st.integers(0, 1), max_size=14), st.integers(1, 4), st.integers(1, 5))
def test_a_turn_is_repetitive_when_some_run_of_tokens_comes_often(ids, length, count):
    expected = "repetitive" if most_frequent_run(ids, length) >= count else ""
    assert repetitive([group(episode(turn(tokens=ids)))], length=length, count=count) == [[expected]]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([5] * 28, ""),
        ([5] * 29, "repetitive"),
        ([*range(20), 99] * 9 + [*range(19)], ""),
        ([*range(20), 99] * 9 + [*range(20)], "repetitive"),
        (list(range(1000)), ""),
        ([*range(19), 99] * 2, ""),
        ([], ""),
    ],
)
def test_twenty_tokens_ten_times_is_the_limit(ids, reason):
    assert repetitive([group(episode(turn(tokens=ids)))]) == [[reason]]


def test_separators_that_differ_leave_a_run_a_run():
    ids: list[int] = []
    for number in range(10):
        ids += [*range(20), 1000 + number]
    assert repetitive([group(episode(turn(tokens=ids), turn(tokens=ids[:-22])))]) == [["repetitive", ""]]


# -- readability --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go to shelf 1",
        "naïve café, Ünïcödé, Ça va? À bientôt, straße",
        "NÃO, MÂNCARE, pâté, FÊTE",
        "“quoted” – and a dash… 25 °C, 3 × 4 ≈ 12, x → y, π",
        "你好，世界 こんにちは 안녕하세요",
        "Привет, мир! Γειά σου",
        "😀 👍🏽 🏠",
        "tabs\tand\nlines\r\n",
    ],
)
def test_ordinary_text_of_any_language_is_readable(text):
    assert unreadable([group(episode(turn(text=text)))]) == [[""]]


@pytest.mark.parametrize("text", ["go \ufffd", "\ufffd\ufffd", "a\x9db"])
def test_text_with_lost_bytes_is_unreadable(text):
    assert unreadable([group(episode(turn(text=text), turn(text="fine")))]) == [["unreadable", ""]]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252"])
@pytest.mark.parametrize("character", [*"éàüöñçÉÜÖÄÇßøåÅêôî", "°", "£", "§", "×", "\u00a0", "’", "“", "–", "…", "😀"])
def test_text_read_with_the_wrong_encoding_is_unreadable(character, encoding):
    """What a reader sees when the UTF-8 bytes of a common character are taken for Latin-1 or Windows-1252."""
    text = f"look at {character.encode().decode(encoding)} now"
    assert unreadable([group(episode(turn(text=text)))]) == [["unreadable"]]


# -- flat groups --------------------------------------------------------------------------------------------------


def variance(values: list[float]) -> Fraction:
    if not values:
        return Fraction(0)
    center = sum(Fraction(v) for v in values) / len(values)
    return sum((Fraction(v) - center) ** 2 for v in values) / len(values)


def kept_groups(groups: list[Group], keep: Fraction) -> set[int]:
    """By repeatedly taking the widest group left, the earlier one between equals."""
    spreads = [variance([t.score for t in g.trajectories]) for g in groups]
    left, kept = list(range(len(groups))), set()
    for _ in range(math.ceil(keep * len(groups))):
        widest = left[0]
        for i in left:
            if spreads[i] > spreads[widest]:
                widest = i
        left.remove(widest)
        if spreads[widest] > 0:
            kept.add(widest)
    return kept


# Quarters only: their variances are exact, so that two equal spreads are equal.
few_rewards = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(few_rewards, max_size=9), st.sampled_from([0.75, 0.5, 0.25, 1.0, 0.0]))
def test_the_groups_with_the_widest_spread_train_and_the_flat_never_do(rewards, keep):
    groups = [group(*siblings) for siblings in rewards]
    kept = kept_groups(groups, Fraction(keep))
    expected = [["" if i in kept else "flat_group"] for i, siblings in enumerate(rewards) for _ in siblings]
    assert flat(groups, keep=keep) == expected


@pytest.mark.parametrize(("num_groups", "num_kept"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (8, 6), (32, 24)])
def test_three_quarters_rounded_up_train_by_default(num_groups, num_kept):
    groups = [group(0.0, 1.0 + i) for i in range(num_groups)]
    reasons = flat(groups)
    dropped = num_groups - num_kept
    assert reasons == [["flat_group"]] * (2 * dropped) + [[""]] * (2 * num_kept)


def test_between_equal_spreads_the_earlier_group_trains():
    groups = [group(0.0, 1.0), group(5.0, 6.0), group(1.0, 0.0), group(0.0, 1.0)]
    assert flat(groups, keep=0.5) == [[""]] * 4 + [["flat_group"]] * 4


def test_a_group_of_one_is_flat():
    assert flat([group(episode(1.0, 2.0)), group(0.0, 1.0)]) == [["flat_group"] * 2, [""], [""]]


def test_spread_is_that_of_reward_and_bonus_together():
    level = group(episode(1.0), episode(0.0, bonus=1.0))
    wide = group(episode(1.0), episode(1.0, bonus=0.5))
    assert flat([level, wide]) == [["flat_group"], ["flat_group"], [""], [""]]


@pytest.mark.parametrize("level", [0.1, 0.7, 1 / 3, 10.1])
def test_equal_scores_are_flat_whatever_their_level(level):
    assert flat([group(*[level] * 7)], keep=1.0) == [["flat_group"]] * 7


def test_equal_rewards_in_another_order_are_flat():
    early, late = episode(1.0, -0.1, -0.1, -0.1), episode(-0.1, -0.1, -0.1, 1.0)
    assert flat([group(early, late)]) == [["flat_group"] * 4] * 2


def test_a_group_lost_to_the_machinery_is_no_trouble():
    lost = Group("lost", [], num_failed=2)
    assert flat([lost, group(0.0, 1.0)]) == [[""], [""]]
    assert [f([lost]) for f in (overlong, void, repetitive, unreadable, flat)] == [[]] * 5


# -- together -----------------------------------------------------------------------------------------------------

troubled = st.builds(
    turn,
    st.sampled_from([0.0, 1.0]),
    truncated=st.booleans(),
    invalid=st.sampled_from(["", "no_action", INADMISSIBLE]),
    tokens=st.sampled_from([[1, 2, 3], [7] * 40]),
    text=st.sampled_from(["fine", "\ufffd"]),
)
troubled_groups = st.lists(
    st.builds(
        lambda played: group(*(episode(*t) for t in played)),
        st.lists(st.lists(troubled, min_size=1, max_size=3), min_size=1, max_size=3),
    ),
    max_size=4,
)


@quick
@given(troubled_groups)
def test_the_first_reason_wins(groups):
    kept = kept_groups(groups, Fraction(3, 4))
    expected = []
    for i, g in enumerate(groups):
        for t in g.trajectories:
            reasons = []
            for u in t.turns:
                if u.completion.truncated:
                    reasons.append("overlong")
                elif u.invalid == "no_action":
                    reasons.append("void")
                elif len(u.completion.token_ids) == 40:
                    reasons.append("repetitive")
                elif u.text == "\ufffd":
                    reasons.append("unreadable")
                else:
                    reasons.append("" if i in kept else "flat_group")
            expected.append(reasons)
    assert dr_bot(grpo()).dropped(groups) == expected
    assert grpo().dropped(groups) == [[""] * len(t.turns) for g in groups for t in g.trajectories]


@quick
@given(troubled_groups, st.permutations([overlong, void, repetitive, unreadable, flat]))
def test_the_order_of_filters_decides_whose_reason_is_told(groups, filters):
    base = grpo()
    algorithm = dataclasses.replace(base, filters=tuple(filters))
    opinions = [f(groups) for f in filters]
    for n, reasons in enumerate(algorithm.dropped(groups)):
        for m, reason in enumerate(reasons):
            told = [opinion[n][m] for opinion in opinions if opinion[n][m]]
            assert reason == (told[0] if told else "")


def test_filters_of_the_base_come_before_those_of_dr_bot():
    base: Algorithm = dataclasses.replace(
        grpo(), filters=(lambda groups: [["mine"] * len(t.turns) for g in groups for t in g.trajectories],)
    )
    assert dr_bot(base).dropped([group(episode(turn(truncated=True)))]) == [["mine"]]


@quick
@given(references.groups, st.integers(0, 10**6))
def test_a_dropped_turn_changes_no_advantage_and_its_episode_still_counts_in_the_mean(groups, seed):
    """Cutting completions short makes turns overlong and leaves rewards as they are."""
    rng = random.Random(seed)
    spoilt = [
        dataclasses.replace(
            g,
            trajectories=[
                dataclasses.replace(
                    t,
                    turns=[
                        dataclasses.replace(
                            u, completion=dataclasses.replace(u.completion, truncated=rng.random() < 0.5)
                        )
                        for u in t.turns
                    ],
                )
                for t in g.trajectories
            ],
        )
        for g in groups
    ]
    for base in (grpo(), dr_grpo(), gigpo()):
        algorithm = dr_bot(base)
        assert algorithm.advantages(spoilt) == algorithm.advantages(groups)
    values = references.group_relative(*references.scores(groups), divide_by_std=False)
    got = dr_bot(grpo()).advantages(spoilt)
    assert [row[0] for row in got] == pytest.approx(values, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize(("keep", "num_groups"), [(0.55, 20), (0.28, 25), (0.07, 100), (0.75, 8)])
def test_rounding_keeps_no_group_more_than_the_share(keep, num_groups):
    """0.28 * 25 is a little more than 7 in floating point."""
    groups = [group(float(n), 0.0) for n in range(1, num_groups + 1)]
    kept = sum(reasons == [""] for reasons in flat(groups, keep=keep)) // 2
    assert kept == math.ceil(Fraction(str(keep)) * num_groups)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_one_sentence(reward):
    with pytest.raises(ValueError, match=r"task '.*': its episodes have the rewards .*, not all of them finite"):
        flat([group(1.0, 0.0), group(reward, 0.0)])
