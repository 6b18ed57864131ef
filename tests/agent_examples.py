"""Agents that tests run: good ones with the openai package or the standard library alone, and bad ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
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


def growing_at_length(task: Task, base_url: str, api_key: str) -> float:
    """As `growing`, and paid by how much it says in one more conversation."""
    return growing(task, base_url, api_key) + one_call(task, base_url, api_key)


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


def refused(base_url: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """(status, sentence) of a request that must be refused."""
    try:
        with urllib.request.urlopen(urllib.request.Request(base_url + path, body or None, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def asks_for_everything(task: Task, base_url: str, api_key: str) -> float:
    """Samples, log-probabilities, limits, stop strings, seeds and a stream."""
    said = [{"role": "user", "content": "red code ?"}]
    several = chat(base_url, api_key, said, n=3, logprobs=True)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    for choice in several["choices"]:
        scores = choice["logprobs"]["content"]
        assert scores
        assert all(score["logprob"] <= 0 for score in scores)
    assert several["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"]) for choice in several["choices"]
    )
    short = chat(base_url, api_key, said, max_tokens=1)
    assert short["usage"]["completion_tokens"] == 1
    same = [chat(base_url, api_key, said, seed=number)["choices"][0]["message"] for number in (7, 7)]
    assert same[0] == same[1]
    others = {chat(base_url, api_key, said, seed=number)["choices"][0]["message"]["content"] for number in range(8)}
    assert len(others) > 1
    text = same[0]["content"]
    if len(text) > 2:
        middle = text[len(text) // 2]
        stopped = chat(base_url, api_key, said, seed=7, stop=[middle])["choices"][0]
        assert stopped["message"]["content"] == text.partition(middle)[0].strip()
        assert stopped["finish_reason"] == "stop"
    body = {"model": "policy", "messages": said, "seed": 7, "stream": True, "stream_options": {"include_usage": True}}
    head = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as answer:
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert streamed == text
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    return 1.0


def attacks(task: Task, base_url: str, api_key: str) -> float:
    """Requests that must not be served, after one that is."""
    one_call(task, base_url, api_key)
    body = json.dumps({"messages": [{"role": "user", "content": "look"}]}).encode()
    path, key = "/chat/completions", f"Bearer {api_key}"
    assert refused(base_url, path, body)[0] == 401
    assert refused(base_url, path, body, Authorization="Bearer sk-guess")[0] == 401
    assert refused(base_url, path, body, Authorization=key[:-1])[0] == 401
    assert refused(base_url, path, body, Authorization=key, Host="evil.example")[0] == 403
    assert refused(base_url, path, body, Authorization=key, Host="127.0.0.1:1")[0] == 403
    assert refused(base_url, path, body, Authorization=key, Origin="http://evil.example")[0] == 403
    assert refused(base_url, "/files", body, Authorization=key)[0] == 404
    assert refused(base_url, path, b"{", Authorization=key)[0] == 400
    assert refused(base_url, path, b"[" * 100_000, Authorization=key)[0] == 400
    assert refused(base_url, path, body, Authorization=key, **{"Transfer-Encoding": "chunked"})[0] == 411
    assert refused(base_url, "/models", b"", Authorization=key)[0] == 200
    for change, word in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": ""}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ({"n": 0}, "n must"),
        ({"n": True}, "n must"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"tools": [{}]}, "tools"),
        ({"seed": 2**70}, "seed"),
    ):
        status, sentence = refused(base_url, path, json.dumps(json.loads(body) | change).encode(), Authorization=key)
        assert status == 400, change
        assert word in sentence
    return 1.0


def keeps_its_key(task: Task, base_url: str, api_key: str) -> float:
    """Leaves its key in a file, and calls with the key of an episode that is over if there is one."""
    one_call(task, base_url, api_key)
    file = task.data["file"]
    if os.path.exists(file):
        with open(file) as keys:
            old = keys.read()
        body = json.dumps({"messages": [{"role": "user", "content": "look"}]}).encode()
        assert refused(base_url, "/chat/completions", body, Authorization=f"Bearer {old}")[0] == 401
    with open(file, "w") as keys:
        keys.write(api_key)
    return 1.0


def hangs_up(task: Task, base_url: str, api_key: str) -> float:
    """Gives up its first call before it is answered, and then makes another."""
    import socket

    port = int(base_url.split(":")[2].split("/")[0])
    body = json.dumps({"messages": [{"role": "user", "content": "lost"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {api_key}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(0.2)
    return one_call(task, base_url, api_key)


def catches(task: Task, base_url: str, api_key: str) -> float:
    """Goes on until it is refused, and returns then."""
    with contextlib.suppress(urllib.error.HTTPError):
        endless(task, base_url, api_key)
    return 0.25


def guesses(task: Task, base_url: str, api_key: str) -> float:
    """Plays the task's own environment."""
    env = task.make_env()
    seen = env.reset()
    messages = [{"role": "user", "content": seen.text}]
    for _ in range(2):
        said = chat(base_url, api_key, messages)["choices"][0]["message"]
        result = env.step(said["content"] or "")
        if result.done:
            return result.reward
        messages += [said, {"role": "user", "content": result.observation.text}]
    return 0.0


def kills_its_launcher(task: Task, base_url: str, api_key: str) -> float:
    """Once: task.data names a file that remembers it."""
    said = one_call(task, base_url, api_key)
    if not os.path.exists(task.data["file"]):
        open(task.data["file"], "w").close()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return said


def leaves_a_child(task: Task, base_url: str, api_key: str) -> float:
    """Starts processes that outlive it, unless they are killed with it: also in a session of their own, or detached."""
    import subprocess

    sleep = ["sleep", task.data["seconds"]]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    subprocess.run(["sh", "-c", f"setsid {' '.join(sleep)} >/dev/null 2>&1 &"], check=True)
    said = one_call(task, base_url, api_key)
    found = subprocess.run(["pgrep", "-fc", " ".join(sleep)], capture_output=True, text=True, check=True).stdout
    assert int(found) >= 3, "a living agent keeps what it started"
    if task.data["hangs"]:
        time.sleep(3600)
    return said


def forces_calls(task: Task, base_url: str, api_key: str) -> float:
    """Asks for what no free sampling can promise, and then for a call that is one."""
    said, tool = [{"role": "user", "content": "red code ?"}], {"type": "function", "function": {"name": "look"}}
    path, key = "/chat/completions", f"Bearer {api_key}"
    for change, word in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}}}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": ["text"]}}, "response_format"),
        ({"functions": [{"name": "look"}]}, "tools"),
        ({"function_call": "auto"}, "tool_choice"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ):
        body = json.dumps({"messages": said, "tools": [tool]} | change).encode()
        status, sentence = refused(base_url, path, body, Authorization=key)
        assert status == 400, (change, status, sentence)
        assert word in sentence
        assert "\n" not in sentence
    harmless: dict[str, Any] = {
        "tool_choice": "auto", "response_format": {"type": "text"}, "top_logprobs": None, "logit_bias": {},
        "temperature": 0.3, "top_p": 0.5, "user": "me", "max_completion_tokens": 3, "max_tokens": 9,
    }  # fmt: skip
    answer = chat(base_url, api_key, said, tools=[tool], **harmless)
    assert answer["usage"]["completion_tokens"] <= 3
    return 1.0


def looks_then_says(task: Task, base_url: str, api_key: str) -> float:
    """A call with tools, and a last one in the same conversation that must call none."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "red code ?"}]
    first = chat(base_url, api_key, messages, tools=[tool])["choices"][0]
    assert first["finish_reason"] == "tool_calls", first
    [call] = first["message"]["tool_calls"]
    messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    last = chat(base_url, api_key, messages, tools=[tool], tool_choice="none")["choices"][0]
    assert last["finish_reason"] == "stop", last
    assert "tool_calls" not in last["message"]
    assert "look" in last["message"]["content"]
    return 1.0


def lists_models(task: Task, base_url: str, api_key: str) -> float:
    head = {"Authorization": f"Bearer {api_key}"}
    for path in ("/models", "/models/", "/models?limit=1"):
        with urllib.request.urlopen(urllib.request.Request(base_url + path, headers=head)) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["policy"]
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/models/policy", headers=head)) as answer:
        assert json.load(answer)["id"] == "policy"
    for path in ("/models/other", "/responses", "/completions", "/embeddings"):
        status, sentence = refused(base_url, path, b"", Authorization=f"Bearer {api_key}")
        assert (status, "/v1/chat/completions" in sentence) == (404, True)
    return one_call(task, base_url, api_key)


def opens_many_connections(task: Task, base_url: str, api_key: str) -> float:
    """More connections than the endpoint takes at once: idle ones without a key, and calls behind them."""
    import socket
    from concurrent.futures import ThreadPoolExecutor

    port = int(base_url.split(":")[2].split("/")[0])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(task.data["idle"])]
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda _: one_call(task, base_url, api_key), range(24)))
    for connection in idle:
        connection.close()
    return 1.0


def hangs_with_a_child(task: Task, base_url: str, api_key: str) -> float:
    """Writes its own process and that of a child to a folder, and hangs."""
    import subprocess

    one_call(task, base_url, api_key)
    child = subprocess.Popen(["sleep", "3600"])
    with open(os.path.join(os.environ["AGENT_PIDS"], f"{os.getpid()}.tmp"), "w") as file:
        file.write(f"{os.getpid()} {child.pid} {os.getppid()}")
    os.rename(file.name, file.name.removesuffix(".tmp"))
    time.sleep(3600)
    return 1.0
