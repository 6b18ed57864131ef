"""Environments and a policy that streams: whatever is ready goes on, and results do not depend on what was."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from spear_rl.envs.lookup import tasks as lookup_tasks
from spear_rl.rollout import (
    ChatRenderer,
    InProcess,
    Lockstep,
    Observation,
    StepResult,
    Task,
    collect_groups,
    growing_chat,
)
from spear_rl.types import Completion, Stop


class Walk:
    """Needs as many turns as its number says; every answer depends on everything said so far."""

    def __init__(self, number: int) -> None:
        self._number, self._said = number, ""

    def reset(self) -> Observation:
        return Observation(f"red code {self._number}", state_key="start")

    def step(self, action: str) -> StepResult:
        self._said += action
        done = len(self._said) >= 3 + self._number % 5
        return StepResult(Observation(f"said {self._said}", self._said), reward=float(done), done=done)

    def close(self) -> None:
        pass


WALKS = [Task(f"walk/{number}", partial(Walk, number)) for number in range(6)]


class Digits:
    """Says a digit that depends on the key and on how often that key was asked, as a seeded policy does."""

    def __init__(self, tokenizer, rng: random.Random, slots: int = 3) -> None:
        self._tokenizer, self._rng, self._slots = tokenizer, rng, slots
        self._asked: dict[int, int] = {}
        self._waiting: list[tuple[int, Completion]] = []
        self.most = 0

    def stream(self) -> Digits:
        return self

    def generate(self, prompts):
        raise AssertionError("a generator that streams is never asked for a batch")

    def add(self, key: int, prompt: list[int]) -> None:
        number = self._asked[key] = self._asked.get(key, -1) + 1
        ids = self._tokenizer.encode(str((key * 7 + number * 3) % 10), add_special_tokens=False)
        self._waiting.append((key, Completion([*ids, self._tokenizer.eos_token_id], [0.0] * (len(ids) + 1))))
        self.most = max(self.most, len(self._waiting))

    def finished(self):
        """A random few of what is under way, in a random order."""
        self._rng.shuffle(self._waiting)
        count = min(self._rng.randint(1, self._slots), len(self._waiting))
        done, self._waiting = self._waiting[:count], self._waiting[count:]
        return done

    def __len__(self) -> int:
        return len(self._waiting)


class Late(InProcess):
    """Answers that come late and in any order, as from other processes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng, self.asked_for = rng, []

    def answers(self, at_least: int):
        self.asked_for.append((at_least, len(self)))
        ready = super().answers(at_least)
        self._rng.shuffle(ready)
        count = self._rng.randint(min(at_least, len(ready)), len(ready))
        self._ready = ready[count:]
        return ready[:count]


def played(tokenizer, generator, **options):
    options = {"group_size": 4, "max_turns": 6, "step": 0, "layout": partial(growing_chat, detail="short")} | options
    return collect_groups(WALKS, generator=generator, renderer=ChatRenderer(tokenizer), **options)


def test_results_do_not_depend_on_the_order_in_which_episodes_finish(tokenizer):
    first = played(tokenizer, Digits(tokenizer, random.Random(0)))
    assert {t.stop for group in first for t in group.trajectories} == {Stop.DONE, Stop.MAX_TURNS}
    for seed in range(1, 20):
        rng = random.Random(seed)
        generator = Digits(tokenizer, rng, slots=rng.randint(1, 30))
        envs = Late(rng) if seed % 2 else None
        assert played(tokenizer, generator, envs=envs) == first


def test_prompts_are_added_while_others_are_being_written(tokenizer):
    generator, envs = Digits(tokenizer, random.Random(0)), Late(random.Random(1))
    played(tokenizer, generator, envs=envs)
    assert generator.most > 3
    assert any(at_least == 0 and due for at_least, due in envs.asked_for), "the policy waited for an environment"
    assert all(at_least <= 1 for at_least, _ in envs.asked_for)


def test_a_batch_generator_waits_for_all_and_gets_the_living_in_their_order(tokenizer):
    calls = {}

    class Batches:
        def __init__(self, name) -> None:
            self._calls = calls.setdefault(name, [])

        def generate(self, prompts):
            self._calls.append([list(prompt) for prompt in prompts])
            ids = [tokenizer.encode(str(len(self._calls) % 10), add_special_tokens=False) for _ in prompts]
            return [Completion(one, [0.0] * len(one)) for one in ids]

    envs = Late(random.Random(3))
    results = [played(tokenizer, Batches("here")), played(tokenizer, Batches("late"), envs=envs)]
    assert results[0] == results[1]
    assert calls["here"] == calls["late"]
    assert [len(call) for call in calls["here"]] == [24, 24, 24, 16, 12, 8]
    assert all(at_least == due for at_least, due in envs.asked_for)


def test_lockstep_writes_what_was_asked_for_together_and_nothing_when_nothing_was():
    class Echo:
        def generate(self, prompts):
            assert prompts
            return [Completion(list(prompt), [0.0] * len(prompt)) for prompt in prompts]

    stream = Lockstep(Echo())
    assert (stream.finished(), len(stream)) == ([], 0)
    stream.add(5, [1])
    stream.add(2, [7, 8])
    assert len(stream) == 2
    assert [(key, completion.token_ids) for key, completion in stream.finished()] == [(5, [1]), (2, [7, 8])]
    assert len(stream) == 0


def test_an_environment_is_closed_as_soon_as_its_episode_is_over_and_also_when_generation_breaks(tokenizer):
    events: list[str] = []

    class Noted(Walk):
        def close(self) -> None:
            events.append("closed")

    class Broken:
        def generate(self, prompts):
            events.append(f"asked {len(prompts)}")
            if len(prompts) < 4:
                raise KeyboardInterrupt
            return [Completion(tokenizer.encode("7", add_special_tokens=False), [0.0])] * len(prompts)

    tasks = [Task(f"walk/{number}", partial(Noted, number)) for number in (0, 1, 1, 2)]
    with pytest.raises(KeyboardInterrupt):
        collect_groups(tasks, group_size=1, generator=Broken(), renderer=ChatRenderer(tokenizer), max_turns=9, step=0)
    assert events == ["asked 4"] * 3 + ["closed", "asked 3"] + ["closed"] * 3


def test_an_environment_that_goes_another_way_when_replayed_is_a_failure_not_a_mixture(tokenizer, caplog):
    made: list[int] = []

    class Moody(Walk):
        def __init__(self) -> None:
            made.append(len(made))
            super().__init__(0)
            self._mood = made[-1]

        def step(self, action: str) -> StepResult:
            if self._mood == 0 and len(self._said) == 2:
                raise OSError("the wire came off")
            result = super().step(action)
            return replace(result, observation=Observation(f"mood {self._mood}"))

    group = collect_groups(
        [Task("moody", Moody), lookup_tasks("train")[0]],
        group_size=1,
        generator=Digits(tokenizer, random.Random(0)),
        renderer=ChatRenderer(tokenizer),
        max_turns=4,
        step=0,
    )[0]
    assert (group.num_failed, group.trajectories) == (1, [])
    assert "did not repeat itself at answer 1" in caplog.text
