"""verl's trainer mode `spear`: the synchronous trainer with our advantages, and replay rows in its actor update."""

from __future__ import annotations

import logging
import math
import os
import pickle
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any
from uuid import uuid4

import torch

from spear_rl.errors import ConfigError
from spear_rl.integrations.verl import loop, rows
from spear_rl.integrations.verl.launch import config_of
from spear_rl.integrations.verl.loss import JointLoss
from spear_rl.types import Group, Metrics
from spear_rl.wiring import algorithm_of

__all__ = ["SpearTrainer", "loop"]

_base: Any = import_module("verl.trainer.ppo.v1.trainer_base")
_sync: Any = import_module("verl.trainer.ppo.v1.trainer_sync")
_tensordict: Any = import_module("verl.utils.tensordict_utils")
_conf: Any = import_module("omegaconf").OmegaConf
tq: Any = import_module("transfer_queue")

STATE = "spear.pt"
"""In a checkpoint of verl's: buffer, baseline and random states. The schedules follow from the step."""
OPTIONAL = {"ref_log_prob": 0.0, "rollout_is_weights": 1.0}
"""What verl's loss reads of a row if it is there; replay rows have the value that changes nothing."""


@_base.register_trainer("spear")
class SpearTrainer(_sync.PPOTrainerSync):  # type: ignore[misc]
    """Wraps methods of verl's and calls every one of them; the numbers are the core's."""

    def __init__(self, config: Any) -> None:
        settings = config_of(_conf.to_container(config.spear, resolve=True) if "spear" in config else None)
        self._algorithm, self._rng = algorithm_of(settings), random.Random(settings.run.seed)
        if config.actor_rollout_ref.actor.shuffle:
            raise ConfigError("actor_rollout_ref.actor.shuffle must be False: replay rows have a place in every update")
        # verl compares the mode with the word "sync" in six places; any other word would make it asynchronous.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config=config)

    def on_init_end(self) -> None:
        typed = import_module("verl.utils.config").omega_conf_to_dataclass
        # For on-policy rows only: entropy bonus, KL, and any loss of verl's but the clipped one.
        plain = {"entropy_coeff": 0.0, "use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}
        configs = [typed(_conf.merge(self.config.actor_rollout_ref.actor, own)) for own in ({}, plain)]
        ppo_loss = import_module("verl.workers.utils.losses").ppo_loss
        self.actor_rollout_wg.set_loss_fn(JointLoss(*(partial(ppo_loss, config=own) for own in configs)))
        super().on_init_end()

    @property
    def _step(self) -> int:
        return int(self.global_steps) - 1  # verl counts from 1

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch, algorithm = super()._compute_advantage(batch, metrics), self._algorithm
        played, episodes = self._played(batch)
        self._groups = algorithm.shaped(played, self._step)
        self._advantages, self._dropped = algorithm.advantages(self._groups), algorithm.dropped(self._groups)
        if algorithm.imitation:
            algorithm.imitation.observe(self._groups)
        written = {key: dict.fromkeys(("advantages", "returns", "spear_mask"), torch.zeros(1)) for key in batch.keys}
        for episode, values, reasons in zip(episodes, self._advantages, self._dropped, strict=True):
            turns = iter(zip(values, reasons, strict=True))
            for key, spans, size in episode:
                own = [next(turns) for _ in spans]
                trains = rows.spread(spans, [float(not reason) for _, reason in own], size)
                advantages = rows.spread(spans, [value for value, _ in own], size) * trains
                written[key] = {"advantages": advantages, "returns": advantages, "spear_mask": trains}
        self._policy = list(written.values())
        _put(batch, self._policy)
        metrics.update(_named(self._rollout_metrics()))
        return batch

    def _played(self, batch: Any) -> tuple[list[Group], list[list[tuple[str, list[rows.Span], int]]]]:
        """What was played, in the core's words, and for every episode its rows: key, spans of its turns, length."""
        names = ["prompts", "responses", "response_mask", "old_log_probs", "rm_scores"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names, "extra_fields"])
        columns = [[row.tolist() for row in data[name].unbind()] for name in names]
        read = dict(zip(batch.keys, zip(*columns, data.pop("extra_fields").tolist(), strict=True), strict=True))
        sessions: dict[str, dict[int, list[tuple[int, str]]]] = {}
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False):
                uid, session, number = key.rsplit("_", 2)
                sessions.setdefault(uid, {}).setdefault(int(session), []).append((int(number), key))
        groups, episodes = [], []
        for uid, numbered in sorted(sessions.items()):
            trajectories, name, family = [], uid, ""
            for _, own in sorted(numbered.items()):
                keys = [key for _, key in sorted(own)]
                if ours := read[keys[0]][-1].get("spear"):
                    name, family, trajectory = pickle.loads(ours)
                    spans = [row.spans for row in rows.rows_of(trajectory)]
                else:
                    spans = [rows.spans_of(read[key][2]) for key in keys]
                    trajectory = rows.trajectory_of(
                        [(*read[key][:2], mine) for key, mine in zip(keys, spans, strict=True)],
                        reward=sum(read[keys[-1]][4]),  # verl has copied it to the other rows
                        max_length=self.config.data.max_response_length,
                        decode=self.tokenizer.decode,
                    )
                # As verl's trainer scores the policy that sampled them: later ratios are free of the server's rounding.
                scored = iter([read[key][3][s : s + n] for key, at in zip(keys, spans, strict=True) for s, n in at])
                turns = [replace(t, completion=replace(t.completion, logprobs=next(scored))) for t in trajectory.turns]
                trajectories.append(replace(trajectory, turns=turns))
                episodes.append([(key, at, len(read[key][1])) for key, at in zip(keys, spans, strict=True)])
            lost = max(self.config.actor_rollout_ref.rollout.n - len(trajectories), 0)
            groups.append(Group(name, trajectories, self._step, {"family": family}, lost))
        return groups, episodes

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        imitation, config, replay, joint = self._algorithm.imitation, self.config.actor_rollout_ref, [], True
        if imitation:
            drawn = imitation.draw(self._step, self._rng, num_played=len(self._advantages))
            replay, joint = list(rows.replay_rows(drawn)), imitation.update == "joint"
            metrics.update(_named(drawn.metrics | {"replay/rows": float(len(replay))}))
        dp = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        sizes = {"dp": dp, "mini": config.actor.ppo_mini_batch_size * config.rollout.n, "unit": _unit(config, dp)}
        layout = rows.cells(len(batch), len(replay), joint=joint, **sizes)
        fillers = iter(range(len(batch) + len(replay), sum(len(cell) for rank in layout for cell in rank)))
        layout = [[[next(fillers) if n < 0 else n for n in cell] for cell in rank] for rank in layout]
        order = [n for rank in layout for cell in rank for n in cell]
        minis = [[n for rank in layout for n in rank[number]] for number in range(len(layout[0]))]
        replay += [rows.padding(self.tokenizer.eos_token_id) for _ in range(len(order) - len(batch) - len(replay))]
        extra = self._stored(batch, replay, minis, metrics)
        rows.take_notes(self._policy, replay, minis, imitation.weight(self._step) if imitation else 0.0)
        _put(batch, [{"spear": row["spear"]} for row in self._policy])
        keys, tags, fields = (
            [*batch.keys, *extra.keys],
            [*batch.tags, *extra.tags],
            {*batch.fields, "spear", "spear_mask"},
        )
        if replay:
            _put(extra, [{"advantages": row["advantages"], "spear": row["spear"]} for row in replay])
            fields &= {*replay[0]}
        update = tq.KVBatchMeta([keys[n] for n in order], [tags[n] for n in order], batch.partition_id, [*fields])
        # One call for all mini-batches: verl steps its learning-rate schedule once a call.
        configured = config.actor.ppo_mini_batch_size
        config.actor.ppo_mini_batch_size = len(minis[0]) // config.rollout.n
        try:
            super()._update_actor(update, metrics)
        finally:
            config.actor.ppo_mini_batch_size = configured
            if replay:
                tq.kv_clear(keys=extra.keys, partition_id=extra.partition_id)
        metrics.update({name[6:]: metrics.pop(name) for name in list(metrics) if name.startswith("actor/spear/")})
        if imitation:
            imitation.keep(self._groups, self._advantages, self._step, dropped=self._dropped)
        return batch

    def _stored(self, batch: Any, replay: list[rows.Fields], minis: list[list[int]], metrics: dict[str, Any]) -> Any:
        """Replay rows where verl's workers find rows; tokens with a high covariance in their mini-batch held back."""
        extra = tq.KVBatchMeta(partition_id=batch.partition_id)
        if not replay or not self._algorithm.imitation:
            return extra
        for row in replay:
            row.update({b: torch.full_like(row["advantages"], v) for b, v in OPTIONAL.items() if b in batch.fields})
        keys = [f"spear{uuid4().hex}_{number}_0" for number in range(len(replay))]
        tags = [{"is_padding": True, "seq_len": len(row["input_ids"])} for row in replay]
        extra = tq.KVBatchMeta(keys, tags, batch.partition_id)
        _put(extra, replay, tags=tags)
        loss: Any = self._algorithm.imitation.loss
        if loss.keywords.get("keep"):
            temperature = self.config.actor_rollout_ref.rollout.temperature
            extra.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
            self.actor_rollout_wg.compute_log_prob(extra)
            names = ["log_probs", "response_mask"]
            data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=names)
            response_of = import_module("verl.workers.utils.padding").response_from_nested
            now = [row.float() for row in response_of(data["log_probs"], data["response_mask"]).unbind()]
            replayed = [[n - len(batch) for n in numbers if n >= len(batch)] for numbers in minis]
            found = [rows.hold_back(loss, [replay[n] for n in m], [now[n] for n in m]) for m in replayed if m]
            metrics.update(_named({name: fmean(entry[name] for entry in found) for name in found[0]}))
        return extra

    def _rollout_metrics(self) -> Metrics:
        played = [t for group in self._groups for t in group.trajectories]
        reasons = Counter(reason for turns in self._dropped for reason in turns)
        return {
            "rollout/reward": fmean(t.reward for t in played),
            "rollout/success": fmean(t.success for t in played),
            "rollout/tool_turns": fmean(t.num_tool_turns for t in played),
            "rollout/bonus": fmean(t.bonus for t in played),
            "rollout/failed_episodes": float(sum(group.num_failed for group in self._groups)),
            "policy/turns_trained": float(reasons.pop("", 0)),
        } | {f"policy/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())}

    def _save_checkpoint(self) -> None:
        # Before verl's own, which ends by declaring the checkpoint complete.
        folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        os.makedirs(folder, exist_ok=True)
        state = {"algorithm": self._algorithm.state_dict(), "rng": self._rng.getstate()}
        torch.save(state, os.path.join(folder, STATE))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        trainer = self.config.trainer
        newest = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
        path = os.path.join(trainer.resume_from_path if trainer.resume_mode == "resume_path" else newest, STATE)
        if self.global_steps and os.path.exists(path):
            state = torch.load(path, weights_only=True)
            self._algorithm.load_state_dict(state["algorithm"])
            self._rng.setstate(state["rng"])
        elif self.global_steps:
            logging.getLogger(__name__).warning("%s is missing: the replay buffer and its baseline start empty", path)


def _unit(config: Any, dp: int) -> int:
    """What a rank's share of a mini-batch must be a multiple of."""
    micro = [config.actor.ppo_micro_batch_size_per_gpu, config.rollout.log_prob_micro_batch_size_per_gpu]
    sizes = [config.rollout.n // math.gcd(config.rollout.n, dp), *([] if config.actor.use_dynamic_bsz else micro)]
    return math.lcm(*(int(size or 1) for size in sizes))


def _put(batch: Any, fields: list[rows.Fields], **options: Any) -> None:
    told = _tensordict.list_of_dict_to_tensordict(fields)
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=told, **options)


def _named(metrics: Metrics) -> dict[str, float]:
    return {f"spear/{name}": value for name, value in metrics.items()}
