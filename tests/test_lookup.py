"""The lookup toy."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.envs import lookup


def test_looking_shows_the_digit_and_saying_it_wins() -> None:
    for task in lookup.tasks("train"):
        env = task.make_env()
        first = env.reset()
        assert first.text == f"{task.family} code ?"
        seen = env.step("look")
        assert (seen.reward, seen.done, seen.used_tool) == (0.0, False, True)
        assert seen.observation.state_key != first.state_key
        end = env.step(seen.observation.text.split()[-1])
        assert (end.reward, end.done, end.success) == (1.0, True, True)
        with pytest.raises(RuntimeError, match="reset"):
            env.step("look")


def test_demonstrations_look_about_half_the_time_and_guess_otherwise() -> None:
    rewards = []
    for task in lookup.tasks("train"):
        assert task.demonstrate is not None
        for seed in range(20):
            env = task.make_env()
            env.reset()
            commands = task.demonstrate(seed)
            assert commands == task.demonstrate(seed)
            rewards.append((len(commands), sum(env.step(command).reward for command in commands)))
    assert all(reward == 1 for length, reward in rewards if length == 2)
    assert 0.4 < sum(length == 2 for length, _ in rewards) / len(rewards) < 0.6
    assert (
        0.02
        < sum(reward for length, reward in rewards if length == 1) / sum(length == 1 for length, _ in rewards)
        < 0.25
    )


def test_splits_share_no_task_and_tasks_are_picklable() -> None:
    ids = [task.id for split in lookup.SPLITS for task in lookup.tasks(split)]
    assert len(ids) == len(set(ids)) == sum(lookup.SPLITS.values())
    task = lookup.tasks("test", num_digits=3, max_tasks=1)[0]
    assert pickle.loads(pickle.dumps(task)).make_env().reset() == task.make_env().reset()
    assert {task.family for task in lookup.tasks("train", families=["red"])} == {"red"}


@pytest.mark.parametrize("options", [{"split": "dev"}, {"families": ["pink"]}, {"num_digits": 11}])
def test_what_does_not_exist_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"dev|pink|11"):
        lookup.tasks(**options)  # type: ignore[arg-type]


@given(st.text())
def test_any_other_word_ends_the_episode_with_nothing(text: str) -> None:
    env = lookup.LookupEnv("red", "7")
    env.reset()
    result = env.step(text)
    assert result.done == (text.strip() != "look")
    assert result.reward == (text.strip() == "7")
