"""Our environments as verl's agent loop `spear`: our rollout code with verl's server as the generator."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from spear_rl.app.build.rollout import layout_of, tasks_of
from spear_rl.integrations.shared.episodes import fields_of, to_json
from spear_rl.integrations.verl.launch import config_of
from spear_rl.io.escaping import one_line
from spear_rl.rollout import ChatRenderer, Task, collect_groups
from spear_rl.train.step import collate
from spear_rl.types import Completion, Group, Trajectory, limit_of

_threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="episode")  # mostly idle
_renderer = lru_cache(maxsize=2)(ChatRenderer)
NAMES = {"prompt_ids": "prompts", "response_ids": "responses", "response_mask": "response_mask"}
NAMES |= {"response_logprobs": "old_log_probs"}


@lru_cache(maxsize=4)
def _tasks_and_play(
    settings: str, split: str
) -> tuple[Sequence[Task], Callable[..., list[Group]], dict[str, Any], bool | None]:
    """The tasks of a split, the function that plays them, sampling settings besides verl's own, rollout.thinking."""
    config = config_of(OmegaConf.to_container(OmegaConf.create(settings)))
    rollout, max_turns = config.rollout, config.rollout.max_turns if split == "train" else config.eval.max_turns
    limits: dict[str, Any] = {"max_turns": max_turns or rollout.max_turns, "max_context": rollout.max_context}
    limits["max_response_tokens"] = rollout.max_response_tokens or None
    stop = {"stop": list(rollout.stop), "include_stop_str_in_output": True} if rollout.stop else {}
    play = partial(collect_groups, group_size=1, step=0, layout=layout_of(config), **limits)
    return tasks_of(config, split), play, {"max_tokens": rollout.max_new_tokens, **stop}, rollout.thinking


class Server:
    """verl's asynchronous server as the synchronous generator of one episode, in the episode's thread."""

    def __init__(self, client: Any, **sampling: Any) -> None:
        self._client, self._sampling, self._loop, self._name = client, sampling, asyncio.get_running_loop(), uuid4().hex
        self.extra_fields: dict[str, Any] = {}  # of its answers, e.g. the version of the weights

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [asyncio.run_coroutine_threadsafe(self._answer(prompt), self._loop).result() for prompt in prompts]

    async def _answer(self, prompt: list[int]) -> Completion:
        limit = limit_of(prompt, self._sampling["max_tokens"])
        sampling = {**self._sampling, "max_tokens": limit}  # a copy: the server removes entries
        output = await self._client.generate(request_id=self._name, prompt_ids=list(prompt), sampling_params=sampling)
        self.extra_fields |= output.extra_fields
        ids = list(output.token_ids)
        truncated = output.stop_reason == "length" or len(ids) >= limit
        return Completion(ids, list(output.log_probs or [0.0] * len(ids)), truncated)


@register("spear")
class EnvironmentLoop(AgentLoopBase):  # type: ignore[misc]
    """One episode: one row per turn with independent turns, one row in all with a growing chat."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        split, number = row["extra_info"]["split"], int(row["extra_info"]["index"])
        tasks, play, sampling, thinking = _tasks_and_play(OmegaConf.to_yaml(self.config.spear), split)
        server = Server(self.server_manager, **sampling_params, **sampling)
        renderer = _renderer(self.tokenizer, thinking=thinking)
        play_episode = partial(play, [tasks[number]], generator=server, renderer=renderer)
        try:
            [group] = await asyncio.get_running_loop().run_in_executor(_threads, play_episode)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            logging.getLogger(__name__).warning("an episode was left out of its group: %s", one_line(str(error)))
            return []
        return outputs_of(group.trajectories[0], tasks[number], server.extra_fields)


def outputs_of(trajectory: Trajectory, task: Task, extra_fields: dict[str, Any]) -> list[Any]:
    """verl's outputs of one episode; the first holds the episode itself for the trainer."""
    extra_fields = extra_fields | {"reward_extra_info": {"acc": float(trajectory.success)}}
    episode = to_json(task.id, task.family, trajectory)
    batch = collate([trajectory], [[0.0] * len(trajectory.turns)], pad_id=0)
    return [
        AgentLoopOutput(
            **{theirs: row[ours].tolist() for theirs, ours in NAMES.items()},
            reward_score=trajectory.reward,
            num_turns=len(trajectory.turns),
            metrics={},
            extra_fields=extra_fields | {"spear": b"" if number else episode},
        )
        for number, row in enumerate(fields_of(batch) if batch else [])
    ]
