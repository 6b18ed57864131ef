"""The checks of an environment: one function per check, one sentence per fault."""

import pickle
from collections.abc import Iterator, Sequence

from spear_rl.errors import UserError
from spear_rl.io.escaping import in_words
from spear_rl.rollout.env import StepResult, Task
from spear_rl.rollout.workers.pool import Pool
from spear_rl.rollout.workers.runner import Answer, Failure
from spear_rl.testing.play import STRANGE, BrokenError, Play, Timing, expert_script

STEP_SECONDS = 10.0
"""A longer step counts as hung; making and resetting an environment may take five times as long."""
LOST = (
    "a run neither repeats nor resumes bit for bit, the episode of a worker that died cannot be replayed, and the "
    "episodes of a group, whose states GiGPO compares, are not those of one task"
)
"""What an environment that is not deterministic costs."""

Faults = Iterator[tuple[str, str]]
"""The task, or nothing, and the sentence."""


def task_faults(task: Task, max_turns: int, timing: Timing) -> Iterator[str]:
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
    first, _ = play.episode(STRANGE)  # BrokenError if an answer is not as the protocol says
    if not first.text.strip():
        raise BrokenError("the first observation has no text: the policy would have nothing to answer to")
    if play.make_env() is play.make_env():
        yield "make_env gives the same object twice: siblings would share one episode"


def _determinism(play: Play) -> Iterator[str]:
    if any(play.episode(script) != play.episode(script) for script in play.scripts):
        yield f"the same actions led to different answers, but an episode must be deterministic: otherwise {LOST}"
        return
    first, results = play.episode(play.scripts[-1])
    episodes = [play.start(), play.start()]
    both = [[play.step(env, action) for env, _ in episodes] for action in play.scripts[-1][: len(results)]]
    for env, _ in episodes:
        play.close(env)
    if both != [[result, result] for result in results] or any(other != first for _, other in episodes):
        yield "two episodes played at the same time disturb each other: they share something that changes"
    if expert_script(play.task, 0) != expert_script(play.task, 0):
        yield "demonstrate gives different actions for the same seed"


def _rewards(play: Play) -> Iterator[str]:
    for action in STRANGE:
        if any(result.reward > 0 for result in play.episode([action])[1]):
            yield f"saying {action[:20]!r} at the start is rewarded"
    results = (result for script in play.scripts for result in play.episode(script)[1])
    if any(result.invalid and result.reward > 0 for result in results):
        yield "a turn it calls invalid is rewarded"


def _choices(play: Play) -> Iterator[str]:
    for choice in play.episode([])[0].choices[:10]:
        action = play.answer(choice)
        for result in play.episode([action])[1]:
            if result.invalid:
                yield f"it lists {choice!r} among its choices and calls {action!r} invalid ({result.invalid})"
                return


def _end(play: Play) -> Iterator[str]:
    """A step after the end gives no reward and stays done."""
    for script in play.scripts:
        env, first = play.start()
        last = next((action for action in script if play.step(env, action).done), None)
        for action in () if last is None else (last, *map(play.answer, first.choices[:10])):
            try:
                after = play.step(env, action)
            except BrokenError:  # best: the environment refuses
                continue
            if after.reward > 0 or not after.done:
                yield "a step after the end goes on as if nothing had happened: raise, or answer done and no reward"
                return


def _state_keys(play: Play) -> Iterator[str]:
    """Equal keys must mean equal states, and equal states should have equal keys."""
    still = [result.observation for result in play.episode(STRANGE[:5])[1] if result.invalid]
    texts, keys = {seen.text for seen in still}, {seen.state_key for seen in still}
    if len(still) > 2 and len(texts) == 1 and len(keys) == len(still):
        yield "its state_key changes when nothing happens: no two states would ever count as the same"
    first, results = play.episode(play.scripts[-1])
    seen = [first, *(result.observation for result in results)]
    keys = {observation.state_key for observation in seen}
    if len({(s.text, s.choices) for s in seen}) > 2 and len(keys) == 1 and keys != {""}:
        yield f"its state_key is {seen[0].state_key!r} whatever happens: all states would count as the same"


def expert_faults(tasks: Sequence[Task], timing: Timing, *, num_seeds: int = 3) -> Faults:
    """An expert may fail sometimes, but not always, and its actions must be valid."""
    outcomes: list[bool] = []
    for task, seed in ((task, seed) for task in tasks if task.demonstrate for seed in range(num_seeds)):
        try:
            script = expert_script(task, seed)
            _, results = Play(task, len(script), timing).episode(script)
        except BrokenError as error:
            yield task.id, f"its expert's episode broke: {error}"
            return
        solved = 0.0
        for action, result in zip(script, results, strict=False):
            if result.invalid:
                yield task.id, f"its expert says {action[:40]!r}, which the game calls invalid ({result.invalid})"
                return
            solved = solved + result.reward if result.success is None else float(result.success)
        outcomes.append(solved > 0)
    if outcomes and not any(outcomes):
        yield "", f"none of {len(outcomes)} demonstrations solved its task"


def rebuilt_faults(tasks: Sequence[Task], again: Sequence[Task], max_turns: int) -> Faults:
    """The same ids must name the same games when the panel is made again, as a resume does."""
    for task, other in zip(tasks, again, strict=False):
        play, rebuilt = (Play(each, max_turns, Timing()) for each in (task, other))
        try:
            if any(play.episode(script) != rebuilt.episode(script) for script in play.scripts):
                yield task.id, f"made again by `tasks`, it gives different answers to the same actions: {LOST}"
        except BrokenError as error:
            yield task.id, f"made again by `tasks`, it breaks: {error}"


def crash_fault(tasks: Sequence[Task], max_turns: int) -> tuple[str, str] | None:
    """How a task ends or hangs a process, tried in a worker; None if none does."""
    with Pool(num_workers=1, step_timeout=STEP_SECONDS) as pool:
        for task in tasks:
            try:
                *_, last = _answers_in_worker(pool, task, STRANGE[:max_turns])
            except UserError:  # an answer breaks the protocol, which other checks report
                continue
            if isinstance(last, Failure) and pool.num_replaced:
                return task.id, in_words(last.error)
    return None


def worker_faults(tasks: Sequence[Task], max_turns: int) -> Faults:
    """Another process, with other hash seeds and without this one's variables, must give the same answers."""
    with Pool(num_workers=1, step_timeout=STEP_SECONDS) as pool:
        for task in tasks:
            play = Play(task, max_turns, Timing())
            first, results = play.episode(play.scripts[-1])
            there = list(_answers_in_worker(pool, task, play.scripts[-1][: len(results)]))
            failures = [answer for answer in there if isinstance(answer, Failure)]
            if failures:
                yield task.id, f"it cannot be played in a worker process: {in_words(failures[0].error)}"
            elif there != [first, *results]:
                source = "the order of a set, or something outside?"
                yield task.id, f"another process gave different answers ({source}): {LOST}"


def _answers_in_worker(pool: Pool, task: Task, actions: Sequence[str]) -> Iterator[Answer]:
    """The answers of an episode, up to its end or failure."""
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
