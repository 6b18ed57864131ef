"""What can be wrong with an environment: one check a function, one sentence a fault."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence

from spear_rl.errors import UserError
from spear_rl.io.escaping import in_words
from spear_rl.rollout.env import Observation, StepResult, Task
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.runner import Answer, Failure
from spear_rl.testing.play import STRANGE, BrokenError, Heard, Play, Timing, expert_actions

STEP_SECONDS = 10.0
"""A step that takes longer counts as hung; making and resetting an environment may take five times as long."""


def task_faults(task: Task, max_turns: int, timing: Timing) -> Iterator[str]:
    """The faults of one task, by one check after the other."""
    try:
        pickle.loads(pickle.dumps(task.make_env))
    except Exception as error:
        yield f"make_env does not pickle, so no worker process can make it ({in_words(error)})"
    play = Play(task, max_turns, timing)
    try:
        for check in (_types, _determinism, _rewards, _choices, _end, _state_keys):
            yield from check(play)
    except BrokenError as error:
        yield str(error)


def _types(play: Play) -> Iterator[str]:
    """Whatever is not what the protocol says ends the check here: `play` raises."""
    first, *_ = play.heard(STRANGE)
    if isinstance(first, Observation) and not first.text.strip():
        raise BrokenError("the first observation has no text: the policy would have nothing to answer to")
    if play.made() is play.made():
        yield "make_env gives the same object twice: siblings would share one episode"


def _determinism(play: Play) -> Iterator[str]:
    if any(play.heard(script) != play.heard(script) for script in play.scripts):
        yield "the same actions led to different answers: an episode must be deterministic"
        return
    script = play.scripts[-1]
    alone = play.heard(script)
    if any(heard != alone for heard in _side_by_side(play, script, len(alone))):
        yield "two episodes played at the same time disturb each other: they share something that changes"
    if expert_actions(play.task, 0) != expert_actions(play.task, 0):
        yield "demonstrate gives different actions for the same seed"


def _side_by_side(play: Play, script: Sequence[str], num_answers: int) -> tuple[Heard, Heard]:
    """The same episode twice, taking turns."""
    (one, seen), (other, seen_there) = play.begun(), play.begun()
    heard: Heard = [seen]
    heard_there: Heard = [seen_there]
    for action in script[: num_answers - 1]:
        heard.append(play.step(one, action))
        heard_there.append(play.step(other, action))
    play.close(one)
    play.close(other)
    return heard, heard_there


def _rewards(play: Play) -> Iterator[str]:
    for action in STRANGE:
        result = play.heard([action])[-1]
        if isinstance(result, StepResult) and result.reward > 0:
            yield f"saying {action[:20]!r} at the start is rewarded"
    results = [answer for script in play.scripts for answer in play.heard(script) if isinstance(answer, StepResult)]
    if any(result.invalid and result.reward > 0 for result in results):
        yield "a turn it calls invalid is rewarded"


def _choices(play: Play) -> Iterator[str]:
    [first] = play.heard([])
    for choice in first.choices[:10] if isinstance(first, Observation) else ():
        said = play.task.answer_format.format(action=choice)
        result = play.heard([said])[-1]
        if isinstance(result, StepResult) and result.invalid:
            yield f"it lists {choice!r} among its choices and calls {said!r} invalid ({result.invalid})"
            return


def _end(play: Play) -> Iterator[str]:
    """An episode that is over pays nothing more and does not come back to life."""
    for script in play.scripts:
        env, first = play.begun()
        for action in script:
            if play.step(env, action).done:
                break
        else:
            continue
        for more in (action, *(play.task.answer_format.format(action=choice) for choice in first.choices[:10])):
            try:
                after = play.step(env, more)
            except BrokenError:  # which is the best an environment can do
                continue
            if after.reward > 0 or not after.done:
                yield "a step after the end goes on as if nothing had happened: raise, or answer done and no reward"
                return


def _state_keys(play: Play) -> Iterator[str]:
    """Equal keys must mean equal states, and equal states should have equal keys."""
    nonsense = play.heard(STRANGE[:5])
    still = [answer.observation for answer in nonsense if isinstance(answer, StepResult) and answer.invalid]
    texts, keys = {seen.text for seen in still}, {seen.state_key for seen in still}
    if len(still) > 2 and len(texts) == 1 and len(keys) == len(still):
        yield "its state_key changes when nothing happens: no two states would ever count as the same"
    walk = play.heard(play.scripts[-1])
    seen = [answer.observation if isinstance(answer, StepResult) else answer for answer in walk]
    keys = {observation.state_key for observation in seen}
    if len({(s.text, s.choices) for s in seen}) > 2 and len(keys) == 1 and keys != {""}:
        yield f"its state_key is {seen[0].state_key!r} whatever happens: all states would count as the same"


def expert_faults(tasks: Sequence[Task], *, num_seeds: int = 3) -> Iterator[str]:
    """Experts may fail now and then, but not always, and not by saying what their game does not understand."""
    outcomes: list[bool] = []
    for task in tasks:
        for seed in range(num_seeds if task.demonstrate else 0):
            try:
                said = expert_actions(task, seed)
                results = Play(task, len(said), Timing()).heard(said)[1:]
            except BrokenError as error:
                yield f"{task.id}: its expert's episode broke: {error}"
                return
            solved = 0.0
            for action, result in zip(said, results, strict=False):
                assert isinstance(result, StepResult)
                if result.invalid:
                    yield f"{task.id}: its expert says {action[:40]!r}, which the game calls invalid ({result.invalid})"
                    return
                solved = solved + result.reward if result.success is None else float(result.success)
            outcomes.append(solved > 0)
    if outcomes and not any(outcomes):
        yield f"none of {len(outcomes)} demonstrations solved its task"


def deadly_fault(tasks: Sequence[Task], max_turns: int) -> str:
    """What would end this process or keep it for ever, tried in another one; empty if there is no such thing."""
    with Pool(num_workers=1, step_timeout=STEP_SECONDS) as pool:
        for task in tasks:
            try:
                *_, last = _in_worker(pool, task, STRANGE[:max_turns])
            except UserError:  # it returned something wrong, as other checks will say
                continue
            if isinstance(last, Failure) and pool.num_replaced:
                return f"{task.id}: {in_words(last.error)}"
    return ""


def worker_faults(tasks: Sequence[Task], max_turns: int) -> Iterator[str]:
    """Another process has other hash seeds and none of the caller's variables, and must come to the same answers."""
    with Pool(num_workers=1, step_timeout=STEP_SECONDS) as pool:
        for task in tasks:
            play = Play(task, max_turns, Timing())
            here = play.heard(play.scripts[-1])
            there = list(_in_worker(pool, task, play.scripts[-1][: len(here) - 1]))
            failures = [answer for answer in there if isinstance(answer, Failure)]
            if failures:
                yield f"{task.id}: it cannot be played in a worker process: {in_words(failures[0].error)}"
            elif there != here:
                yield f"{task.id}: another process gave different answers (the order of a set, or something outside?)"


def _in_worker(pool: Pool, task: Task, actions: Sequence[str]) -> Iterator[Answer]:
    """All answers of an episode in a worker, as far as it goes."""
    pool.open(0, task)
    try:
        for action in (*actions, None):
            [(_, answer)] = pool.answers(1)
            yield answer
            if action is None or isinstance(answer, Failure) or (isinstance(answer, StepResult) and answer.done):
                break
            pool.step(0, action)
    finally:
        pool.close(0)
