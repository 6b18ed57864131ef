"""An OpenAI-compatible endpoint as the policy, against a real server on this machine that can misbehave."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spear_rl.rollout.generator import Sampling
from spear_rl.rollout.policies.chat_client import ChatServer, EndpointError
from spear_rl.rollout.policies.endpoint import ChatEndpoint, with_stop
from spear_rl.rollout.rendering.renderer import MessageRenderer

KEY = "sk-very-secret-4711"
BUSY = (429, {"error": {"message": "slow down", "code": "rate_limit"}}, {"Retry-After": "0"})


def good_player(request: dict) -> str:
    """Solves lookup: looks, then says what it saw."""
    seen = re.findall(r"code (\S)", request["messages"][-1]["content"])[-1]
    return "look" if seen == "?" else seen


def completed(text: str | None, reason: str = "stop", **more: Any) -> tuple[int, dict, dict]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason, **more}
    return 200, {"object": "chat.completion", "choices": [choice]}, {}


class Server(ThreadingHTTPServer):
    """Answers as `answer` says: (status, JSON or bytes, headers) for a request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = lambda request: completed(good_player(request))
        self.models: list[str] = ["the-model"]
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.lock = threading.Lock()
        self.num_open = self.most_open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.reply(200, {"data": [{"id": name} for name in self.server.models]}, {})

    def do_POST(self) -> None:
        server, content = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self.reply(404, b"not found", {})
            return
        with server.lock:
            server.num_open += 1
            server.most_open = max(server.most_open, server.num_open)
            server.requests.append(json.loads(content))
            server.headers.append(dict(self.headers))
        try:
            answer = server.answer(json.loads(content))
        finally:
            with server.lock:
                server.num_open -= 1
        if answer is not None:  # else the connection is dropped
            self.reply(*answer)

    def reply(self, status: int, body: dict | bytes, headers: dict) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(monkeypatch):
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.fixture
def result_of(spear, server, tmp_path):
    """Evaluates the server on lookup and reads what was written."""

    def call(*arguments: object) -> dict:
        out = tmp_path / "eval.json"
        code, text = spear("eval", server.url, "--env", "lookup", "--model", "m", *arguments, "--out", out)
        assert code == 0, text
        return json.loads(out.read_text()) | {"printed": text}

    return call


@pytest.mark.parametrize("layout", ["chat", "turns", "log"])
def test_an_endpoint_plays_with_every_layout_and_conversations_are_messages(server, result_of, layout):
    settings = [f"rollout.layout={layout}", "rollout.max_new_tokens=17", 'rollout.stop=["</x>"]', "rollout.top_p=0.9"]
    result = result_of(*(part for setting in settings for part in ("--set", setting)), "--temperature", 0.3)
    assert (result["success"], result["episodes"], result["turns"]) == (1.0, 16, 2.0)
    assert (result["policy"], result["model"], result["endpoint"]) == ("endpoint", "m", server.url)
    assert (result["temperature"], result["layout"], result["stop"]) == (0.3, layout, ["</x>"])
    assert len(server.requests) == 32
    shapes = {tuple(message["role"] for message in request["messages"]) for request in server.requests}
    assert shapes == ({("user",), ("user", "assistant", "user")} if layout == "chat" else {("user",)})
    request = server.requests[0]
    assert (request["model"], request["max_tokens"], request["temperature"]) == ("m", 17, 0.3)
    assert (request["stop"], request["top_p"]) == (["</x>"], 0.9)
    assert not any("Authorization" in headers for headers in server.headers)


def test_the_key_is_sent_and_shown_nowhere(server, result_of, spear, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    result = result_of()
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(result)
    monkeypatch.setenv("MY_KEY", "another")
    result_of("--api-key-env", "MY_KEY")
    assert server.headers[-1]["Authorization"] == "Bearer another"
    server.answer = lambda request: (401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}, {})
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m")
    assert code == 2
    assert f"{server.url} refuses the API key (401: Incorrect API key provided: ***)" in text
    assert KEY not in text + caplog.text
    assert len(text.strip().splitlines()) == 1
    code, text = spear("eval", server.url, "--model", "m", "--api-key-env", "NOT_SET")
    assert (code, "the variable NOT_SET is not set or empty" in text) == (2, True)


def test_a_missing_key_is_asked_for(server, spear):
    server.answer = lambda request: (401, {"error": {"message": "who are you?"}}, {})
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m")
    assert (code, "wants an API key: set OPENAI_API_KEY or --api-key-env (401: who are you?)" in text) == (2, True)


@pytest.mark.parametrize("trouble", [BUSY, (503, b"<html>later</html>", {"Retry-After": "0"})], ids=["429", "503"])
def test_a_busy_server_is_asked_again(server, result_of, trouble):
    refused = set()

    def answer(request: dict):
        key = json.dumps(request["messages"])
        with server.lock:
            is_new = key not in refused
            refused.add(key)
        return trouble if is_new else completed(good_player(request))

    server.answer = answer
    assert result_of("--tasks", 6)["success"] == 1.0
    assert len(server.requests) > 12


def test_a_dropped_connection_is_tried_again_after_a_pause(server, result_of):
    drops = iter([None])
    server.answer = lambda request: next(drops, completed(good_player(request)))
    started = time.monotonic()
    assert result_of("--tasks", 1)["success"] == 1.0
    assert 0.5 <= time.monotonic() - started < 5


REFUSALS = {
    "unknown model": (
        (404, {"error": {"message": "The model `m` does not exist.", "code": 404}}, {}),
        "knows no such model or address; does it end in /v1? (404: The model `m` does not exist.)",
    ),
    "bad request": ((400, {"error": "temperature is not supported"}, {}), "(400: temperature is not supported)"),
    "no quota": (
        (429, {"error": {"message": "You have no money", "code": "insufficient_quota"}}, {}),
        "refuses the request (429: You have no money; insufficient_quota)",
    ),
    "garbage": ((200, b"<html>Welcome to nginx</html>", {}), "does not answer as OpenAI's chat API does: it said"),
    "no choices": ((200, {"choices": []}, {}), "does not answer as OpenAI's chat API does"),
    "not an object": ((200, b"[1]", {}), "does not answer as OpenAI's chat API does"),
    "a redirect": ((302, b"", {"Location": "http://elsewhere.example/v1"}), "redirects to http://elsewhere.example/v1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_work_is_one_sentence_and_exit_code_2(server, spear, name):
    reply, sentence = REFUSALS[name]
    server.answer = lambda request: reply
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m", "--tasks", 3)
    assert code == 2
    assert sentence in text
    assert len(text.strip().splitlines()) == 1
    assert len(server.requests) <= 3, "it is of no use to ask again"


def test_nobody_there_is_said_at_once(spear, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        started = time.monotonic()
        code, text = spear("eval", url, "--env", "lookup", "--model", "m")
    assert code == 2
    assert f"{url} is not reachable ([Errno 111] Connection refused)" in text
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "url", ["http://", "ftp://x/v1", "http://host:port/v1", "http://me:word@host/v1", "http://a b/"]
)
def test_an_address_that_is_none_is_refused(spear, url):
    code, text = spear("eval", url, "--env", "lookup", "--model", "m")
    assert code == 2
    assert "is no address of an endpoint" in text or "must not hold a password" in text
    assert "word" not in text.replace("password", "")


def test_the_model_may_be_left_out_where_there_is_only_one(server, spear):
    assert spear("eval", f"{server.url}/", "--env", "lookup", "--tasks", 1)[0] == 0
    assert server.requests[0]["model"] == "the-model"
    server.models = ["small", "large"]
    code, text = spear("eval", server.url, "--env", "lookup")
    assert (code, f"name the endpoint's model; {server.url} has: small, large" in text) == (2, True)


def test_requests_are_under_way_together_and_a_slow_answer_holds_nobody_up(server, result_of):
    done: list[str] = []

    def answer(request: dict):
        text = request["messages"][0]["content"]
        is_slow = "red" in text and len(request["messages"]) == 1
        time.sleep(0.6 if is_slow else 0.05)
        with server.lock:
            done.append("slow" if is_slow else "first" if len(request["messages"]) == 1 else "second")
        return completed(good_player(request))

    server.answer = answer
    started = time.monotonic()
    assert result_of()["success"] == 1.0
    assert time.monotonic() - started < 3, "one after the other it takes four seconds"
    assert 8 <= server.most_open <= 16
    assert done[: done.index("slow")].count("second") >= 8, "others had their second turn before its first was over"


def test_no_more_requests_than_allowed_are_under_way(server, result_of):
    server.answer = lambda request: time.sleep(0.01) or completed(good_player(request))
    assert result_of("--parallel", 3)["success"] == 1.0
    assert server.most_open == 3


def test_seeds_hang_on_the_episode_and_not_on_who_comes_first(server, result_of):
    def seeds() -> list[tuple[str, int]]:
        asked, server.requests = server.requests, []
        return sorted((json.dumps(request["messages"]), request["seed"]) for request in asked)

    four = ["--set", "task.options.families=['red']"]
    result_of(*four)
    first = seeds()
    server.answer = lambda request: time.sleep(request["seed"] % 7 / 100) or completed(good_player(request))
    result_of(*four)
    assert seeds() == first
    result_of(*four, "--seed", 1)
    assert seeds() != first


def test_an_episode_without_an_answer_is_left_out_and_counted(server, result_of):
    server.answer = lambda request: (
        (500, b"boom", {"Retry-After": "0"})
        if "gold" in request["messages"][0]["content"] and "?" not in request["messages"][-1]["content"]
        else completed(good_player(request))
    )
    result = result_of("--tasks", 4, "--parallel", 1)
    assert (result["episodes"], result["failed_episodes"], result["success"]) == (3, 1, 1.0)
    assert "episodes that failed and do not count: 1" in result["printed"]


def test_a_server_that_has_gone_ends_the_evaluation(server, spear):
    answers = iter([completed("look")] * 4)
    server.answer = lambda request: next(answers, (502, b"gone", {"Retry-After": "0"}))
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m")
    assert code == 2
    assert "is not able to answer (502: gone) (tried 6 times)" in text


def test_a_server_that_says_nothing_is_given_up_after_the_time_out(server, spear, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    waited = threading.Event()
    server.answer = lambda request: waited.wait(3) and None
    code, text = spear("eval", server.url, "--env", "lookup", "--model", "m", "--tasks", 1, "--timeout", 0.1)
    waited.set()
    assert code == 2
    assert "did not answer within 0.1 seconds (tried 6 times)" in text


def test_a_conversation_too_long_for_the_model_is_lost_but_nobody_else_is(server, result_of):
    def answer(request: dict):
        if "gold" in request["messages"][0]["content"] and len(request["messages"]) > 1:
            return 400, {"error": {"message": "This model's maximum context length is 12 tokens."}}, {}
        return completed(good_player(request))

    server.answer = answer
    result = result_of("--tasks", 4)
    assert (result["success"], result["failed_episodes"]) == (0.75, 0)


def test_an_answer_that_was_cut_off_says_so_and_an_empty_one_is_an_empty_one(server):
    renderer = MessageRenderer()
    endpoint = ChatEndpoint(ChatServer(server.url), model="m", renderer=renderer, sampling=Sampling(stop=("</a>",)))
    prompts = [renderer.prompt([{"role": "user", "content": word}]) for word in ("length", "nothing", "late stop")]
    replies = {
        "length": completed("go to", "length"),
        "nothing": completed(None),
        "late stop": completed("<a>x</a> and so on", "length"),
    }
    server.answer = lambda request: replies[request["messages"][0]["content"]]
    said = endpoint.generate(prompts)
    assert [renderer.parse(completion.token_ids) for completion in said] == ["go to", "", "<a>x</a>"]
    assert [completion.truncated for completion in said] == [True, False, False]


def test_a_model_that_wants_its_limit_under_another_name_gets_it(server, result_of):
    wish = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    server.answer = lambda request: (
        (400, {"error": {"message": wish}}, {}) if "max_tokens" in request else completed(good_player(request))
    )
    assert result_of()["success"] == 1.0
    assert "max_completion_tokens" in server.requests[-1]


@pytest.mark.parametrize(
    ("text", "choice", "whole"),
    [
        ("<action>look", {"finish_reason": "stop"}, "<action>look</action>"),
        ("<action>look</action> and", {"finish_reason": "stop"}, "<action>look</action>"),
        ("<action>look", {"finish_reason": "length"}, "<action>look"),
        ("<action>look", {"finish_reason": "stop", "stop_reason": "</action>"}, "<action>look</action>"),
        ("<action>look", {"finish_reason": "stop", "stop_reason": None}, "<action>look"),
        ("I give up", {"finish_reason": "stop"}, "I give up"),
        ("a. b", {"finish_reason": "stop", "stop_reason": "."}, "a."),
    ],
)
def test_a_stop_string_that_the_server_left_out_is_put_back(text, choice, whole):
    assert with_stop(text, ("</action>", "."), choice)[0] == whole


def test_a_key_that_cannot_be_one_is_refused_without_being_shown():
    with pytest.raises(EndpointError, match="holds characters that no key has") as raised:
        ChatServer("http://localhost/v1", api_key="sk-\u2603-secret")
    assert "secret" not in str(raised.value)
