"""Our environments as verl's agent loop `spear`: the same rollout code, with verl's server as the generator."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import import_module
from typing import Any
from uuid import uuid4

from spear_rl.config import Config
from spear_rl.integrations.verl.launch import config_of
from spear_rl.integrations.verl.rows import fields_of, rows_of
from spear_rl.playing import tasks_of
from spear_rl.rollout import LAYOUTS, ChatRenderer, Task, collect_groups
from spear_rl.types import Completion, Trajectory

_agent_loop: Any = import_module("verl.experimental.agent_loop.agent_loop")
_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="episode")
"""An episode waits for the server most of the time; verl decides how many are under way."""
_renderer = lru_cache(maxsize=2)(ChatRenderer)


@lru_cache(maxsize=4)
def _panel(settings: str, split: str) -> tuple[Config, Sequence[Task]]:
    config = config_of(import_module("yaml").safe_load(settings))
    return config, tasks_of(config, split)


class Server:
    """verl's asynchronous server as a generator; lives in the thread of one episode."""

    def __init__(self, client: Any, sampling: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._sampling, self._loop, self._name = client, sampling, loop, uuid4().hex
        self.about: dict[str, Any] = {}
        """What the server said of its answers, e.g. the weights' version."""

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [asyncio.run_coroutine_threadsafe(self._answer(prompt), self._loop).result() for prompt in prompts]

    async def _answer(self, prompt: list[int]) -> Completion:
        sampling = dict(self._sampling)  # the server takes entries out
        said = await self._client.generate(request_id=self._name, prompt_ids=prompt, sampling_params=sampling)
        self.about |= said.extra_fields
        ids = list(said.token_ids)
        hit_limit = said.stop_reason == "length" or len(ids) >= self._sampling["max_tokens"]
        return Completion(ids, list(said.log_probs or [0.0] * len(ids)), hit_limit)


@_agent_loop.register("spear")
class EnvironmentLoop(_agent_loop.AgentLoopBase):  # type: ignore[misc]
    """One episode; a row a turn with independent turns, one row in all with a growing chat."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        split, number = row["extra_info"]["split"], int(row["extra_info"]["index"])
        config, tasks = _panel(import_module("omegaconf").OmegaConf.to_yaml(self.config.spear), split)
        rollout, task, loop = config.rollout, tasks[number], asyncio.get_running_loop()
        stop = {"stop": list(rollout.stop), "include_stop_str_in_output": True} if rollout.stop else {}
        server = Server(self.server_manager, sampling_params | {"max_tokens": rollout.max_new_tokens} | stop, loop)
        play = partial(
            collect_groups,
            [task],
            group_size=1,
            generator=server,
            renderer=_renderer(self.tokenizer),
            max_turns=rollout.max_turns if split == "train" else config.eval.max_turns or rollout.max_turns,
            step=0,
            layout=partial(LAYOUTS[rollout.layout], detail=rollout.detail),
            max_context=rollout.max_context,
        )
        try:
            [group] = await loop.run_in_executor(_threads, play)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            logging.getLogger(__name__).warning("an episode was left out of its group: %s", error)
            return []
        return outputs_of(group.trajectories[0], task, server.about)


def outputs_of(trajectory: Trajectory, task: Task, about: dict[str, Any]) -> list[Any]:
    """verl's outputs of one episode; the first carries the episode itself for the trainer."""
    episode = pickle.dumps((task.id, task.family, trajectory))
    outputs = []
    for number, row in enumerate(rows_of(trajectory)):
        fields = fields_of(row, [0.0] * len(row.spans), [0.0] * len(row.spans))
        info = {"spear": b"" if number else episode, "reward_extra_info": {"acc": float(trajectory.success)}}
        outputs.append(
            _agent_loop.AgentLoopOutput(
                prompt_ids=row.prompt,
                response_ids=row.response,
                response_mask=fields["response_mask"].tolist(),
                response_logprobs=fields["old_log_probs"].tolist(),
                reward_score=trajectory.reward,
                num_turns=len(trajectory.turns),
                metrics={},
                extra_fields=about | info,
            )
        )
    return outputs
