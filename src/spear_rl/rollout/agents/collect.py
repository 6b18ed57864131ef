"""Collect rollouts of agents: their calls are completed by the engine, which this thread alone drives."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Self

from spear_rl.errors import ConfigError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.agents.answers import answer_of
from spear_rl.rollout.agents.endpoint import Call, Endpoint, RefusedError
from spear_rl.rollout.agents.processes import AgentProcesses, Outcome
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.rollout.agents.request import Request
from spear_rl.rollout.agents.session import Capture, Prompt, Session
from spear_rl.rollout.collect import EpisodesFailedError, Lockstep, cut
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Stream, Streaming
from spear_rl.types import Completion, Group, ShortPrompt, Stop, Trajectory, seed_of

_log = logging.getLogger(__name__)

GATHER_SECONDS = 0.002
"""Without continuous batching, how long nothing must happen before calls form a batch while agents are still busy."""
FIRST_CALL = 5
"""How many times longer an agent may take until its first call."""
NUM_ATTEMPTS = 2


@dataclass
class _Episode:
    """One episode of a task, also when it is played again."""

    task: Task
    place: int
    trajectory: Trajectory | None = None
    error: str = ""
    num_attempts: int = 0


@dataclass
class _Attempt:
    """An agent that is running."""

    episode: _Episode
    key: str
    session: Session
    busy_since: float
    """When it had last been answered, or was started."""
    num_pending: int = 0
    """Its calls that are not answered yet."""


@dataclass
class _Work:
    """A call whose completions are being generated."""

    call: Call
    attempt: _Attempt
    prompt: Prompt
    limit: int | None
    captures: dict[int, Capture] = field(default_factory=dict)
    """By the number of the sample."""


class AgentRunner:
    """Plays episodes by running an agent; a context manager, which ends agents and endpoint.

    Args:
        agent: package.module:function, called as `function(task, base_url, api_key)`; returns the reward.
        num_parallel: agents at once.
        timeout: seconds that an agent may take between two calls, and five times that until its first one. Time that
            it waits for an answer does not count.
    """

    def __init__(
        self, agent: str, renderer: AgentRenderer, *, num_parallel: int = 64, timeout: float = 60.0,
        python: str | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self._agent, self._renderer, self._num_parallel, self._timeout = agent, renderer, num_parallel, timeout
        self._seed, self._num_started = seed, 0
        self._inbox: SimpleQueue[Call | Outcome] = SimpleQueue()
        self._endpoint: Endpoint | None = None
        self._processes = AgentProcesses(agent, self._inbox.put, python=python, start_timeout=FIRST_CALL * timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._processes.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def collect(
        self, tasks: Sequence[Task], *, group_size: int, generator: Generator, max_turns: int, step: int,
        max_context: int | None = None, max_response_tokens: int | None = None,
    ) -> list[Group]:  # fmt: skip
        """Play `group_size` episodes of every task.

        An agent that raises, hangs, dies, returns no number or never calls is run once more, with a new session. If
        that fails too, the episode is left out of its group and counted there; EpisodesFailedError if none is left.

        A call is refused if its prompt is longer than `max_context`, or after `max_turns` calls or
        `max_response_tokens` tokens of an episode. An agent that fails thereafter has reached a limit, which is no
        failure: its episode has the reward `Task.unfinished_reward`.
        """
        self._processes.start()
        if self._endpoint is None:
            self._endpoint = Endpoint(self._inbox.put)
        groups = [[_Episode(task, place) for _ in range(group_size)] for place, task in enumerate(tasks)]
        episodes = [episode for group in groups for episode in group]
        stream: Stream = generator.stream() if isinstance(generator, Streaming) else Lockstep(generator)
        if isinstance(stream, Lockstep):
            stream = SeededLockstep(generator)
        played = _Round(self, self._endpoint, stream, max_turns, max_context, max_response_tokens)
        try:
            played.play(episodes, step)
        finally:
            played.end()
        self._report([episode for episode in episodes if episode.trajectory is None], len(episodes))
        return [
            Group(
                task.id,
                [episode.trajectory for episode in group if episode.trajectory],
                step=step,
                info={"family": task.family},
                num_failed=sum(episode.trajectory is None for episode in group),
            )
            for task, group in zip(tasks, groups, strict=True)
        ]

    def _report(self, failed: Sequence[_Episode], num_episodes: int) -> None:
        if not failed:
            return
        last = f"the last, of {clipped(failed[-1].task.id, 200)}, {failed[-1].error}"
        if len(failed) == num_episodes:
            raise EpisodesFailedError(f"task.agent: {self._agent} failed in all {num_episodes} episodes: {last}")
        _log.warning("%d of %d episodes failed and were left out: %s, %s", len(failed), num_episodes, self._agent, last)


class SeededLockstep(Lockstep):
    """Pending prompts as one batch, and each one that has a seed alone, with a random stream of its own."""

    def finished(self) -> list[tuple[int, Completion]]:
        seeded = [(key, prompt) for key, prompt in self._pending if seed_of(prompt) is not None]
        make, sampling = (getattr(self._generator, name, None) for name in ("evaluation_generator", "sampling"))
        if not seeded or make is None or sampling is None:
            return super().finished()
        self._pending = [(key, prompt) for key, prompt in self._pending if seed_of(prompt) is None]
        done = super().finished()
        for key, prompt in seeded:
            done += [(key, own) for own in make(sampling, seed=seed_of(prompt)).generate([prompt])]
        return done


@dataclass
class _Round:
    """The episodes that one call of `collect` plays."""

    runner: AgentRunner
    endpoint: Endpoint
    stream: Stream
    max_turns: int
    max_context: int | None
    max_response_tokens: int | None
    running: dict[int, _Attempt] = field(default_factory=dict)
    work: dict[int, tuple[_Work, int]] = field(default_factory=dict)
    """Key of a prompt that is being completed -> its call and the number of the sample."""
    num_keys: int = 0

    def play(self, episodes: Sequence[_Episode], step: int) -> None:
        waiting = deque(episodes)
        while waiting or self.running:
            while waiting and len(self.running) < self.runner._num_parallel:
                self._start(waiting.popleft(), step)
            for event in self._events():
                if isinstance(event, Call):
                    self._admit(event)
                elif (attempt := self._ended(event)) and attempt.episode.trajectory is None:
                    waiting.extend([attempt.episode] if attempt.episode.num_attempts < NUM_ATTEMPTS else [])
            for number in self._hung():
                seconds = self.runner._timeout * (1 if self.running[number].session.num_calls else FIRST_CALL)
                self.runner._processes.kill(number)
                advice = "raise rollout.step_timeout if it needs longer"
                error = f"made no call for {seconds:g} s and was killed: {advice}"
                self.runner._inbox.put(Outcome(number, error=error))
            if len(self.stream):
                for key, completion in self.stream.finished():
                    self._complete(key, completion)

    def end(self) -> None:
        """Kill what is running and refuse what is waiting."""
        for number, attempt in self.running.items():
            self.runner._processes.kill(number)
            self.endpoint.end(attempt.key)
        over = RefusedError(503, "the trainer is not collecting episodes any more")
        for work, _ in self.work.values():
            work.call.refuse(over)
        with suppress(Empty):
            while True:
                event = self.runner._inbox.get_nowait()
                if isinstance(event, Call):
                    event.refuse(over)

    def _start(self, episode: _Episode, step: int) -> None:
        runner = self.runner
        runner._num_started += 1
        number, key = runner._num_started, self.endpoint.open(runner._num_started)
        episode.num_attempts += 1
        self.running[number] = _Attempt(episode, key, Session(runner._renderer), time.monotonic())
        seed = f"{runner._seed}/{step}/{number}"
        runner._processes.run(number, episode.task, base_url=self.endpoint.base_url, api_key=key, seed=seed)

    def _events(self) -> list[Call | Outcome]:
        """What happened; waits only if there is nothing to generate, or if more calls are likely to join the batch."""
        inbox, events = self.runner._inbox, list[Call | Outcome]()
        gathers = isinstance(self.stream, Lockstep)
        while True:
            num_calls = len(self.work) + sum(isinstance(event, Call) for event in events)
            wait = 0.0
            if not num_calls and not events:
                wait = self._patience()
            elif gathers and num_calls < len(self.running):
                wait = GATHER_SECONDS
            try:
                events.append(inbox.get(timeout=wait) if wait > 0 else inbox.get_nowait())
            except Empty:
                return events

    def _patience(self) -> float:
        """Seconds until the next agent may count as hung."""
        now = time.monotonic()
        left = min((self._deadline(attempt) - now for attempt in self.running.values()), default=0.0)
        return min(max(left, 0.001), 60.0)

    def _deadline(self, attempt: _Attempt) -> float:
        if attempt.num_pending:
            return float("inf")
        return attempt.busy_since + self.runner._timeout * (1 if attempt.session.num_calls else FIRST_CALL)

    def _hung(self) -> list[int]:
        now = time.monotonic()
        return [number for number, attempt in self.running.items() if self._deadline(attempt) <= now]

    def _ended(self, outcome: Outcome) -> _Attempt | None:
        """Record how an agent ended; what it did, if it was still running."""
        attempt = self.running.pop(outcome.number, None)
        if attempt is None:
            return None
        self.endpoint.end(attempt.key)
        session, episode = attempt.session, attempt.episode
        cut_off, captured = session.cut_off, any(not capture.is_lost for capture in session.captures)
        if outcome.reward is not None and captured:
            episode.trajectory = session.trajectory(outcome.reward, Stop.DONE)
        elif cut_off and captured:
            episode.trajectory = session.trajectory(episode.task.unfinished_reward, cut_off)
        elif outcome.reward is not None:
            advice = "it must use the base_url and api_key that it is given"
            episode.error = f"returned {outcome.reward:g} without a call that was answered: {advice}"
        else:
            episode.error = outcome.error
        _log.debug("an agent of %s ended: %s", episode.task.id, episode.error or outcome.reward)
        return attempt

    def _admit(self, call: Call) -> None:
        """Begin to generate what a call asks for, or refuse it."""
        attempt = self.running.get(call.number)
        if attempt is None:
            call.refuse(RefusedError(401, "the episode of this API key is over", "invalid_api_key"))
            return
        try:
            self._generate(call, attempt)
        except RefusedError as error:
            call.refuse(error)
        except ConfigError as error:  # a conversation that the chat template cannot show
            call.refuse(RefusedError(400, str(error)))

    def _generate(self, call: Call, attempt: _Attempt) -> None:
        session, request = attempt.session, call.request
        if session.num_calls >= self.max_turns:
            session.cut_off = session.cut_off or Stop.MAX_TURNS
            raise RefusedError(400, f"the episode has made its {self.max_turns} calls (rollout.max_turns)", "max_turns")
        prompt = session.prompt(request.messages, request.tools)
        limit = self._limit(session, prompt, request)
        session.num_calls += 1
        attempt.num_pending += 1
        work = _Work(call, attempt, prompt, limit)
        for sample in range(request.num_samples):
            key = self._key(prompt.parent) if sample == 0 else self._new_key()
            self.work[key] = (work, sample)
            self.stream.add(key, _request(prompt.token_ids, limit, request.seed, sample))

    def _limit(self, session: Session, prompt: Prompt, request: Request) -> int | None:
        """The most tokens of an answer, where it is less than usual."""
        longest = "context_length_exceeded"
        if self.max_context is not None and len(prompt.token_ids) > self.max_context:
            session.cut_off = Stop.OVERLONG
            sentence = (
                f"the prompt has {len(prompt.token_ids)} tokens, more than rollout.max_context={self.max_context}"
            )
            raise RefusedError(400, sentence, longest)
        limit = request.max_tokens
        if self.max_response_tokens is not None:
            used = sum(len(capture.completion.token_ids) for capture in session.captures)
            left = (self.max_response_tokens - used) // request.num_samples
            if left <= 0:
                session.cut_off = Stop.OVERLONG
                sentence = f"the episode has its {self.max_response_tokens} tokens (rollout.max_response_tokens)"
                raise RefusedError(400, sentence, longest)
            limit = left if limit is None else min(limit, left)
        return limit

    def _key(self, parent: Capture | None) -> int:
        """That of the conversation which a prompt continues, whose cache is reused, unless it is in use."""
        return parent.key if parent is not None and parent.key not in self.work else self._new_key()

    def _new_key(self) -> int:
        self.num_keys += 1
        return self.num_keys

    def _complete(self, key: int, completion: Completion) -> None:
        work, sample = self.work.pop(key)
        request, attempt = work.call.request, work.attempt
        if work.limit is not None:
            completion = cut(completion, work.limit)
        work.captures[sample] = attempt.session.add(
            work.prompt, completion, messages=request.messages, tools=request.tools, key=key, stop=request.stop,
            may_call=request.may_call,
        )  # fmt: skip
        if len(work.captures) < request.num_samples:
            return
        attempt.num_pending -= 1
        attempt.busy_since = time.monotonic()
        captures = [work.captures[number] for number in range(request.num_samples)]

        def lose() -> None:
            for capture in captures:
                capture.is_lost = True

        work.call.on_lost = lose
        work.call.reply(answer_of(work.call, captures, self.runner._renderer))


def _request(token_ids: list[int], limit: int | None, seed: int | None, sample: int) -> list[int]:
    """A prompt as the generator gets it: with its limit and its seed, where the call has them."""
    if limit is None and seed is None:
        return token_ids
    own = None if seed is None else (seed + sample) % 2**63
    return ShortPrompt(token_ids, (), 2**31 if limit is None else limit, seed=own)
