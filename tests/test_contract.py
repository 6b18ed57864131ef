"""Environments that break the rules: one sentence and no wrong number, in this process as in workers."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostile_games as hostile
from spear_rl.errors import UserError
from spear_rl.io.escaping import clipped, in_words
from spear_rl.rollout import ChatRenderer, InProcess, Observation, StepResult, Task, collect_groups, growing_chat
from spear_rl.rollout.collect import EpisodesFailedError
from spear_rl.rollout.contract import ContractError, checked_result
from spear_rl.rollout.tasks import panel_of
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.runner import expert_actions, is_plain_result
from test_stream import Digits

BOTH = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture(scope="module")
def pool():
    with Pool(num_workers=2, step_timeout=30) as pool:
        yield pool


@pytest.fixture
def runner_with(pool):
    """A runner with so many workers, that is shared as long as its environments leave it alive."""
    return lambda workers: pool if workers else InProcess()


def played(tokenizer, tasks, envs, **options):
    options = {"group_size": 2, "max_turns": 4, "step": 0, "layout": partial(growing_chat, detail="short")} | options
    generator = Digits(tokenizer, random.Random(0))
    return collect_groups(tasks, generator=generator, renderer=ChatRenderer(tokenizer), envs=envs, **options)


def one_sentence(error) -> str:
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    assert len(text) < 1500
    return text


@BOTH
@pytest.mark.parametrize("kind", hostile.VIOLATIONS)
def test_what_the_protocol_does_not_allow_ends_the_run_with_one_sentence(tokenizer, runner_with, kind, workers):
    with pytest.raises(ContractError) as error:
        played(tokenizer, [hostile.task("good"), hostile.task(kind)], runner_with(workers))
    text = one_sentence(error.value)
    assert text.startswith(f"task hostile/{kind}/0: Game.")
    assert hostile.VIOLATIONS[kind] in text


@BOTH
@pytest.mark.parametrize("kind", hostile.BENIGN)
def test_benign_differences_are_converted_alike(runner_with, kind, workers):
    envs = runner_with(workers)
    envs.open(0, hostile.task(kind))
    envs.answers(1)
    envs.step(0, "look")
    [(_, answer)] = envs.answers(1)
    envs.close(0)
    assert answer == hostile.BENIGN[kind]
    assert type(answer) is StepResult
    assert [type(value) for value in (answer.reward, answer.done)] == [float, bool]
    assert type(answer.observation.text) is str


@BOTH
@pytest.mark.parametrize("made", ["make_none", "make_text"])
def test_what_is_no_environment_is_named(tokenizer, runner_with, made, workers):
    with pytest.raises(ContractError, match=r"make_env returned (None|'game'), which has no method reset"):
        played(tokenizer, [hostile.task(made)], runner_with(workers))


@BOTH
@pytest.mark.parametrize("place", ["make", "reset", "step"])
@pytest.mark.parametrize("deed", hostile.RAISING)
def test_whatever_an_environment_raises_fails_its_episodes_only(tokenizer, runner_with, deed, place, workers, caplog):
    tasks, envs = [hostile.task("good"), hostile.task(f"{place}:{deed}")], runner_with(workers)
    groups = played(tokenizer, tasks, envs)
    assert [group.num_failed for group in groups] == [0, 2]
    assert groups[:1] == played(tokenizer, tasks[:1], None)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING and "2 of 4 episodes failed" in r.message]
    assert "Traceback" not in caplog.text
    with pytest.raises(EpisodesFailedError, match="all 2 episodes failed in their environments, the last, of") as error:
        played(tokenizer, tasks[1:], envs)
    one_sentence(error.value)


@BOTH
@pytest.mark.parametrize("deed", [deed for deed in hostile.RAISING if deed != "long"])
def test_what_close_raises_changes_nothing(tokenizer, runner_with, deed, workers):
    good = played(tokenizer, [hostile.task("good")], None)[0].trajectories
    assert played(tokenizer, [hostile.task(f"close:{deed}")], runner_with(workers))[0].trajectories == good


def test_ctrl_c_stays_the_users_in_this_process_and_is_the_environments_own_in_a_worker(tokenizer, pool):
    tasks = [hostile.task("good"), hostile.task("step:interrupt")]
    with pytest.raises(KeyboardInterrupt):
        played(tokenizer, tasks, None)
    assert [group.num_failed for group in played(tokenizer, tasks, pool)] == [0, 2]


@pytest.mark.parametrize("place", ["make", "reset", "step"])
@pytest.mark.parametrize("deed", hostile.DEADLY)
def test_what_would_end_the_trainer_costs_a_worker(tokenizer, deed, place):
    tasks = [hostile.task("good"), hostile.task(f"{place}:{deed}")]
    with Pool(num_workers=1, step_timeout=1.0, reset_timeout=1.5) as pool:
        groups = played(tokenizer, tasks, pool, group_size=1)
        assert pool.num_replaced >= 2
    assert [group.num_failed for group in groups] == [0, 1]
    assert groups[:1] == played(tokenizer, tasks[:1], None, group_size=1)


@pytest.mark.parametrize("place", ["make", "reset", "step", "close"])
@pytest.mark.parametrize("deed", hostile.HARMLESS)
def test_what_a_worker_survives_changes_no_result(tokenizer, deed, place):
    with Pool(num_workers=1, step_timeout=20) as pool:
        groups = played(tokenizer, [hostile.task(f"{place}:{deed}"), hostile.task("good")], pool)
        assert pool.num_replaced == 0
    good = played(tokenizer, [hostile.task("good", number) for number in range(2)], None)
    assert [group.trajectories for group in groups] == [group.trajectories for group in good]


def test_a_hanging_close_costs_its_worker_and_no_episode(tokenizer):
    with Pool(num_workers=1, step_timeout=0.5) as pool:
        for _ in range(2):
            groups = played(tokenizer, [hostile.task("close:hang"), hostile.task("good")], pool, group_size=1)
            assert [group.num_failed for group in groups] == [0, 0]
        assert pool.num_replaced


@pytest.mark.parametrize("place", ["make", "reset"])
def test_a_hanging_reset_costs_a_multiple_of_the_step_timeout(tokenizer, place):
    begun = time.monotonic()
    with Pool(num_workers=2, step_timeout=0.3) as pool, pytest.raises(EpisodesFailedError) as error:
        played(tokenizer, [hostile.task(f"{place}:hang")], pool)
    assert "hung during reset of hostile/" in one_sentence(error.value)
    assert "more than 1.5 s" in str(error.value)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("kind", ["reset:hang", "step:hang", "step:abort"])
def test_a_panel_of_which_every_task_hangs_or_dies_is_given_up_early(tokenizer, kind):
    with Pool(num_workers=2, step_timeout=0.3) as pool, pytest.raises(UserError) as error:
        played(tokenizer, [hostile.task(kind, number) for number in range(20)], pool, group_size=4)
    one_sentence(error.value)
    assert pool.num_replaced <= 6


def test_one_hanging_task_is_left_out_of_many(tokenizer):
    tasks = [hostile.task("reset:hang"), *(hostile.task("good", number) for number in range(4))]
    with Pool(num_workers=2, step_timeout=0.3, reset_timeout=1.0) as pool:
        groups = played(tokenizer, tasks, pool, group_size=3)
    assert [group.num_failed for group in groups] == [3, 0, 0, 0, 0]


@BOTH
@pytest.mark.parametrize("kind", ["expert_text", "expert_none", "expert_numbers", "expert_endless"])
def test_an_expert_that_gives_no_list_of_texts_is_named(runner_with, kind, workers):
    with pytest.raises(UserError) as error:
        expert_actions(hostile.task(kind), 0, runner_with(workers))
    assert f"hostile/{kind}/0" in one_sentence(error.value)


@BOTH
@pytest.mark.parametrize("deed", hostile.RAISING)
def test_what_an_expert_raises_is_one_sentence(runner_with, deed, workers):
    with pytest.raises(UserError, match="demonstrate of hostile/") as error:
        expert_actions(hostile.task(f"expert:{deed}"), 0, runner_with(workers))
    one_sentence(error.value)


def test_an_expert_that_hangs_or_dies_in_a_worker_is_one_sentence():
    with Pool(num_workers=1, step_timeout=0.3) as pool:
        for deed, words in {"hang": "hung during demonstrate", "segfault": "died of signal 11"}.items():
            with pytest.raises(UserError, match=words):
                expert_actions(hostile.task(f"expert:{deed}"), 0, pool)
        assert expert_actions(hostile.task("good"), 0, pool) == ["look", "7", "look"]


def test_an_expert_that_does_not_pickle_is_asked_here(pool):
    assert expert_actions(Task("t", hostile.Game, demonstrate=lambda seed: ["a"] * seed), 2, pool) == ["a", "a"]


def test_an_environment_in_this_process_cannot_move_the_trainer_to_another_folder(tokenizer):
    here = os.getcwd()
    played(tokenizer, [hostile.task("reset:chdir")], None)
    assert os.getcwd() == here


@pytest.mark.parametrize(
    "panel", [name for name in hostile.PANELS if name not in ("empty", "raising", "key_error", "exit")]
)
def test_a_panel_that_is_none_is_named(panel):
    with pytest.raises(ContractError) as error:
        list(panel_of(hostile.tasks, "train", panel=panel))
    assert one_sentence(error.value).startswith("tasks('train') returned")


def test_a_panel_cannot_grow_and_a_lazy_one_is_read_as_it_is():
    grown = hostile.tasks("train")
    panel = panel_of(lambda split: grown, "train")
    grown.append("more")
    assert [task.id for task in panel] == [task.id for task in hostile.tasks("train")]
    lazy = panel_of(hostile.tasks, "train", panel="lazy")
    assert [lazy[number].id for number in (0, -1)] == [panel[0].id, panel[-1].id]
    assert [task.id for task in lazy[:2]] == [task.id for task in panel[:2]]
    with pytest.raises(IndexError):
        lazy[99]


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()),
    *(st.lists(st.text()), st.tuples(st.text()), st.dictionaries(st.text() | st.integers(), st.floats() | st.text())),
    st.builds(hostile.Numpylike, st.booleans() | st.floats() | st.text()),
    st.builds(lambda text: Observation(text), st.text() | st.integers()),
)


@settings(max_examples=300, deadline=None)
@given(fields=st.fixed_dictionaries({}, optional=dict.fromkeys(StepResult.__dataclass_fields__, VALUES)))
def test_any_values_come_out_as_their_types_say_or_not_at_all(fields):
    result = StepResult(**{"observation": hostile.SEEN, **fields})
    try:
        checked = checked_result(result, "Game.step")
    except ContractError as error:
        one_sentence(error)
        return
    types = [type(getattr(checked, name)) for name in ("reward", "done", "used_tool", "invalid")]
    assert types == [float, bool, bool, str]
    assert abs(checked.reward) <= 1e15
    assert checked.success is None or type(checked.success) is bool
    assert all(type(name) is str and type(value) is float for name, value in checked.metrics.items())
    checked.observation.text.encode()
    assert checked_result(checked, "") == checked
    assert checked == result or not is_plain_result(result)
    assert json.loads(json.dumps(checked.metrics)) == checked.metrics


@given(text=st.text(), most=st.integers(1, 50))
def test_a_clipped_text_is_one_line(text, most):
    line = clipped(text, most)
    assert len(line) <= most + 3
    assert len(line.splitlines()) <= 1
    assert in_words(ValueError(text)).startswith("ValueError")


# Through the command line, as a user meets them.


def train(spear, tmp_path, *settings):
    tiny = ["engine.model=tiny-xs", "run.steps=1", "sft.episodes=0", "eval.tasks=0", "rollout.max_turns=4"]
    size = ["rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "rollout.step_timeout=2"]
    name = "task.env=hostile_games:tasks"
    return spear("train", name, f"run.dir={tmp_path / 'run'}", *tiny, *size, *settings)


def refused(outcome, *words) -> None:
    code, text = outcome
    assert code == 2, text
    assert "Traceback" not in text
    [line] = [line for line in text.splitlines() if line.startswith("error:")]
    for word in words:
        assert word in line


@pytest.fixture
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


COMMAND_LINE = {
    "step_success_text": "success is 'no'",
    "step_observation": "Game.step returned an Observation",
    "step_metrics_success": "one of ours",
    "step:exit": "episodes failed in their environments",
    "reset:exit": "episodes failed in their environments",
    "make:exit": "episodes failed in their environments",
    "expert:exit": "demonstrate of",
    "expert_numbers": "not a list of texts",
    "step:unspeakable": "episodes failed in their environments",
}


@pytest.mark.usefixtures("_importable")
@BOTH
@pytest.mark.parametrize("kind", COMMAND_LINE)
def test_training_on_it_ends_in_one_sentence(spear, tmp_path, kind, workers):
    outcome = train(spear, tmp_path, f"task.options.kind={kind}", f"rollout.workers={workers}")
    refused(outcome, COMMAND_LINE[kind], kind)


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("kind", ["reset:hang", "step:segfault", "expert:hang"])
def test_training_on_what_only_workers_survive_ends_in_one_sentence(spear, tmp_path, kind):
    settings = [f"task.options.kind={kind}", "rollout.workers=2", "rollout.step_timeout=0.5"]
    refused(train(spear, tmp_path, *settings), "an environment worker")


@pytest.mark.usefixtures("_importable")
@BOTH
def test_training_goes_on_without_the_episodes_that_fail_and_counts_them(spear, tmp_path, workers):
    options = ["task.options.kind=step:exit", "task.options.others=1", "task.options.number=1"]
    code, text = train(spear, tmp_path, *options, f"rollout.workers={workers}")
    assert code == 0, text
    [row] = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (row["rollout/failed_episodes"], row["rollout/episodes"], row["rollout/success"]) == (2.0, 2.0, 1.0)


@pytest.mark.usefixtures("_importable")
def test_training_writes_where_it_was_told_whatever_folder_an_environment_goes_to(spear, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = train(spear, Path(), "task.options.kind=reset:chdir")
    assert code == 0, text
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("panel", hostile.PANELS)
def test_training_on_a_panel_that_is_none_ends_in_one_sentence(spear, tmp_path, panel):
    refused(train(spear, tmp_path, f"task.options.panel={panel}"), "task")


@pytest.mark.usefixtures("_importable")
@BOTH
@pytest.mark.parametrize("kind", ["step_success_text", "step_reward_nan", "step:exit", "expert:exit", "expert_endless"])
def test_evaluating_it_ends_in_one_sentence(spear, kind, workers):
    options = ["--set", f"task.options.kind={kind}", "--set", f"rollout.workers={workers}"]
    refused(spear("eval", "expert", "--env", "hostile_games:tasks", *options), kind)


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("kind", [*list(hostile.VIOLATIONS)[::6], "step:exit", "make:exit", "reset:exit", "close:exit"])
def test_the_check_for_authors_says_the_same(spear, kind):
    code, text = spear("check-env", "hostile_games:tasks", f"kind={kind}")
    assert (code, "Traceback" in text) == (1, False), text
    assert hostile.VIOLATIONS.get(kind, "SystemExit") in text


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("panel", [name for name in hostile.PANELS if name != "empty"])
def test_the_check_for_authors_survives_every_panel(spear, panel):
    code, text = spear("check-env", "hostile_games:tasks", f"panel={panel}")
    assert (code, "Traceback" in text) == (1, False), text


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize(
    ("kind", "words"), {"step:segfault": "died of signal 11", "step:os_exit": "ended with"}.items()
)
def test_the_check_for_authors_survives_what_would_end_it(spear, kind, words):
    code, text = spear("check-env", "hostile_games:tasks", f"kind={kind}")
    assert (code, words in text) == (1, True), text
