"""Agents as rollouts: exact tokens, branches, limits, failures, attacks; through the real endpoint and processes."""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_rl.errors import ConfigError
from spear_rl.rollout import Sampling, Task
from spear_rl.rollout.agents.collect import AgentRunner
from spear_rl.rollout.agents.endpoint import Endpoint
from spear_rl.rollout.agents.messages import checked_messages, digests
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.rollout.agents.session import Session
from spear_rl.rollout.collect import EpisodesFailedError
from spear_rl.rollout.rendering.tool_calls import split_calls
from spear_rl.train.step import collate, rows
from spear_rl.types import Completion, Stop
from test_chat_templates import FAMILIES, tokenizer_of

sys.path.insert(0, str(Path(__file__).parent))


class Recorder:
    """A generator of random tokens that remembers what it gave for what."""

    def __init__(self, vocabulary: int, *, seed: int = 0, delay: float = 0.0, most: int = 6) -> None:
        self.given: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()
        self.sizes: list[int] = []
        self._rng, self._vocabulary, self._delay, self._most = random.Random(seed), vocabulary, delay, most

    def generate(self, prompts):
        self.sizes.append(len(prompts))
        time.sleep(self._delay)
        return [self._completion(prompt) for prompt in prompts]

    def _completion(self, prompt):
        ids = [self._rng.randrange(self._vocabulary) for _ in range(self._rng.randint(1, self._most))]
        completion = Completion(ids, [-self._rng.random() for _ in ids])
        self.given[tuple(prompt), tuple(ids), tuple(completion.logprobs)] += 1
        return completion


def tasks(count: int = 2, kind: str = "t", **data) -> list[Task]:
    return [Task(f"{kind}/{number}", print, data=data) for number in range(count)]


@pytest.fixture
def play(tokenizer, make_engine):
    """Plays tasks with one of the agents in agent_examples."""

    def play(agent, played=None, *, generator=None, timeout=20.0, num_parallel=64, rounds=1, **options):
        options = {"group_size": 2, "max_turns": 50, "step": 3} | options
        with AgentRunner(
            f"agent_examples:{agent}", AgentRenderer(tokenizer), timeout=timeout, num_parallel=num_parallel
        ) as runner:
            for _ in range(rounds):
                groups = runner.collect(played or tasks(), generator=generator or make_engine(), **options)
            return groups

    return play


@pytest.mark.parametrize("agent", ["one_call", "async_call"])
def test_an_agent_sync_or_async_gives_groups_with_its_rewards(play, agent):
    groups = play(agent, tasks(3))
    assert [group.task_id for group in groups] == ["t/0", "t/1", "t/2"]
    for played in (t for group in groups for t in group.trajectories):
        assert played.reward == len(played.turns[0].text)
        assert (played.stop, played.success) == (Stop.DONE, played.reward > 0)
    assert [(group.step, group.num_failed, len(group.trajectories)) for group in groups] == [(3, 0, 2)] * 3


def test_captured_tokens_are_those_generated_and_branches_are_rows(play, tokenizer):
    generator = Recorder(len(tokenizer))
    groups = play("growing", tasks(4), generator=generator, group_size=3)
    played = [t for group in groups for t in group.trajectories]
    captured = Counter(
        (tuple(turn.prompt_ids), tuple(turn.completion.token_ids), tuple(turn.completion.logprobs))
        for t in played
        for turn in t.turns
    )
    assert captured == generator.given
    for t in played:
        assert len(t.turns) == 4
        found = rows(t, [1.0] * 4)
        assert sorted(len(row.answers) for row in found) == [1, 3]
        for row in found:
            for answer in row.answers:
                written = answer.completion.token_ids
                assert row.ids[answer.column : answer.column + len(written)] == written
    assert all(t.turns[-1].reward == 1.0 == t.reward for t in played)


def test_sixty_four_agents_play_at_once(play, tokenizer):
    generator = Recorder(len(tokenizer), delay=0.05)
    groups = play("growing", tasks(16), generator=generator, group_size=4, timeout=60.0)
    assert sum(len(group.trajectories) for group in groups) == 64
    assert sum(generator.sizes) == 64 * 4
    assert max(generator.sizes) > 8  # calls that wait together form a batch


def test_the_next_agents_wait_for_a_place(play, tokenizer):
    generator = Recorder(len(tokenizer))
    play("growing", tasks(4), generator=generator, group_size=3, num_parallel=2)
    assert max(generator.sizes) <= 2


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ("never_calls", "returned 0.5 without a call that was answered: it must use the base_url and api_key"),
        ("raises", "raised ValueError: no way to play t/1 (in raises,"),
        ("returns_none", "returned None, not a number: return the episode's reward"),
        ("exits", "raised SystemExit: 0"),
        ("dies", "was killed by signal 9 before it returned"),
    ],
)
def test_an_agent_that_always_fails_is_named_in_one_sentence(play, agent, sentence):
    with pytest.raises(EpisodesFailedError) as caught:
        play(agent)
    said = str(caught.value)
    assert said.startswith(f"task.agent: agent_examples:{agent} failed in all 4 episodes: the last, of t/1, ")
    assert sentence in said
    assert "\n" not in said


def test_a_hanging_agent_is_killed_and_the_others_are_kept(play, caplog):
    played = [*tasks(2), *tasks(1, "hangs"), *tasks(1, "raises"), *tasks(1, "dies"), *tasks(1, "none")]
    start = time.monotonic()
    groups = play("mixed", played, timeout=2.0)
    assert time.monotonic() - start < 60
    assert [(len(group.trajectories), group.num_failed) for group in groups] == [(2, 0)] * 2 + [(0, 2)] * 4
    assert "8 of 12 episodes failed and were left out" in caplog.text


def test_a_failed_episode_is_played_again_and_counts_once(play, tmp_path):
    groups = play("once_unlucky", tasks(1, file=str(tmp_path / "was_here")), group_size=2)
    assert [(len(group.trajectories), group.num_failed) for group in groups] == [(2, 0)]
    assert all(len(t.turns) == 1 for group in groups for t in group.trajectories)


@pytest.mark.parametrize(("agent", "reward"), [("endless", -0.5), ("catches", 0.25)])
def test_a_limit_of_calls_is_no_failure(play, agent, reward):
    [group] = play(agent, [Task("t", print, unfinished_reward=-0.5)], max_turns=3)
    stop = Stop.MAX_TURNS if agent == "endless" else Stop.DONE
    assert [(t.stop, len(t.turns), t.reward) for t in group.trajectories] == [(stop, 3, reward)] * 2


@pytest.mark.parametrize("limit", [{"max_response_tokens": 7}, {"max_context": 60}])
def test_limits_of_tokens_end_an_episode_as_overlong(play, tokenizer, limit):
    agent = "endless" if "max_response_tokens" in limit else "growing"
    [group] = play(agent, tasks(1), generator=Recorder(len(tokenizer), most=30), **limit)
    for t in group.trajectories:
        assert t.stop is Stop.OVERLONG
        assert all(len(turn.prompt_ids) <= limit.get("max_context", math.inf) for turn in t.turns)
        assert t.num_tokens <= limit.get("max_response_tokens", math.inf)


def test_samples_logprobs_limits_stops_seeds_and_streams_are_served(play):
    [group] = play("asks_for_everything", tasks(1))
    assert group.num_failed == 0


def test_what_is_malformed_foreign_or_without_the_key_is_refused(play):
    [group] = play("attacks", tasks(1))
    assert [len(t.turns) for t in group.trajectories] == [1, 1]


def test_a_client_that_is_refused_while_it_sends_still_gets_the_answer():
    endpoint = Endpoint(lambda call: None)
    try:
        with socket.create_connection(endpoint.server_address, timeout=10) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: evil.example\r\n")
            client.sendall(b"Content-Length: 200000\r\n\r\n")
            for _ in range(20):  # the refusal has been sent long before the last of it
                time.sleep(0.01)
                client.sendall(b"x" * 10_000)
            got = b""
            while part := client.recv(65536):
                got += part
    finally:
        endpoint.close()
    assert got.startswith(b"HTTP/1.1 403 ")
    assert b"another host" in got


def test_the_key_of_an_episode_that_is_over_is_refused(play, tmp_path):
    [group] = play("keeps_its_key", tasks(1, file=str(tmp_path / "key")), num_parallel=1, group_size=3)
    assert [len(t.turns) for t in group.trajectories] == [1, 1, 1]


def test_a_call_that_the_agent_gave_up_does_not_train(play, tokenizer):
    generator = Recorder(len(tokenizer), delay=0.1)
    [group] = play("hangs_up", tasks(1), generator=generator)
    assert [len(t.turns) for t in group.trajectories] == [1, 1]
    assert all("lost" not in t.turns[0].observation for t in group.trajectories)
    assert sum(generator.sizes) == 4


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("agent_examples:nobody", "the module agent_examples has no nobody"),
        ("no_such_module:solve", "there is no module no_such_module"),
        ("agent_examples", "names no agent: write package.module:function"),
    ],
)
def test_an_agent_that_cannot_be_imported_is_named(tokenizer, make_engine, name, sentence):
    with pytest.raises(ConfigError, match=sentence), AgentRunner(name, AgentRenderer(tokenizer)) as runner:
        runner.collect(tasks(), group_size=2, generator=make_engine(), max_turns=3, step=0)


def test_nothing_is_left_running(play, tokenizer):
    import subprocess

    class Broken(Recorder):
        def generate(self, prompts):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"):
        play("hangs", generator=Broken(9))
    time.sleep(0.5)
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in found.splitlines() if "rollout.agents.launcher" in line and "defunct" not in line]


def test_the_openai_package_is_served(make_engine, tokenizer, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    own = {"question": "red code ?", "digit": "7"}
    with AgentRunner("agent_openai:solve", AgentRenderer(tokenizer)) as runner:
        [group] = runner.collect(
            [Task("t", print, data=own)], group_size=2, generator=make_engine(), max_turns=3, step=0
        )
    assert [len(t.turns) for t in group.trajectories] == [3, 3]


def test_a_dead_launcher_is_replaced_and_its_agents_are_run_again(play, tmp_path):
    groups = play("kills_its_launcher", tasks(2, file=str(tmp_path / "was_here")))
    assert [(len(group.trajectories), group.num_failed) for group in groups] == [(2, 0)] * 2


@pytest.mark.parametrize("hangs", [False, True])
def test_what_an_agent_started_ends_with_it(play, hangs):
    import subprocess

    seconds = f"4321.{random.randrange(10**9)}"
    hung = pytest.raises(EpisodesFailedError, match=r"made no call for 3 s .* raise rollout\.step_timeout")
    with hung if hangs else contextlib.nullcontext():
        play("leaves_a_child", tasks(1, seconds=seconds, hangs=hangs), group_size=2, timeout=3.0 if hangs else 20.0)
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {seconds}" not in found


@pytest.mark.parametrize("packed", [False, True])
def test_captured_log_probabilities_are_the_policys_with_and_without_continuous_batching(play, make_engine, packed):
    engine = make_engine(sampling=Sampling(max_new_tokens=5), **({"packed": True, "num_slots": 4} if packed else {}))
    groups = play("growing", tasks(3), generator=engine)
    played = [t for group in groups for t in group.trajectories]
    batch = collate(played, [[1.0] * len(t.turns) for t in played], pad_id=engine.pad_id)
    assert batch is not None
    assert int(batch.mask.sum()) == sum(t.num_tokens for t in played)
    torch.testing.assert_close(engine.scored(batch)[0][batch.mask], batch.old_logprobs[batch.mask], rtol=0, atol=2e-3)


def test_everything_is_served_with_continuous_batching(play, make_engine):
    engine = make_engine(sampling=Sampling(max_new_tokens=5), packed=True, num_slots=4)
    [group] = play("asks_for_everything", tasks(1), generator=engine)
    assert group.num_failed == 0


@pytest.mark.parametrize("agent", ["forces_calls", "lists_models"])
def test_what_cannot_be_promised_is_refused_by_name_and_the_rest_is_served(play, agent):
    [group] = play(agent, tasks(1))
    assert [len(t.turns) for t in group.trajectories] == [1, 1]


class Caller(Recorder):
    """Writes a call of a tool, whatever it is asked."""

    def __init__(self, tokenizer) -> None:
        super().__init__(len(tokenizer))
        self._ids = tokenizer.encode('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        self._ids.append(tokenizer.eos_token_id)

    def _completion(self, prompt):
        return Completion(list(self._ids), [-1.0] * len(self._ids))


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "mistral"])
def test_with_tool_choice_none_the_conversation_goes_on_as_one_row_and_nothing_is_called(family):
    renderer = AgentRenderer(tokenizer := tokenizer_of(family))
    with AgentRunner("agent_examples:looks_then_says", renderer, timeout=20.0) as runner:
        [group] = runner.collect(tasks(1), group_size=2, generator=Caller(tokenizer), max_turns=5, step=0)
    assert group.num_failed == 0
    for t in group.trajectories:
        assert [turn.used_tool for turn in t.turns] == [True, False]
        assert len(rows(t, [1.0] * 2)) == 1


class Looker(Recorder):
    """Looks once, and then says what it saw."""

    def __init__(self, tokenizer, ending: str) -> None:
        super().__init__(len(tokenizer))
        self._tokenizer, self._ending = tokenizer, ending

    def _completion(self, prompt):
        has_seen = "zebra" in self._tokenizer.decode(prompt)
        call = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
        ids = [*self._tokenizer.encode(self._ending if has_seen else call), self._tokenizer.eos_token_id]
        return Completion(ids, [-1.0] * len(ids))


@pytest.mark.parametrize("framework", ["openai", "langchain_openai", "smolagents", "agents", "pydantic_ai"])
def test_an_agent_of_a_framework_calls_its_tool_and_answers(framework):
    """Skipped where the framework is not installed. Its two calls are one row, unless it rewrites what was said."""
    pytest.importorskip(framework)
    ending = '<tool_call>{"name": "final_answer", "arguments": {"answer": "zebra"}}</tool_call>'
    tokenizer = tokenizer_of("qwen2_5")
    generator = Looker(tokenizer, ending if framework == "smolagents" else "zebra")
    with AgentRunner(f"agent_frameworks:{framework}", AgentRenderer(tokenizer), timeout=60.0) as runner:
        [group] = runner.collect(tasks(1), group_size=2, generator=generator, max_turns=5, step=0)
    assert group.num_failed == 0
    for t in group.trajectories:
        assert (t.reward, [turn.used_tool for turn in t.turns]) == (1.0, [True, framework == "smolagents"])
        assert len(rows(t, [1.0] * 2)) == (2 if framework == "smolagents" else 1)


def test_another_way_to_write_calls_is_read_by_another_reader(tokenizer):
    def shout(text, tools):
        names = [tool["function"]["name"] for tool in tools]
        return "", [{"name": name, "arguments": {"said": text}} for name in names], False

    session = Session(AgentRenderer(tokenizer, read_calls=shout))
    messages, tools = [{"role": "user", "content": "red code ?"}], [{"type": "function", "function": {"name": "f"}}]
    ids = tokenizer.encode("red")
    added = session.add(
        session.prompt(messages, tools), Completion(ids, [-1.0] * len(ids)), messages=messages, tools=tools, key=0
    )
    assert [call["function"]["name"] for call in added.message["tool_calls"]] == ["f"]


def test_more_connections_than_the_endpoint_takes_wait_and_idle_ones_make_room(play, monkeypatch):
    from spear_rl.rollout.agents import endpoint

    monkeypatch.setattr(endpoint, "MAX_CONNECTIONS", 16)
    monkeypatch.setattr(endpoint, "READ_SECONDS", 1.0)
    leave, counts = endpoint.Endpoint._leave, []
    monkeypatch.setattr(
        endpoint.Endpoint, "_leave", lambda self, request: (counts.append(len(self._open)), leave(self, request))
    )
    [group] = play("opens_many_connections", tasks(1, idle=20), timeout=60.0, group_size=1)
    assert [len(t.turns) for t in group.trajectories] == [24]
    assert max(counts) == 16


def test_a_trainer_that_is_killed_leaves_neither_agents_nor_what_they_started(tmp_path):
    import os
    import signal
    import subprocess

    command = [
        sys.executable, "-m", "spear_rl.cli", "train", "task.env=lookup",
        "task.agent=agent_examples:hangs_with_a_child", "engine.model=tiny-xs", "rollout.num_tasks=2",
        "rollout.group_size=2", "rollout.max_new_tokens=3",
        "eval.tasks=0", "run.threads=1", "run.steps=1", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    (pids := tmp_path / "pids").mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = os.environ | {"AGENT_PIDS": str(pids), "PYTHONPATH": path}
    trainer = subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def found():
        return [int(pid) for file in pids.iterdir() if file.suffix != ".tmp" for pid in file.read_text().split()]

    def wait_until(true):
        end = time.monotonic() + 120
        while not true() and time.monotonic() < end:
            time.sleep(0.1)
        return true()

    try:
        assert wait_until(lambda: len(found()) == 12 or trainer.poll() is not None)
        assert trainer.poll() is None
        assert all(map(is_alive, found()))
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert wait_until(lambda: not any(map(is_alive, found())))


def test_a_call_costs_the_trainer_less_than_five_milliseconds_beside_the_generation(play, tokenizer):
    """In CPU time, which other processes do not change; benchmarks/agent_overhead.py measures the rest."""
    generator = Recorder(len(tokenizer))
    play("growing", generator=generator)
    num_before, start = sum(generator.sizes), time.process_time()
    play("growing", tasks(8), generator=generator, group_size=8)
    spent, num_calls = time.process_time() - start, sum(generator.sizes) - num_before
    assert num_calls == 8 * 8 * 4
    assert spent / num_calls < 0.005


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# Without processes: conversations and their tokens.


def a_tree(rng: random.Random, session: Session, *, num_calls: int, tools) -> None:
    """Calls that begin, continue or branch from conversations, as an agent re-sends them."""
    known: list[list[dict]] = [[]]
    vocabulary = len(session.renderer._tokenizer)
    for _ in range(num_calls):
        before = rng.choice(known)
        messages = [*before, {"role": "user", "content": rng.choice(["go on", "look again\n", "what now?"])}]
        checked = checked_messages(json.loads(json.dumps(messages)))
        prompt = session.prompt(checked, tools)
        ids = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.5:
            ids.append(session.renderer.end_id)
        capture = session.add(prompt, Completion(ids, [-1.0] * len(ids)), messages=checked, tools=tools, key=0)
        calls = capture.message.get("tool_calls")
        known.append([*messages, capture.message | ({"tool_calls": calls} if calls else {})])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_sampled_token_is_ever_tokenised_again(family, seed):
    """Also with templates that show earlier answers otherwise than they were written."""
    rng = random.Random(seed)
    session = Session(AgentRenderer(tokenizer_of(family)))
    a_tree(rng, session, num_calls=8, tools=[])
    for capture in session.captures:
        if parent := capture.parent:
            whole = [*parent.prompt_ids, *parent.completion.token_ids]
            assert capture.prompt_ids[: len(whole)] == whole
    played = session.trajectory(1.0, Stop.DONE)
    assert len(played.turns) == 8
    found = rows(played, [1.0] * 8)
    num_ends = len({id(c) for c in session.captures} - {id(c.parent) for c in session.captures})
    assert len(found) == num_ends  # one row per conversation
    assert sum(len(row.answers) for row in found) == 8


def test_a_conversation_is_recognised_however_a_framework_writes_it():
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": "z"}'}}
    first = checked_messages(
        [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ]
    )
    other = {"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"y":"z","x":1}'}}
    second = checked_messages(
        [
            {"role": "system", "content": [{"type": "text", "text": "rules"}]},
            {"role": "user", "content": " hi "},
            {"role": "assistant", "content": "", "tool_calls": [other]},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "1"}]},
        ]
    )
    assert digests(first, [tool]) == digests(second, [tool])
    assert digests(first, []) != digests(first, [tool])
    assert len({*digests(first, [])}) == 4


@settings(max_examples=50, deadline=None)
@given(
    st.text(alphabet="ab \n", max_size=9),
    st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=5), max_size=3), max_size=3),
)
def test_tool_calls_are_read_as_they_were_written(text, arguments):
    calls = [{"name": "f", "arguments": own} for own in arguments]
    written = text + "".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    assert split_calls(written, [{"function": {"name": "f"}}]) == (text.strip() if calls else text, calls, False)


@pytest.mark.parametrize("broken", ["{", "[]", '{"name": 1}', '{"name": "f", "arguments": "x"}', "[" * 5000])
def test_a_malformed_tool_call_stays_text(broken):
    written = f"<tool_call>{broken}</tool_call>"
    assert split_calls(written, [{"function": {"name": "f"}}]) == (written, [], True)


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_shown_by_every_template(family):
    renderer = AgentRenderer(tokenizer_of(family))
    tool = {"type": "function", "function": {"name": "find_mug", "description": "finds", "parameters": {}}}
    call = {"id": "123456789", "type": "function", "function": {"name": "find_mug", "arguments": {}}}
    asked = checked_messages([{"role": "user", "content": "where?"}])
    prompt = renderer.conversation(asked, [tool])
    assert "find_mug" in renderer._tokenizer.decode(prompt)
    answer = checked_messages(
        [{"role": "tool", "tool_call_id": call["id"], "name": "find_mug", "content": "on the shelf"}]
    )
    written = renderer.answer("<tool_call>...</tool_call>")
    after = renderer.continued(prompt, written, answer, [tool])
    assert after[: len(prompt) + len(written)] == prompt + written
    assert "on the shelf" in renderer._tokenizer.decode(after[len(prompt) + len(written) :])
