"""Environments in worker processes: same results as here, whatever happens to the workers. All with real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import pool_games as games
from spear_rl.envs import ENVIRONMENTS
from spear_rl.rollout import ChatRenderer, InProcess, Task, collect_groups, growing_chat
from spear_rl.rollout.contract import ContractError
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.protocol import EnvironmentFailedError
from spear_rl.rollout.workers.runner import Failure
from test_stream import Digits

SRC = Path(__file__).parent.parent / "src"


@pytest.fixture(scope="module")
def shared_pool():
    with Pool(num_workers=2, step_timeout=20, reset_timeout=60) as pool:
        yield pool


def played(tokenizer, tasks, envs, *, generator=None, **options):
    """With a policy that streams, or, given as `generator`, any other."""
    options = {"group_size": 2, "max_turns": 6, "step": 0, "layout": partial(growing_chat, detail="short")} | options
    generator = Digits(tokenizer, random.Random(0)) if generator is None else generator
    return collect_groups(tasks, generator=generator, renderer=ChatRenderer(tokenizer), envs=envs, **options)


class InBatches:
    """The same policy for a loop that waits for all: it says what depends on the prompt alone."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.calls = tokenizer, []

    def generate(self, prompts):
        from spear_rl.types import Completion

        self.calls.append([list(prompt) for prompt in prompts])
        ids = [self._tokenizer.encode(str(sum(prompt) % 10), add_special_tokens=False) for prompt in prompts]
        return [Completion(one, [0.0] * len(one)) for one in ids]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def test_a_worker_starts_without_torch_and_without_transformers(shared_pool):
    assert "torch" in sys.modules
    modules = shared_pool.call(games.imported)
    assert "spear_rl.rollout.workers.worker" in modules
    assert not {"torch", "transformers", "numpy", "tokenizers", "jinja2"} & set(modules)


def test_results_are_those_of_environments_in_this_process(tokenizer, shared_pool):
    tasks = [*games.chains(5), *ENVIRONMENTS["household"]("train")[:3], *ENVIRONMENTS["lookup"]("train")[:2]]
    assert played(tokenizer, tasks, shared_pool) == played(tokenizer, tasks, None)
    here, there = InBatches(tokenizer), InBatches(tokenizer)
    expected = played(tokenizer, tasks, InProcess(), generator=here)
    assert played(tokenizer, tasks, shared_pool, generator=there) == expected
    assert here.calls == there.calls


def test_there_are_never_more_workers_than_allowed_nor_more_than_episodes(tokenizer):
    with Pool(num_workers=2) as pool:
        played(tokenizer, games.chains(1), pool, group_size=1)
        assert len(pool.pids) == 1
        played(tokenizer, games.chains(5), pool)
        assert len(pool.pids) == 2


@pytest.mark.slow
def test_killing_workers_at_random_during_fifty_rollouts_changes_nothing(tokenizer):
    tasks = [Task(f"thinking/{number}", partial(games.Thinking, number)) for number in range(6)]
    stop, rng = threading.Event(), random.Random(0)
    with Pool(num_workers=2, step_timeout=20, reset_timeout=60) as pool:

        def kill_at_random() -> None:
            while not stop.wait(rng.uniform(0.0, 0.8)):
                with suppress(ProcessLookupError, IndexError):
                    os.kill(rng.choice(pool.pids), signal.SIGKILL)

        killer = threading.Thread(target=kill_at_random)
        killer.start()
        try:
            for number in range(50):
                generator = InBatches(tokenizer) if number % 2 else Digits(tokenizer, random.Random(number))
                again = InBatches(tokenizer) if number % 2 else Digits(tokenizer, random.Random(-number))
                groups = played(tokenizer, tasks, pool, generator=generator, group_size=3)
                assert groups == played(tokenizer, tasks, None, generator=again, group_size=3)
                assert [len(group.trajectories) + group.num_failed for group in groups] == [3] * 6
        finally:
            stop.set()
            killer.join()
        assert pool.num_replaced >= 10
        pids = pool.pids
    assert gone(pids)


def test_an_environment_that_always_kills_its_worker_is_left_out_and_its_neighbours_go_on(tokenizer, caplog):
    deadly = Task("deadly", partial(games.Deadly, 1, 2))
    with Pool(num_workers=1) as pool:
        groups = played(tokenizer, [*games.chains(3), deadly], pool)
        assert pool.num_replaced == 2 * 5
    assert groups[:3] == played(tokenizer, games.chains(3), None)
    assert (groups[3].num_failed, groups[3].trajectories) == (2, [])
    assert "ended with code 3 during step of deadly" in caplog.text
    assert "about to end it all" in caplog.text


@pytest.mark.parametrize("trouble", [games.Deadly, games.Hanging, games.Raising])
def test_an_environment_with_trouble_once_is_played_again_to_the_same_end(tokenizer, tmp_path, trouble):
    tasks = [*games.chains(2), Task("t", partial(trouble, 7, 2, str(tmp_path / "once")))]
    with Pool(num_workers=2, step_timeout=0.7) as pool:
        groups = played(tokenizer, tasks, pool, group_size=1)
        assert pool.num_replaced == (trouble is not games.Raising)
    assert [group.num_failed for group in groups] == [0, 0, 0]
    assert groups == played(tokenizer, tasks, None, group_size=1)


def test_a_hung_environment_is_left_out_and_counted(tokenizer, caplog):
    tasks = [*games.chains(2), Task("hung", partial(games.Hanging, 7, 1))]
    with Pool(num_workers=1, step_timeout=0.4) as pool:
        groups = played(tokenizer, tasks, pool, group_size=1)
        pids = pool.pids
    assert [group.num_failed for group in groups] == [0, 0, 1]
    assert groups[:2] == played(tokenizer, games.chains(2), None, group_size=1)
    assert "hung during step of hung" in caplog.text
    assert gone(pids)


def test_an_environment_that_raises_is_left_out_and_counted_as_in_this_process(tokenizer, shared_pool, caplog):
    tasks = [*games.chains(2), Task("torn", partial(games.Raising, 7, 1))]
    groups = played(tokenizer, tasks, shared_pool)
    assert [group.num_failed for group in groups] == [0, 0, 2]
    assert "OSError: the wire came off (in trouble, " in caplog.text
    assert groups == played(tokenizer, tasks, None)


def test_a_replay_that_goes_another_way_is_a_failure(tokenizer, tmp_path, caplog):
    tasks = [*games.chains(2), Task("moody", partial(games.Moody, 7, 2, str(tmp_path / "once")))]
    with Pool(num_workers=1) as pool:
        groups = played(tokenizer, tasks, pool, group_size=1)
    assert [group.num_failed for group in groups] == [0, 0, 1]
    assert "moody did not repeat itself at answer 0" in caplog.text


def test_an_environment_that_prints_and_reads_does_not_disturb_the_protocol(tokenizer):
    with Pool(num_workers=1, reset_timeout=30) as pool:
        groups = played(tokenizer, [Task("chatty", partial(games.Chatty, 3))], pool)
        assert pool.num_replaced == 0
    assert groups[0].trajectories == played(tokenizer, [Task("c", partial(games.Chain, 3))], None)[0].trajectories


def test_an_environment_that_answers_with_something_else_is_named(tokenizer, shared_pool):
    with pytest.raises(ContractError, match=r"task odd: Odd\.reset returned 'hello', not an Observation"):
        played(tokenizer, [Task("odd", games.Odd)], shared_pool)


def test_a_make_env_that_does_not_pickle_is_named(tokenizer, shared_pool):
    with pytest.raises(RuntimeError, match="make_env of lambda does not pickle"):
        played(tokenizer, [Task("lambda", lambda: games.Chain(1))], shared_pool)


def test_messages_larger_than_any_pipe_get_through_both_ways():
    with Pool(num_workers=1, step_timeout=20) as pool:
        for key in range(4):
            pool.open(key, Task("large", partial(games.Large, 4)))
        pool.answers(4)
        said = {key: f"{key}" + "\u2603x" * 1_500_000 for key in range(4)}
        for key, action in said.items():
            pool.step(key, action)
        assert {key: answer.observation.text for key, answer in pool.answers(4)} == {
            key: action[::-1] for key, action in said.items()
        }


def test_the_policy_goes_on_while_a_slow_game_thinks(tokenizer):
    class Watching(Digits):
        seen = ()

        def add(self, key, prompt):
            super().add(key, prompt)
            self.seen = (*self.seen, key)

    tasks, generator = [Task("slow", partial(games.Slow, 1)), *games.chains(3)], Watching(tokenizer, random.Random(0))
    with Pool(num_workers=2) as pool:
        groups = played(tokenizer, tasks, pool, generator=generator, group_size=1, max_turns=3)
    before_its_second_turn = generator.seen[: [n for n, key in enumerate(generator.seen) if key == 0][1]]
    in_the_other_worker = (1, 3)
    assert [before_its_second_turn.count(key) for key in in_the_other_worker] == [3, 3]
    assert groups == played(tokenizer, tasks, None, group_size=1, max_turns=3)


def test_an_episode_given_up_leaves_no_answer_behind(shared_pool):
    [task] = games.chains(1)
    shared_pool.open(0, task)
    shared_pool.close(0)
    shared_pool.open(0, Task("torn", partial(games.Raising, 7, 0)))
    assert len(shared_pool) == 1
    assert shared_pool.answers(1)[0][1].text == "red code 7"
    shared_pool.step(0, "look")
    [(_, answer)] = shared_pool.answers(99)
    assert isinstance(answer, Failure)
    assert (len(shared_pool), shared_pool.answers(99)) == (0, [])
    shared_pool.step(0, "look again")
    assert isinstance(shared_pool.answers(1)[0][1], Failure)
    shared_pool.close(0)


def test_a_worker_that_cannot_start_is_an_error_with_its_own_words(tmp_path):
    with pytest.raises(EnvironmentFailedError, match="no environment worker can be started with /no/such/python"):
        Pool(python="/no/such/python").open(0, games.chains(1)[0])
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no good >&2; exit 7\n")
    broken.chmod(0o755)
    pool = Pool(python=str(broken), num_workers=1)
    pool.open(0, games.chains(1)[0])
    with pytest.raises(EnvironmentFailedError, match=r"ended with code 7 during start.*\n?.*no good"):
        pool.answers(1)


def test_a_closed_pool_leaves_no_process_behind_not_even_an_environments_own():
    with Pool(num_workers=2, step_timeout=60) as pool:
        pool.open(0, Task("parent", partial(games.Parent, 1)))
        pool.open(1, Task("hung", partial(games.Hanging, 1, 0)))
        answers = dict(pool.answers(2))
        child = int(answers[0].text)
        pool.step(1, "hang on")
        pool.answers(0)
        pids = [*pool.pids, child]
        assert all(alive(pid) for pid in pids)
    assert gone(pids)


OWNER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with it ignored
from functools import partial
import pool_games as games
from spear_rl.rollout import Task
from spear_rl.rollout.workers.pool import Pool
with Pool(num_workers=2) as pool:
    pool.open(0, Task("parent", partial(games.Parent, 1)))
    pool.open(1, Task("hung", partial(games.Hanging, 1, 0)))
    child = int(dict(pool.answers(2))[0].text)
    pool.step(1, "hang on")
    pool.answers(0)
    print(*pool.pids, child, flush=True)
    pool.answers(1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_trainer_that_is_killed_or_interrupted_leaves_no_worker_behind(how):
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as owner:
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 3
        owner.send_signal(how)
        try:
            errors = owner.communicate(timeout=20)[1]
        finally:
            owner.kill()
    assert owner.returncode == -how
    assert errors.count("KeyboardInterrupt") == (how is signal.SIGINT), errors
    assert gone(pids)
