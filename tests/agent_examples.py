"""Agents that tests run: good ones with the openai package or the standard library alone, and bad ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from typing import Any

from spear_rl.rollout import Task


def chat(base_url: str, api_key: str, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """One chat completion, by the standard library."""
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages} | options).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, head)) as answer:
        return json.load(answer)


def one_call(task: Task, base_url: str, api_key: str) -> float:
    said = chat(base_url, api_key, [{"role": "user", "content": task.id}])
    return float(len(said["choices"][0]["message"]["content"] or ""))


async def async_call(task: Task, base_url: str, api_key: str) -> float:
    await asyncio.sleep(0)
    return await asyncio.to_thread(one_call, task, base_url, api_key)


def growing(task: Task, base_url: str, api_key: str) -> float:
    """Three turns of one conversation, and after the second a branch."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"red code {task.id}"}]
    for number in range(2):
        said = chat(base_url, api_key, messages)["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"green code {number}"}]
    chat(base_url, api_key, [*messages[:-1], {"role": "user", "content": "another way"}])
    chat(base_url, api_key, messages)
    return 1.0


def never_calls(task: Task, base_url: str, api_key: str) -> float:
    return 0.5


def raises(task: Task, base_url: str, api_key: str) -> float:
    one_call(task, base_url, api_key)
    raise ValueError(f"no way to play {task.id}")


def returns_none(task: Task, base_url: str, api_key: str) -> None:
    one_call(task, base_url, api_key)


def hangs(task: Task, base_url: str, api_key: str) -> float:
    one_call(task, base_url, api_key)
    time.sleep(3600)
    return 1.0


def dies(task: Task, base_url: str, api_key: str) -> float:
    one_call(task, base_url, api_key)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def exits(task: Task, base_url: str, api_key: str) -> float:
    raise SystemExit(0)


def mixed(task: Task, base_url: str, api_key: str) -> float:
    """Behaves as the task's id begins."""
    return {"raises": raises, "hangs": hangs, "dies": dies, "exits": exits, "none": returns_none}.get(
        task.id.split("/")[0], one_call
    )(task, base_url, api_key)  # type: ignore[return-value]


def endless(task: Task, base_url: str, api_key: str) -> float:
    while True:
        one_call(task, base_url, api_key)


def once_unlucky(task: Task, base_url: str, api_key: str) -> float:
    """Fails in its first attempt; task.data names a file that remembers it."""
    said = one_call(task, base_url, api_key)
    if not os.path.exists(task.data["file"]):
        open(task.data["file"], "w").close()
        raise ConnectionError("unlucky")
    return said


def with_openai(task: Task, base_url: str, api_key: str) -> float:
    """Tools, two turns and a branch, with the openai package."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=api_key)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages: list[Any] = [{"role": "user", "content": "red code ?"}]
    first = client.chat.completions.create(model="policy", messages=messages, tools=[tool])  # type: ignore[list-item]
    message = first.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "green code 7"})
    client.chat.completions.create(model="policy", messages=messages, tools=[tool])  # type: ignore[list-item]
    branch = [*messages, {"role": "user", "content": "look"}]
    client.chat.completions.create(model="policy", messages=branch, tools=[tool])  # type: ignore[list-item]
    return 1.0
