"""What the check for authors finds, and what it lets pass."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from spear_rl.app.init import begin
from spear_rl.envs import ENVIRONMENTS
from spear_rl.envs.lookup import LookupEnv
from spear_rl.envs.lookup import tasks as lookup_tasks
from spear_rl.errors import ConfigError
from spear_rl.rollout import Observation, StepResult, Task
from spear_rl.testing import Timing, check_environment, check_panels, check_tasks, loaded_tasks, notes_on

PAGE = Path(__file__).parent.parent / "docs" / "new_environment.md"


@pytest.mark.parametrize("env", ["household", "lookup"])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_our_environments_pass(env, split):
    timing = Timing()
    assert check_environment(ENVIRONMENTS[env](split), in_worker=split == "train", timing=timing) == []
    assert 0 < timing.step_ms < 50


@pytest.mark.parametrize("env", ["household", "lookup"])
def test_our_panels_pass(env):
    assert check_panels(ENVIRONMENTS[env]) == []


def test_everything_is_checked_at_once_and_a_missing_split_does_not_hide_the_rest():
    def odd(split):
        if split == "test":
            raise KeyError(split)
        return [replace(task(Mute), id=f"mute/{split}")]

    assert check_tasks(odd) == [
        "the split test is missing: tasks('test') raised KeyError: 'test'",
        "mute/train and 1 more: the first observation has no text: the policy would have nothing to answer to",
    ]


class Plain(LookupEnv):
    """A lookup with room for faults: `__slots__` keeps them out of the original."""


class Moody(Plain):
    mood = itertools.count()

    def reset(self):
        super().reset()
        return Observation(f"mood {next(self.mood)}")


class Fragile(Plain):
    def step(self, action):
        return super().step(action.encode("ascii").decode())


class Generous(Plain):
    def step(self, action):
        return replace(super().step(action), reward=1.0)


class Forgiving(Plain):
    """Pays for what it calls invalid, though not at the start."""

    def step(self, action):
        result = super().step("look")
        self.count = getattr(self, "count", 0) + 1
        return replace(result, invalid="no_action", reward=float(self.count > 2))


class Undead(Plain):
    def step(self, action):
        result = super().step(action)
        self._is_over = False
        return result


class Confused(Plain):
    def step(self, action):
        return replace(super().step(action), invalid="inadmissible" if action == "look" else "")


class Numeric(Plain):
    def step(self, action):
        return replace(super().step(action), reward=None)


class Undecided(Plain):
    def step(self, action):
        return replace(super().step(action), done=1)


class Listing(Plain):
    def reset(self):
        return replace(super().reset(), choices="look")


class Mute(Plain):
    def reset(self):
        return replace(super().reset(), text=" ")


class Textual(Plain):
    def reset(self):
        return super().reset().text


class Stubborn(Plain):
    def close(self):
        raise OSError("no")


class Slow(Plain):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


class Walk:
    """Goes on; `keys` says what its state keys are."""

    def __init__(self, keys: str) -> None:
        self._keys, self._taken = keys, 0

    def _seen(self):
        key = {"constant": "here", "counting": str(self._taken)}[self._keys]
        return Observation("nothing happens" if self._keys == "counting" else f"step {self._taken}", state_key=key)

    def reset(self):
        return self._seen()

    def step(self, action):
        self._taken += 1
        return StepResult(self._seen(), invalid="no_action")

    def close(self):
        pass


class Shared(Plain):
    """All episodes count together, which shows only when two are played at once."""

    count = 0

    def reset(self):
        Shared.count = 0
        return super().reset()

    def step(self, action):
        Shared.count += 1
        result = super().step("look")
        return replace(result, observation=Observation(f"count {Shared.count}"))


class HashOrder(Plain):
    """The order of a set of texts is another one in another process."""

    def reset(self):
        return replace(super().reset(), text=" ".join({f"word {number}" for number in range(50)}))


ONE = Plain("red", "1")


def one_env():
    return ONE


def task(make, **fields) -> Task:
    return Task("a", make if callable(make) and not isinstance(make, type) else partial(make, "red", "1"), **fields)


@pytest.mark.parametrize(
    ("tasks", "fault"),
    [
        ([], "no task at all"),
        ([task(Plain)] * 2, "occurs 2 times"),
        ([task(lambda: Plain("red", "1"))], "does not pickle"),
        ([task(Moody)], "deterministic"),
        ([task(Fragile)], "UnicodeEncodeError"),
        ([task(Generous)], "saying '' at the start is rewarded"),
        ([task(Forgiving)], "a turn it calls invalid is rewarded"),
        ([task(Undead)], "a step after the end goes on"),
        ([task(Confused)], "it lists 'look' among its choices and calls 'look' invalid"),
        ([task(Numeric)], "Numeric.step returned a StepResult whose reward is None, not a finite number"),
        ([task(Undecided)], "Undecided.step returned a StepResult whose done is 1, not True or False"),
        ([task(Listing)], "Listing.reset returned an Observation whose choices is 'look', not a tuple of texts"),
        ([task(Mute)], "the first observation has no text"),
        ([task(Textual)], "Textual.reset returned 'red code ?', not an Observation"),
        ([task(Stubborn)], "close raised OSError"),
        ([task(Shared)], "two episodes played at the same time disturb each other"),
        ([task(one_env)], "the same object twice"),
        ([task(partial(Walk, "constant"))], "its state_key is 'here' whatever happens"),
        ([task(partial(Walk, "counting"))], "state_key changes when nothing happens"),
        ([task(Plain, answer_format="action")], "answer_format is 'action', not a text with {action} in it"),
        ([task(Plain, demonstrate=lambda seed: ["2"])], "none of 3 demonstrations solved"),
        (
            [task(Plain, demonstrate=lambda seed: [" "])],
            "its expert says ' ', which the game calls invalid (no_action)",
        ),
        ([task(Plain, demonstrate=lambda seed: "look")], "demonstrate(0) returned 'look', not a list of texts"),
        ([task(Plain, demonstrate=lambda seed: [str(next(Moody.mood))])], "different actions for the same seed"),
        ([task(Plain, demonstrate=lambda seed: 1 / 0)], "demonstrate(0) raised ZeroDivisionError"),
        ([replace(task(Mute), id=name) for name in "abc"], "a and 2 more: the first observation"),
    ],
)
def test_a_fault_is_named(tasks, fault):
    faults = check_environment(tasks, max_turns=5)
    assert any(fault in found for found in faults), faults
    assert all("\n" not in found for found in faults)


def test_a_slow_step_is_named_with_its_time(monkeypatch):
    monkeypatch.setattr("spear_rl.testing.MAX_STEP_MS", 5.0)
    [fault] = check_environment([task(Slow)])
    assert re.match(r"a step takes \d+ ms on average", fault)
    assert check_environment([task(Plain)]) == []


def test_what_differs_between_processes_is_named():
    [fault] = check_environment([task(HashOrder)], in_worker=True)
    assert "another process gave different answers" in fault


def test_what_only_this_process_can_make_is_named(monkeypatch):
    monkeypatch.setattr(Plain, "__module__", "no_such_module")
    monkeypatch.setitem(__import__("sys").modules, "no_such_module", __import__("sys").modules[__name__])
    [fault] = check_environment([task(Plain)], in_worker=True)
    assert "cannot be played in a worker process" in fault
    assert "no_such_module" in fault


def test_faults_of_panels_are_named():
    def shared(split, *, num=2):
        return lookup_tasks("train")[:num]

    def one_split(split):
        if split != "train":
            raise KeyError(split)
        return lookup_tasks("train")

    calls = itertools.count()

    def restless(split):
        return lookup_tasks(split)[:: -1 if next(calls) % 2 else 1]

    assert "train and validation share 2 tasks, lookup/train/000 for one" in check_panels(shared)
    assert check_panels(one_split)[0].startswith("the split validation is missing: tasks('validation') raised KeyError")
    assert "the split train came in another order" in check_panels(restless)[0]
    assert check_panels(partial(shared, num=0)) == [
        f"the split {split} has no task" for split in ("train", "validation", "test")
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("my_game", "write package.module:function"),
        ("no_such_game:tasks", "there is no module no_such_game"),
        ("spear_rl.no_such_game:tasks", "there is no module spear_rl.no_such_game"),
        ("needy_game:tasks", "importing needy_game needs no_such_package, which is not installed"),
        ("broken_game:tasks", "importing broken_game raised ZeroDivisionError"),
        ("spear_rl.envs.lookup:no_tasks", "the module spear_rl.envs.lookup has no no_tasks"),
        ("spear_rl.envs.lookup:SPLITS", "SPLITS is no function but dict"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_ends(name, sentence, tmp_path, monkeypatch):
    (tmp_path / "needy_game.py").write_text("import no_such_package")
    (tmp_path / "broken_game.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        loaded_tasks(name)
    assert sentence in str(error.value)


def test_a_name_leads_to_its_function():
    assert loaded_tasks("spear_rl.envs.lookup:tasks") is lookup_tasks


def test_the_environment_of_the_page_is_what_init_writes_short_and_passes(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(1 for line in code.splitlines() if line.strip() and not line.strip().startswith("#")) <= 70
    monkeypatch.chdir(tmp_path)
    begin("environment", "guess_number")
    assert Path("guess_number.py").read_text() == code
    timing = Timing()
    for options in ({}, {"highest": 20}):
        assert check_tasks(loaded_tasks("guess_number:tasks"), options=options, timing=timing) == []
    assert len(timing.resets) > 100
    assert notes_on(timing) == []


@pytest.mark.slow
def test_the_page_is_true_from_its_first_command_to_a_doubled_success(tmp_path, monkeypatch, spear):
    """Every command of the page, as written but for fewer steps and held-out tasks."""
    monkeypatch.chdir(tmp_path)
    elsewhere = [folder for folder in sys.path if not Path(folder, "guess_number.py").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *elsewhere])
    monkeypatch.delitem(sys.modules, "guess_number", raising=False)
    commands = re.findall(
        r"^spear (.*)$", "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)), re.M
    )
    assert [command.split()[0] for command in commands] == ["init", "check-env", "train", "show", "eval"]
    printed = {}
    for command in commands:
        verb, *words = command.split()
        code, printed[verb] = spear(verb, *words, *(["run.steps=15", "eval.tasks=100"] if verb == "train" else []))
        assert code == 0, f"{command}: {printed[verb]}"
    assert "warning" not in printed["train"]
    assert "no fault found" in printed["check-env"]
    assert "> ask " in printed["show"] or "> say " in printed["show"]
    assert "mean questions" in printed["eval"]
    curve = [json.loads(line)["success"] for line in Path("runs/guess/eval.jsonl").read_text().splitlines()]
    assert len(curve) == 3  # before, at 10, after
    assert curve[-1] >= 2 * curve[0] > 0


class Toolless(Plain):
    def step(self, action):
        return replace(super().step(action), used_tool=False)


def test_an_environment_whose_turns_never_use_a_tool_is_told_that_the_bonus_pays_nothing():
    timing = Timing()
    assert notes_on(timing) == []  # nothing was played
    assert check_environment([task(Toolless)], timing=timing) == []
    [note] = notes_on(timing)
    assert note.startswith("no turn ever used a tool: the bonus will pay nothing")
    check_environment([task(Plain)], timing=timing)
    assert notes_on(timing) == []


def test_a_note_is_no_fault_on_the_command_line(tmp_path, monkeypatch, spear):
    begin_in = tmp_path / "without_tools.py"
    monkeypatch.chdir(tmp_path)
    begin("environment", "without_tools")
    begin_in.write_text(begin_in.read_text().replace("used_tool=True, ", ""))
    code, text = spear("check-env", "without_tools:tasks")
    assert code == 0
    assert text.startswith("note: no turn ever used a tool: the bonus will pay nothing")


class Talkative(Plain):
    """Raises with other words in every task and at every turn."""

    def step(self, action):
        raise ValueError(f"cannot {action[:3]!r} in game {id(self)}")


def numbered(make, count: int, split: str = "a") -> list[Task]:
    return [replace(task(make), id=f"{split}/{number}") for number in range(count)]


@pytest.mark.parametrize(
    ("make", "words"), [(Talkative, "ValueError"), (Generous, "at the start is rewarded"), (Moody, "different")]
)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_fault_of_many_tasks_turns_and_splits_is_one_line_with_a_count(make, words, count):
    def tasks(split):
        return numbered(make, count, split)

    lines = check_tasks(tasks)
    assert sum(words in line for line in lines) == 1, lines
    [line] = [line for line in lines if words in line]
    assert line.startswith(f"train/0 and {3 * count - 1} more: ")


def test_faults_of_different_kinds_stay_apart():
    lines = check_environment(
        [*numbered(Mute, 2, "mute"), *numbered(Stubborn, 2, "stubborn"), *numbered(Numeric, 1, "n")]
    )
    assert sorted(line.split(":")[0] for line in lines) == ["mute/0 and 1 more", "n/0", "stubborn/0 and 1 more"]


@pytest.mark.parametrize("make", [Moody, HashOrder])
def test_what_is_lost_without_determinism_is_said(make):
    [fault] = check_environment([task(make)], in_worker=True)
    for lost in ("neither repeats nor resumes bit for bit", "cannot be replayed", "GiGPO"):
        assert lost in fault


def test_a_panel_whose_games_change_when_it_is_made_again_is_named():
    digits = itertools.cycle("1234567")

    def drifting(split):
        return [Task(f"{split}/{n}", partial(Plain, "red", next(digits))) for n in range(5)]

    [fault] = check_tasks(drifting)
    assert "made again by `tasks`, it gives different answers to the same actions" in fault
    assert "bit for bit" in fault
