"""verl's trainer mode `spear`: its synchronous trainer, with the core's training step around the actor update."""

import math
import random
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.utils.losses import ppo_loss

from spear_rl.algorithms import Algorithm, GroupRelative
from spear_rl.app.build.training import algorithm_of
from spear_rl.engines.base import Term
from spear_rl.errors import ConfigError
from spear_rl.integrations.shared import episodes, state_file
from spear_rl.integrations.verl import loop, rows  # noqa: F401  loop registers our environments
from spear_rl.integrations.verl.launch import config_of
from spear_rl.train.step import train_step
from spear_rl.types import Group


@register_trainer("spear")
class SpearTrainer(PPOTrainerSync):  # type: ignore[misc]
    """Overrides methods of verl's trainer and calls each of them; advantages, replay and filters are the core's."""

    def __init__(self, config: Any) -> None:
        settings = config_of(OmegaConf.to_container(config.spear, resolve=True) if "spear" in config else None)
        self._algorithm, self._rng = algorithm_of(settings), random.Random(settings.run.seed)
        # With nothing of ours switched on, verl's own step does the same.
        plain = Algorithm(invalid_penalty=0.0, advantages=GroupRelative(), loss=self._algorithm.loss)
        self._optim = settings.optim
        self._is_plain = self._algorithm == plain and not self._optim.minibatch_rows and self._optim.epochs == 1
        if config.actor_rollout_ref.actor.shuffle:
            raise ConfigError("actor_rollout_ref.actor.shuffle must be False: replay rows have a place in every update")
        # verl tests for the word "sync" in six places; any other word makes it asynchronous.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config=config)

    def on_init_end(self) -> None:
        if not self._is_plain:
            # Replay has neither entropy bonus nor KL, and always the clipped loss.
            replay = {"entropy_coeff": 0.0, "use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"}}
            configs = [OmegaConf.merge(self.config.actor_rollout_ref.actor, own) for own in ({}, replay)]
            losses = [partial(ppo_loss, config=omega_conf_to_dataclass(own)) for own in configs]
            self.actor_rollout_wg.set_loss_fn(partial(rows.joint_loss, losses=losses))
        super().on_init_end()

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self._is_plain:
            return super()._update_actor(batch, metrics)
        updates: list[list[Term]] = []
        train = partial(self._train, updates, batch, super()._update_actor, metrics)
        engine: Any = SimpleNamespace(pad_id=0, sync=lambda: updates and train())
        engine.update = lambda own: updates.append(own) or {}  # type: ignore[func-returns-value]
        num_tasks, mini = self.config.data.train_batch_size, self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        step = partial(train_step, self.global_steps - 1, algorithm=self._algorithm, engine=engine, rng=self._rng)
        step = partial(step, num_minibatches=num_tasks // mini, minibatch_rows=self._optim.minibatch_rows)
        found = step(collect=partial(self._played_groups, batch), epochs=self._optim.epochs)
        metrics.update({f"spear/{name}": value for name, value in found.items() if not name.startswith("time/")})
        metrics.update({name[6:]: metrics.pop(name) for name in list(metrics) if name.startswith("actor/spear/")})
        return batch

    def _played_groups(self, batch: Any, step: int) -> list[Group]:
        """The episodes that verl has played, as the core's groups."""
        names = ["prompts", "responses", "loss_mask", "old_log_probs", "rm_scores", "rollout_is_weights"]
        names = [name for name in names if name in batch.fields]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[*names, "extra_fields"])
        extra_fields, played = data.pop("extra_fields").tolist(), []
        columns = [[row.tolist() for row in data[name].unbind()] for name in names]
        for key, tag, extra, *fields in zip(batch.keys, batch.tags, extra_fields, *columns, strict=True):
            if not tag.get("is_padding", False):
                group, session, number = key.rsplit("_", 2)
                *tokens, scores, weights = [*fields, None][:6]
                ours = episodes.from_json(extra["spear"]) if extra.get("spear") else None
                rest: dict[str, Any] = {"reward": sum(scores), "weights": weights, "episode": ours}
                played.append(episodes.Row(group, int(session), int(number), *tokens, **rest))
        text = partial(self.tokenizer.decode, skip_special_tokens=True)
        limit, size = self.config.data.max_response_length, self.config.actor_rollout_ref.rollout.n
        return episodes.groups_of(played, step=step, group_size=size, max_length=limit, text=text)

    def _stored_rows(self, updates: Sequence[Sequence[Term]]) -> tuple[Any, int]:
        """Stores the updates' rows in a partition of our own, where each field has one dtype; also rows per update."""
        config, dp = self.config.actor_rollout_ref, max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        micro = [config.actor.ppo_micro_batch_size_per_gpu, config.rollout.log_prob_micro_batch_size_per_gpu]
        unit = dp * (1 if config.actor.use_dynamic_bsz else math.lcm(*micro))
        share = unit * max(math.ceil(sum(len(term.batch) for term in own) / unit) for own in updates) // dp
        filled = [rows.rows_of(own, size=share * dp) for own in updates]
        # One contiguous part of the batch per rank, and in it the rank's share of every update.
        ordered = [row for rank in range(dp) for own in filled for row in own[rank * share : (rank + 1) * share]]
        keys = [f"spear{uuid4().hex}_{number}_0" for number in range(len(ordered))]
        tags = [{"is_padding": True, "seq_len": len(row["input_ids"])} for row in ordered]
        tq.kv_batch_put(keys=keys, partition_id="spear", fields=list_of_dict_to_tensordict(ordered), tags=tags)
        return tq.KVBatchMeta(keys, tags, "spear", [*ordered[0]]), share * dp

    def _scores(self, replayed: Sequence[Term]) -> list[torch.Tensor]:
        """Log-probabilities of the terms' rows by the policy before the step's updates."""
        meta, _ = self._stored_rows([replayed])
        temperature = self.config.actor_rollout_ref.rollout.temperature
        meta.extra_info = {"calculate_entropy": False, "compute_loss": False, "temperature": temperature}
        self.actor_rollout_wg.compute_log_prob(meta)
        place = {"keys": meta.keys, "partition_id": meta.partition_id}
        found = tq.kv_batch_get(**place, select_fields=["log_probs"])["log_probs"].unbind()
        tq.kv_clear(**place)
        scores = [torch.zeros_like(term.batch.advantages) for term in replayed]
        for row, logprobs in zip(chain.from_iterable(scores), found, strict=False):
            row[1 : len(logprobs)] = logprobs[:-1]  # verl's column t describes token t + 1
        return scores

    def _train(self, updates: list[list[Term]], batch: Any, update: Any, metrics: dict[str, Any]) -> None:
        """Let verl train on the updates' rows in one call: its learning-rate schedule counts calls."""
        clipped, found = rows.with_clipped_replay(updates, self._scores)
        metrics.update({f"spear/replay/{name}": value for name, value in found.items()})
        config, (meta, size) = self.config.actor_rollout_ref, self._stored_rows(clipped)
        usual = config.actor.ppo_mini_batch_size, config.rollout.n
        try:
            if "ref_log_prob" in batch.fields:
                self._compute_ref_log_prob(meta, metrics)
                meta.fields.append("ref_log_prob")
            config.actor.ppo_mini_batch_size, config.rollout.n = size, 1
            update(meta, metrics)
        finally:
            config.actor.ppo_mini_batch_size, config.rollout.n = usual
            tq.kv_clear(keys=meta.keys, partition_id=meta.partition_id)

    def _save_checkpoint(self) -> None:
        # Before verl's own, which marks the checkpoint as complete.
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        state_file.save(folder, self._algorithm, self._rng)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            trainer = self.config.trainer
            newest = Path(trainer.default_local_dir, f"global_step_{self.global_steps}")
            folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else newest
            state_file.restore(folder, self._algorithm, self._rng)
