"""What a call of an agent costs beside the generation itself: HTTP, matching, rendering, capture.

python benchmarks/agent_overhead.py

A generator that takes no time completes the calls, so all that is measured is overhead. Each agent makes growing
conversations over one connection with the standard library's client. Printed per call: what an agent sees (median),
the whole time divided by all calls, and the trainer's share of it in CPU time. Agents that call at once wait for each
other, as the agents' own clients and the trainer share the cores.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence

from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.rollout import Task
from spear_rl.rollout.agents.collect import AgentRunner
from spear_rl.rollout.agents.rendering import AgentRenderer
from spear_rl.types import Completion

NUM_CALLS, NUM_TURNS = 200, 10


def calls(task: Task, base_url: str, api_key: str) -> float:
    """NUM_CALLS calls; returns the median seconds of one."""
    host = base_url.split("/")[2]
    connection, seconds = http.client.HTTPConnection(host), []
    head = {"Authorization": f"Bearer {api_key}"}
    messages: list[dict[str, str]] = []
    for number in range(NUM_CALLS):
        if number % NUM_TURNS == 0:
            messages = []
        messages.append({"role": "user", "content": f"you see shelf {number} with a mug and a pen on it. " * 8})
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": messages}), head)
        answer = json.load(connection.getresponse())
        seconds.append(time.perf_counter() - start)
        messages.append(answer["choices"][0]["message"])
    return sorted(seconds)[len(seconds) // 2]


class Instant:
    """A generator that takes no time."""

    def __init__(self, ids: list[int]) -> None:
        self._completion = Completion(ids, [-1.0] * len(ids))

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [self._completion for _ in prompts]


def main() -> None:
    tokenizer = tiny_tokenizer(["you see shelf 1 2 3 4 5 6 7 8 9 0 with a mug and a pen on it."])
    generator = Instant(tokenizer.encode("you see a mug"))
    for num_agents in (1, 8, 64):
        with AgentRunner("agent_overhead:calls", AgentRenderer(tokenizer)) as runner:
            options = {"generator": generator, "max_turns": NUM_CALLS, "step": 0}
            runner.collect([Task("t", print)], group_size=1, **options)  # starts the launcher
            start, cpu = time.perf_counter(), time.process_time()
            [group] = runner.collect([Task("t", print)], group_size=num_agents, **options)
            whole, cpu = time.perf_counter() - start, time.process_time() - cpu
        seen = sorted(t.reward for t in group.trajectories)[num_agents // 2]
        each, own = whole / (num_agents * NUM_CALLS), cpu / (num_agents * NUM_CALLS)
        print(f"{num_agents:3d} agents: {1e3 * seen:6.2f} ms seen, {1e3 * each:5.2f} ms whole, {1e3 * own:5.2f} ms CPU")


if __name__ == "__main__":
    main()
