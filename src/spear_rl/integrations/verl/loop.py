"""Our environments as verl's agent loop `spear`: the same rollout code, with verl's server as the generator."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from spear_rl.app.build_rollout import tasks_of
from spear_rl.integrations.shared.episodes import packed
from spear_rl.integrations.verl.launch import config_of
from spear_rl.integrations.verl.rows import fields_of
from spear_rl.io.escaping import one_line
from spear_rl.rollout import LAYOUTS, ChatRenderer, Task, collect_groups
from spear_rl.train.step import collate
from spear_rl.types import Completion, Group, Trajectory

_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="episode")  # they wait most of the time
_renderer = lru_cache(maxsize=2)(ChatRenderer)
NAMES = {"prompt_ids": "prompts", "response_ids": "responses", "response_mask": "response_mask"}
NAMES |= {"response_logprobs": "old_log_probs"}


@lru_cache(maxsize=4)
def _panel(settings: str, split: str) -> tuple[Sequence[Task], Callable[..., list[Group]], dict[str, Any]]:
    """The tasks of a split, how they are played, and what to ask of the server beside verl's own settings."""
    config = config_of(OmegaConf.to_container(OmegaConf.create(settings)))
    rollout, max_turns = config.rollout, config.rollout.max_turns if split == "train" else config.eval.max_turns
    limits: dict[str, Any] = {"max_turns": max_turns or rollout.max_turns, "max_context": rollout.max_context}
    layout = partial(LAYOUTS[rollout.layout], detail=rollout.detail)
    stop = {"stop": list(rollout.stop), "include_stop_str_in_output": True} if rollout.stop else {}
    play = partial(collect_groups, group_size=1, step=0, layout=layout, **limits)
    return tasks_of(config, split), play, {"max_tokens": rollout.max_new_tokens, **stop}


class Server:
    """verl's asynchronous server as a generator; lives in the thread of one episode."""

    def __init__(self, client: Any, **sampling: Any) -> None:
        self._client, self._sampling, self._loop, self._name = client, sampling, asyncio.get_running_loop(), uuid4().hex
        self.about: dict[str, Any] = {}  # what it said of its answers, e.g. the weights' version

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [asyncio.run_coroutine_threadsafe(self._answer(prompt), self._loop).result() for prompt in prompts]

    async def _answer(self, prompt: list[int]) -> Completion:
        sampling = dict(self._sampling)  # the server takes entries out
        said = await self._client.generate(request_id=self._name, prompt_ids=prompt, sampling_params=sampling)
        self.about |= said.extra_fields
        hit_limit = said.stop_reason == "length" or len(said.token_ids) >= self._sampling["max_tokens"]
        return Completion(list(said.token_ids), list(said.log_probs or [0.0] * len(said.token_ids)), hit_limit)


@register("spear")
class EnvironmentLoop(AgentLoopBase):  # type: ignore[misc]
    """One episode; a row a turn with independent turns, one row in all with a growing chat."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        split, number = row["extra_info"]["split"], int(row["extra_info"]["index"])
        tasks, play, sampling = _panel(OmegaConf.to_yaml(self.config.spear), split)
        server = Server(self.server_manager, **sampling_params, **sampling)
        playing = partial(play, [tasks[number]], generator=server, renderer=_renderer(self.tokenizer))
        try:
            [group] = await asyncio.get_running_loop().run_in_executor(_threads, playing)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            logging.getLogger(__name__).warning("an episode was left out of its group: %s", one_line(str(error)))
            return []
        return outputs_of(group.trajectories[0], tasks[number], server.about)


def outputs_of(trajectory: Trajectory, task: Task, about: dict[str, Any]) -> list[Any]:
    """verl's outputs of one episode; the first carries the episode itself for the trainer."""
    told = about | {"reward_extra_info": {"acc": float(trajectory.success)}}
    first = packed(task.id, task.family, trajectory)
    batch = collate([trajectory], [[0.0] * len(trajectory.turns)], pad_id=0)
    return [
        AgentLoopOutput(
            **{theirs: row[ours].tolist() for theirs, ours in NAMES.items()},
            reward_score=trajectory.reward,
            num_turns=len(trajectory.turns),
            metrics={},
            extra_fields=told | {"spear": b"" if number else first},
        )
        for number, row in enumerate(fields_of(batch) if batch else [])
    ]
