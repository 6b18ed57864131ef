"""What a call asks for, read from its JSON body. A field that cannot be served as it is meant is refused by name."""

from dataclasses import dataclass, field
from typing import Any

from spear_rl.rollout.agents.messages import MalformedError, checked_messages, checked_tools
from spear_rl.rollout.rendering.renderer import Message

MAX_SAMPLES = 128

_FREE = "the policy writes freely, because training scores its tokens as they were sampled"
_UNSERVED = {
    "top_logprobs": "only the sampled token's log-probability is known: leave top_logprobs out",
    "logit_bias": f"{_FREE}: leave logit_bias out",
    "functions": "the older functions are not served: use tools",
    "function_call": "the older function_call is not served: use tool_choice",
    "audio": "audio is not served: this endpoint writes text only",
}
"""Fields that must be left out, and what to say if they are not."""


@dataclass(frozen=True)
class Request:
    """What a call asks for; what is sampled at (temperature, top_p) is the run's."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    may_call: bool = True
    """Whether calls of tools are read from the answer; the tools are shown in either case."""
    num_samples: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    wants_logprobs: bool = False
    is_streamed: bool = False
    wants_usage: bool = False
    model: str = ""


def parsed(body: object) -> Request:
    """The request in a JSON body; MalformedError names what cannot be served."""
    if not isinstance(body, dict):
        raise MalformedError("the body must be a JSON object")
    for name, sentence in _UNSERVED.items():
        if body.get(name):
            raise MalformedError(sentence)
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(string, str) and string for string in stops):
        raise MalformedError("stop must be a text or a list of texts")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    options = body.get("stream_options")
    _require_text(body.get("response_format"))
    return Request(
        messages=checked_messages(body.get("messages")),
        tools=checked_tools(body.get("tools")),
        may_call=_may_call(body.get("tool_choice")),
        num_samples=_whole(body.get("n"), "n", 1, MAX_SAMPLES) or 1,
        max_tokens=_whole(body.get(limit), limit, 1, 2**31),
        stop=stops,
        seed=_whole(body.get("seed"), "seed", -(2**63), 2**63 - 1),
        wants_logprobs=bool(body.get("logprobs")),
        is_streamed=bool(body.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        model=str(body.get("model") or "policy")[:200],
    )


def _may_call(choice: object) -> bool:
    if choice not in (None, "auto", "none"):
        raise MalformedError(f'tool_choice must be "auto" or "none": {_FREE}, so that no call can be forced')
    return choice != "none"


def _require_text(value: object) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "text"):
        advice = "leave response_format out and ask for JSON in a message"
        raise MalformedError(f'response_format must be {{"type": "text"}}: {_FREE}; {advice}')


def _whole(value: Any, name: str, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise MalformedError(f"{name} must be a whole number from {low} to {high}")
    return value
