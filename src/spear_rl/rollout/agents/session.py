"""One agent's episode: every call with its exact tokens, put together into a trajectory.

Sampled tokens never change. A conversation that an agent sends again is matched by its messages to the calls before it,
and the next prompt begins with the token ids of the longest one that it continues. Where it continues none, as in a
new conversation, the chat template renders it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from spear_rl.rollout.agents.messages import digests, said, transcript
from spear_rl.rollout.agents.rendering import AgentRenderer, Tools
from spear_rl.rollout.collect import cut
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.renderer import Message
from spear_rl.types import Completion, Stop, Trajectory, Turn


@dataclass
class Capture:
    """One completion: a node in the tree of the episode's conversations."""

    prompt_ids: list[int]
    completion: Completion
    text: str
    """All that was sampled, decoded."""
    message: Message
    """What the agent got: without thoughts and stop strings, tool calls apart."""
    thoughts: str
    observation: str
    invalid: str
    parent: "Capture | None"
    key: int
    """Names the conversation to the generator, whose cache may hold it."""
    is_lost: bool = False
    """The agent hung up before it was answered."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, the capture that it continues, and what stands in it since."""

    token_ids: list[int]
    parent: Capture | None
    observation: str
    digest: str


@dataclass
class Session:
    """The calls of one episode."""

    renderer: AgentRenderer
    captures: list[Capture] = field(default_factory=list)
    num_calls: int = 0
    cut_off: Stop | None = None
    """A limit refused a call; what the agent makes of it is no failure of the machinery."""
    _answers: dict[str, Capture] = field(default_factory=dict)
    """Digest of a conversation that ends with an answer of ours -> that answer."""

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """The prompt of a call: the longest captured conversation that it continues, and what follows."""
        all_digests = digests(messages, tools)
        for count in range(len(messages), 0, -1):
            if capture := self._answers.get(all_digests[count - 1]):
                new = messages[count:]
                ids = self.renderer.continued(capture.prompt_ids, capture.completion.token_ids, new, tools)
                return Prompt(ids, capture, transcript(new), all_digests[-1])
        return Prompt(self.renderer.conversation(messages, tools), None, transcript(messages), all_digests[-1])

    def add(
        self, prompt: Prompt, completion: Completion, *, messages: Sequence[Message], tools: Tools, key: int,
        stop: Sequence[str] = (), may_call: bool = True,
    ) -> Capture:  # fmt: skip
        """Record a completion, cut after the token that completes a stop string."""
        completion, shown = cut_at(completion, stop, self.renderer.decoded)
        text = self.renderer.parse(completion.token_ids)
        thoughts, answer = _thoughts(shown)
        content, calls, is_malformed = (
            self.renderer.read_calls(answer, tools) if tools and may_call else (answer, [], False)
        )
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        capture = Capture(
            prompt.token_ids, completion, text, message, thoughts, prompt.observation,
            "malformed_call" if is_malformed else "", prompt.parent, key,
        )  # fmt: skip
        self.captures.append(capture)
        self._answers[digests([*messages, message], tools)[-1]] = capture
        return capture

    def trajectory(self, reward: float, stop: Stop) -> Trajectory:
        """The episode: conversations one after the other, each growing; the reward is that of the last turn."""
        turns = [
            Turn(
                capture.prompt_ids,
                capture.completion,
                used_tool="tool_calls" in capture.message,
                invalid=capture.invalid,
                observation=capture.observation,
                text=capture.text,
                action=said(capture.message),
            )
            for capture in in_conversations([capture for capture in self.captures if not capture.is_lost])
        ]
        if turns:
            turns[-1] = replace(turns[-1], reward=reward)
        return Trajectory(turns, stop, success=reward > 0)


def in_conversations(captures: Sequence[Capture]) -> list[Capture]:
    """Every capture before those that continue it, and a conversation before the branches from it.

    a -> b -> c and a -> d, called in the order a, b, d, c, come out as a, b, c, d: a, b and c are one row.
    """
    continued: dict[int, list[Capture]] = {}
    present = {id(capture) for capture in captures}
    for capture in captures:
        parent = id(capture.parent) if capture.parent is not None and id(capture.parent) in present else 0
        continued.setdefault(parent, []).append(capture)
    out, waiting = list[Capture](), continued.get(0, [])[::-1]
    while waiting:
        capture = waiting.pop()
        out.append(capture)
        waiting += continued.get(id(capture), [])[::-1]
    return out


def cut_at(completion: Completion, stop: Sequence[str], decoded: Callable[[list[int]], str]) -> tuple[Completion, str]:
    """The completion up to the token that completes the first stop string, and its text up to that string.

    A policy that had been stopped there would have sampled the same tokens with the same probability.
    """
    text = decoded(completion.token_ids)
    if not any(string in text for string in stop):
        return completion, text.strip()
    low, high = 1, len(completion.token_ids)
    while low < high:  # the shortest beginning that contains one
        middle = (low + high) // 2
        if any(string in decoded(completion.token_ids[:middle]) for string in stop):
            high = middle
        else:
            low = middle + 1
    text = decoded(completion.token_ids[:low])
    end = min(place for string in stop if (place := text.find(string)) >= 0)
    return replace(cut(completion, low), truncated=False), text[:end].strip()


def _thoughts(text: str) -> tuple[str, str]:
    """(thoughts, the rest)."""
    if "</think>" not in text:
        return "", text
    inside = text.rpartition("</think>")[0].replace("<think>", "").replace("</think>", "\n")
    return inside.strip(), without_thoughts(text).strip()
