"""A chat server as the policy: many conversations in parallel, completions in the order of arrival."""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

from spear_rl.io.escaping import one_line
from spear_rl.rollout.generator import Sampling, Stream, drained
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError, OverlongError, UnansweredError
from spear_rl.rollout.rendering.renderer import Message, MessageRenderer
from spear_rl.types import Completion

_log = logging.getLogger(__name__)

_MAX_LOST = 3
"""Give up after this many unanswered requests in a row."""
_MAX_STOPS = 4
"""Stop strings that OpenAI's API accepts; further ones are applied here."""


@dataclass
class ChatEndpoint:
    """A generator over a chat server.

    A conversation longer than the model's context gives an empty, truncated completion.
    """

    server: ChatServer
    _: KW_ONLY
    model: str
    renderer: MessageRenderer
    sampling: Sampling
    seed: int = 0
    """Sent with every request; the server may ignore it."""
    num_parallel: int = 16
    """Concurrent requests."""
    on_lost: Callable[[int, BaseException], None] | None = None
    """Called with the key of an unanswered request and the reason, to fail its episode; by default it is raised."""
    has_answered: bool = False
    """Whether the server is known to work; by default a first request without an answer is raised."""
    _limit: str = field(default="max_tokens", init=False)

    def stream(self) -> Stream:
        return _EndpointStream(self)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return drained(self.stream(), prompts)

    def reply(self, messages: list[Message], key: int, number: int) -> tuple[str, bool]:
        """(the answer to a conversation, whether it is truncated)."""
        try:
            choice = self._choice(messages, key, number)
        except OverlongError as error:
            _log.info("a conversation is too long for %s: %s", self.server.name, one_line(str(error)))
            return "", True
        # JSON can hold lone surrogates, which UTF-8 cannot.
        text = (choice["message"].get("content") or "").encode("utf-8", "replace").decode()
        text, has_stopped = with_stop(text, self.sampling.stop, choice)
        return text, choice.get("finish_reason") == "length" and not has_stopped

    def _choice(self, messages: list[Message], key: int, number: int) -> dict[str, Any]:
        request = self._request(messages, key, number)
        try:
            return self.server.choice(request)
        except EndpointError as error:
            # Newer OpenAI models refuse max_tokens and name its successor.
            if "max_completion_tokens" in request or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            return self.server.choice(self._request(messages, key, number))

    def _request(self, messages: list[Message], key: int, number: int) -> dict[str, Any]:
        sampling = self.sampling
        digest = hashlib.sha256(f"{self.seed}/{key}/{number}".encode()).digest()
        request: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": sampling.temperature}
        request |= {self._limit: sampling.max_new_tokens, "seed": int.from_bytes(digest[:4], "big") >> 1}
        if sampling.top_p != 1.0:
            request["top_p"] = sampling.top_p
        if sampling.stop:
            request["stop"] = list(sampling.stop[:_MAX_STOPS])
        return request


def with_stop(text: str, stop: Sequence[str], choice: dict[str, Any]) -> tuple[str, bool]:
    """(an answer up to and including its first stop string, whether it has one).

    Servers leave the stop string out, and environments expect it. vLLM names it; for other servers an unclosed tag
    tells which one it was:

        "<action>look"  with stop ["</action>"]  ->  "<action>look</action>", True
    """
    ends = [(text.find(end) + len(end), end) for end in stop if end in text]
    if ends:
        return text[: min(ends)[0]], True
    if choice.get("finish_reason") != "stop":
        return text, False
    if "stop_reason" in choice:
        reason = choice["stop_reason"]
        return (text + reason, True) if reason in stop else (text, False)
    for end in stop:
        if end.startswith("</") and end.replace("</", "<", 1) in text:
            return text + end, True
    return text, False


class _EndpointStream:
    """One thread per running request; all state is changed in the caller's thread."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint, self._renderer = endpoint, endpoint.renderer
        self._num_requests: Counter[int] = Counter()
        self._waiting: deque[tuple[list[Message], int, int]] = deque()
        self._num_running = 0
        self._answers: SimpleQueue[tuple[int, tuple[str, bool] | BaseException]] = SimpleQueue()
        self._has_answered, self._num_lost = endpoint.has_answered, 0

    def add(self, key: int, prompt: list[int]) -> None:
        self._waiting.append((self._renderer.messages(prompt), key, self._num_requests[key]))
        self._num_requests[key] += 1
        self._start()

    def finished(self) -> list[tuple[int, Completion]]:
        if not len(self):
            return []
        key, answer = self._answers.get()
        self._num_running -= 1
        self._start()
        return [(key, self._completion(key, answer))]

    def __len__(self) -> int:
        return len(self._waiting) + self._num_running

    def _start(self) -> None:
        while self._waiting and self._num_running < self._endpoint.num_parallel:
            self._num_running += 1
            # Daemons, so that an interrupted evaluation does not wait for a slow server.
            Thread(target=self._ask, args=self._waiting.popleft(), daemon=True).start()

    def _ask(self, messages: list[Message], key: int, number: int) -> None:
        try:
            self._answers.put((key, self._endpoint.reply(messages, key, number)))
        except BaseException as error:  # raised by `finished`
            self._answers.put((key, error))

    def _completion(self, key: int, answer: tuple[str, bool] | BaseException) -> Completion:
        if isinstance(answer, UnansweredError):
            self._num_lost += 1
            on_lost = self._endpoint.on_lost
            if on_lost is None or not self._has_answered or self._num_lost >= _MAX_LOST:
                raise EndpointError(str(answer)) from answer
            on_lost(key, answer)
            return self._renderer.completion("")
        if isinstance(answer, BaseException):
            raise answer
        self._has_answered = True
        self._num_lost = 0
        text, truncated = answer
        return self._renderer.completion(text, truncated=truncated)
