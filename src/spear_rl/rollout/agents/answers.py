"""What an agent gets for a call: a chat completion in the OpenAI format."""

import json
import time
from collections.abc import Sequence
from typing import Any

from spear_rl.rollout.agents.endpoint import Call
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.rollout.agents.session import Capture
from spear_rl.types import Completion


def answer_of(call: Call, captures: Sequence[Capture], renderer: AgentRenderer) -> dict[str, Any]:
    """The chat completion that an agent gets."""
    request, name = call.request, f"{call.number}-{time.monotonic_ns():x}"
    choices = []
    for index, capture in enumerate(captures):
        completion, message = capture.completion, dict(capture.message)
        ended = "length" if completion.truncated else "stop"
        if calls := message.pop("tool_calls", None):
            ended = "tool_calls" if ended == "stop" else ended
            message["tool_calls"] = [_named(entry, f"call-{name}-{index}-{n}") for n, entry in enumerate(calls)]
            message["content"] = message["content"] or None
        if capture.thoughts:
            message["reasoning_content"] = capture.thoughts
        logprobs = {"content": _logprobs(completion, renderer), "refusal": None} if request.wants_logprobs else None
        choices.append({"index": index, "message": message, "finish_reason": ended, "logprobs": logprobs})
    num_prompt = len(captures[0].prompt_ids)
    num_written = sum(len(capture.completion.token_ids) for capture in captures)
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_written,
            "total_tokens": num_prompt + num_written,
        },
    }


def _named(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call["function"]
    own = {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {"id": name, "type": "function", "function": own}


def _logprobs(completion: Completion, renderer: AgentRenderer) -> list[dict[str, Any]]:
    pieces = renderer.text_pieces(completion.token_ids)
    return [
        {"token": text, "logprob": max(score, -9999.0), "bytes": list(text.encode()), "top_logprobs": []}
        for text, score in zip(pieces, completion.logprobs, strict=True)
    ]
