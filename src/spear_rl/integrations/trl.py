"""SPEAR inside TRL, which plays, scores and learns as ever: we remember good episodes and add a term to its loss."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spear_rl.algorithms import (
    Algorithm,
    ClippedSurrogate,
    FixedLength,
    GroupRelative,
    SequenceMean,
    TokenMean,
    grpo,
    named,
    spear,
)
from spear_rl.algorithms import tool_bonus as core_bonus
from spear_rl.algorithms.spear import PAPER_BONUS
from spear_rl.errors import ConfigError, MissingExtraError, UserError
from spear_rl.functional import LossInputs, Reduce
from spear_rl.functional.schedules import Schedule, as_schedule
from spear_rl.train.stored_state import restoring, stored_state
from spear_rl.types import Completion, Group, Metrics, Stop, Trajectory, Turn

WRAPPED = ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss", "_save_checkpoint")
CALLED = ("_load_optimizer_and_scheduler", "_get_per_token_logps_and_entropies", "_get_output_dir")
STATE_FILE = "spear.pt"


LOSS_TYPES = {TokenMean: "dapo", SequenceMean: "grpo", FixedLength: "dr_grpo"}


def settings_of(name: str) -> dict[str, Any]:
    """Advantages and loss of an algorithm by name, for GRPOConfig; filters are left out, and replay is `spear=`."""
    algorithm = named(name)
    loss, advantages = algorithm.loss, algorithm.advantages
    if not (isinstance(loss, ClippedSurrogate) and type(loss.reduction) in LOSS_TYPES):
        raise ConfigError(f"{name}: GRPOConfig can only express a loss that is a ClippedSurrogate")
    if not isinstance(advantages, GroupRelative) or advantages.leave_one_out:
        raise ConfigError(f"{name}: GRPOConfig can only express advantages of GRPO and Dr. GRPO")
    # For a negative advantage, a bound on the ratio (delta) is the dual clip.
    clips = {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high, "delta": loss.dual_clip, "beta": loss.kl}
    scale = "group" if advantages.divide_by_std else "none"
    return {"loss_type": LOSS_TYPES[type(loss.reduction)], **clips, "scale_rewards": scale}


def dr_bot_settings(*, gradient_accumulation_steps: int = 1) -> dict[str, Any]:
    """The part of Dr.BoT that GRPOConfig can express: `GRPOConfig(..., **dr_bot_settings())`."""
    # Two optimizer steps a generation: with one, every ratio is 1 and clipping has nothing to do.
    steps = {"steps_per_generation": 2 * gradient_accumulation_steps}
    steps |= {"gradient_accumulation_steps": gradient_accumulation_steps}
    return settings_of("dr-bot-grpo") | steps | {"mask_truncated_completions": True}


@dataclass
class ToolBonus:
    """A reward function: mu(t) times a tenth a turn that used a tool, at most one; right and wrong answers alike.

    Such a turn is an assistant message with tool calls; a `rollout_func` may count them itself, as `num_tool_turns`.
    """

    weight: Schedule
    updates_per_step: int = 1  # TRL counts optimizer steps, schedules count generations; SpearGRPOTrainer fills it in
    is_bonus = True  # SpearGRPOTrainer keeps it from the replay buffer and its baseline
    __name__ = "tool_bonus"  # under which TRL logs it

    def __call__(
        self, *, completions: Sequence[Any], trainer_state: Any, num_tool_turns: Sequence[int] = (), **_: Any
    ) -> list[float]:
        weight = self.weight(trainer_state.global_step // self.updates_per_step)
        chats = ([] if isinstance(completion, str) else completion for completion in completions)
        counts = num_tool_turns or [sum(bool(message.get("tool_calls")) for message in chat) for chat in chats]
        return [weight * core_bonus.paid(count) for count in counts]


def tool_bonus(weight: float | Schedule = PAPER_BONUS) -> ToolBonus:
    """The paper's bonus, for `reward_funcs`; `weight` is mu(t), a number or a schedule."""
    return ToolBonus(as_schedule(weight))


def supported_trainer(names: Sequence[str] = WRAPPED + CALLED) -> Any:
    """TRL's GRPOTrainer, once it is known to be the one we wrap: its private names move often."""
    version = next((found.version for found in metadata.distributions(name="trl")), None)
    if version is None:
        raise MissingExtraError("TRL is not installed: pip install 'spear-rl[trl]'")
    if not version.startswith("1.16."):
        raise UserError(f"SpearGRPOTrainer needs trl>=1.16,<1.17, not {version}: pip install 'spear-rl[trl]'")
    from trl import GRPOTrainer

    if missing := [name for name in names if not hasattr(GRPOTrainer, name)]:
        raise UserError(f"this TRL's GRPOTrainer has no {', '.join(missing)}: pip install 'spear-rl[trl]'")
    return GRPOTrainer


def require_trainable(args: Any, options: Any) -> None:
    """Say what self-imitation cannot be added to: settings of GRPOConfig, or its own that TRL has no place for."""
    steps, parts = args.steps_per_generation, args.gradient_accumulation_steps
    if args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"):
        raise ConfigError(f"loss_type={args.loss_type!r}: self-imitation needs grpo, bnpo, dr_grpo or dapo")
    if args.importance_sampling_level != "token":
        raise ConfigError("importance_sampling_level must be 'token': self-imitation clips token by token")
    if steps % parts:
        raise ConfigError(f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={parts}")
    if {"bonus", "bonus_of"} & options.keys():
        raise ConfigError("spear: in TRL the bonus is a reward function; add tool_bonus(...) to reward_funcs")
    if options.get("update", "joint") != "joint":
        raise ConfigError("spear: update must be 'joint'; TRL takes no optimizer steps but its own")


def episode(
    prompt: list[int], ids: list[int], own: list[bool], old: list[float], weights: list[float] | None, reward: float
) -> Trajectory:
    """A turn is a stretch of the policy's own: 1 2 | 7 3 4 8 with own x . . x is [1 2] -> 7 and [1 2 7 3 4] -> 8."""
    turns = []
    for start in (i for i, here in enumerate(own) if here and not (i and own[i - 1])):
        end = [*own, False].index(False, start)
        answer = Completion(ids[start:end], old[start:end], weights=weights and weights[start:end])
        turns.append(Turn(prompt + ids[:start], answer, used_tool=end < len(ids)))
    *turns, last = turns or [Turn(prompt, Completion([], []))]
    return Trajectory([*turns, replace(last, reward=reward)], Stop.DONE)


class Rows(NamedTuple):
    """N episodes: prompts padded on the left to P, completions on the right to T, as in TRL."""

    input_ids: Tensor  # [N, P + T]
    attention: Tensor  # [N, P + T]
    old_logprobs: Tensor  # [N, T]
    advantages: Tensor  # [N, T]
    mask: Tensor  # [N, T]


def padded(trajectories: Sequence[Trajectory], turn_advantages: Sequence[Sequence[float]], *, pad_id: int) -> Rows:
    """One row an episode."""
    ids = [t.turns[-1].prompt_ids + t.turns[-1].completion.token_ids for t in trajectories]
    before = max(prompts := [len(t.turns[0].prompt_ids) for t in trajectories])
    shape = len(ids), before + max(len(row) - prompt for row, prompt in zip(ids, prompts, strict=True))
    input_ids, attention = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.long)
    old, advantages, mask = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for row, (trajectory, values) in enumerate(zip(trajectories, turn_advantages, strict=True)):
        start = before - prompts[row]
        input_ids[row, start : start + len(ids[row])] = torch.tensor(ids[row])
        attention[row, start : start + len(ids[row])] = 1
        for turn, advantage in zip(trajectory.turns, values, strict=True):
            answer, begin = turn.completion, start + len(turn.prompt_ids)
            place = row, slice(begin, begin + len(answer.token_ids))
            old[place] = torch.tensor(answer.logprobs)
            advantages[place] = advantage * torch.tensor(answer.weights or [1.0])
            mask[place] = True
    return Rows(input_ids, attention, old[:, before:], advantages[:, before:], mask[:, before:])


def share(count: int, part: int, parts: int, rank: int, ranks: int) -> list[int]:
    """Which of `count` rows a rank trains in one micro-batch; -1 fills up a rank that has one less than another.

    Five rows, two micro-batches, two ranks: rank 0 has [0, 4] and [1], rank 1 has [2, -1] and [3].
    """
    here = range(part, count, parts)
    return [*here, *[-1] * (-len(here) % ranks)][rank::ranks]


class SpearGRPOTrainer(supported_trainer()):  # type: ignore[misc]
    """A GRPOTrainer that imitates its own past episodes where they still beat today's average.

    Args:
        spear: arguments of `spear_rl.algorithms.spear` (imitation, max_age, fraction, covariance, ...); what is left
            out has its default there. None: no self-imitation, exactly a GRPOTrainer.
    """

    def __init__(self, *args: Any, spear: Mapping[str, Any] | None = MappingProxyType({}), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.spear = self._algorithm(spear)
        self._rng = random.Random(self.args.seed)
        self._num_minibatches = max(self.args.steps_per_generation // self.args.gradient_accumulation_steps, 1)
        self._updates_per_step = self._num_minibatches * self.num_iterations
        self._is_task = [not getattr(reward, "is_bonus", False) for reward in self.reward_funcs]
        for bonus in (reward for reward in self.reward_funcs if isinstance(reward, ToolBonus)):
            bonus.updates_per_step = self._updates_per_step
        self._replay: list[Rows | None] = []  # one mini-batch an optimizer step
        self._place = self.accelerator.process_index, self.accelerator.num_processes

    def _algorithm(self, options: Mapping[str, Any] | None) -> Algorithm:
        if options is None or options.get("imitation", 1) is None:
            return grpo()
        require_trainable(self.args, options)
        reductions: dict[str, Reduce] = {"grpo": SequenceMean(), "dr_grpo": FixedLength(self.max_completion_length)}
        reduction = reductions.get(self.loss_type, TokenMean())
        clips = {"clip_low": self.epsilon_low, "clip_high": self.epsilon_high, "dual_clip": self.args.delta}
        base = grpo(divide_by_std=self.scale_rewards != "none")
        try:
            base = replace(base, loss=ClippedSurrogate(**clips, reduction=reduction))
            return spear(base, bonus=None, **{"seed": self.args.seed, **options})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"spear: {error}") from error

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        rewards = super()._calculate_rewards(*args, **kwargs)
        task = rewards[:, self._is_task]
        total = (task * self.reward_weights.to(task.device)[self._is_task]).nansum(dim=1)
        self._task_rewards = total.where(~task.isnan().all(dim=1), math.nan)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        imitation = self.spear.imitation
        if imitation is None or not self.model.training:
            return output
        # Draw what the coming updates replay, then remember what was just played; every rank does the same.
        step, count = self.state.global_step // self._updates_per_step, self._num_minibatches
        groups, advantages = self._played(inputs, output, everything=imitation.gate == "new")
        played = [t for group in groups for t in group.trajectories]
        dropped = [["" if turn.completion.token_ids else "empty" for turn in t.turns] for t in played]
        imitation.observe(groups)
        drawn = imitation.draw(step, self._rng, num_played=len(played))
        imitation.keep(groups, advantages, step, dropped=dropped)
        dealt = [(drawn.trajectories[i::count], drawn.turn_advantages[i::count]) for i in range(count)]
        rows = (padded(*chosen, pad_id=self._tokenizer.pad_token_id) if chosen[0] else None for chosen in dealt)
        self._replay = [r and Rows(*(x.to(self.accelerator.device) for x in r)) for r in rows]
        self._weight, self._num_losses = imitation.weight(step), 0
        self._note(drawn.metrics | {"replay/row_share": len(drawn.trajectories) / max(len(played), 1)})
        return output

    def _played(self, inputs: Any, output: Any, *, everything: bool) -> tuple[list[Group], list[list[float]]]:
        """All ranks' groups, and one advantage a turn. Only episodes that may be replayed keep their tokens."""
        from accelerate.utils import gather_object

        if "pixel_values" in output:
            raise ConfigError("self-imitation does not remember images: pass spear=None")
        mask, old = output["completion_mask"].bool(), output.get("old_per_token_logps")
        if old is None:  # TRL leaves it out where the first update is made by the very policy that played
            ids, attention = (torch.cat([output[f"prompt_{x}"], output[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            old = self._logprobs(self.model, ids, attention, mask.shape[1])
        own, weights = mask & output.get("tool_mask", mask).bool(), output.get("importance_sampling_ratio")
        rewards = self._task_rewards[self.accelerator.process_index * len(mask) :].tolist()
        here = []
        for row, advantage in enumerate(output["advantages"].tolist()):
            real = mask[row] & (everything or advantage > 0)
            ids, where, before = (x[row][real].tolist() for x in (output["completion_ids"], own, old))
            ratios = None if weights is None else weights.expand_as(old)[row][real].tolist()
            prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            made = episode(prompt, ids, where, before, ratios, rewards[row])
            here.append((made, advantage, str(inputs[row].get("family", ""))))
        everyone, groups, advantages = gather_object(here), [], []
        for start in range(0, len(everyone), self.num_generations):
            siblings = everyone[start : start + self.num_generations]
            scored = [(t, a) for t, a, _ in siblings if not math.isnan(t.reward)]
            groups.append(Group(str(start), [t for t, _ in scored], info={"family": siblings[0][2]}))
            advantages += [[a] * len(t.turns) for t, a in scored]
        return groups, advantages

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """TRL's loss and this micro-batch's part of gamma(t) * J_replay.

        The core's loss sees the whole mini-batch of all ranks: before its first micro-batch every row is scored and
        the loss is differentiated by the log-probabilities. What is left for a micro-batch is linear in its own;
        gradients add up over micro-batches and are averaged over ranks.
        """
        loss, parts = super()._compute_loss(model, inputs), self.args.gradient_accumulation_steps
        if not (self._replay and self.model.training):
            return loss
        number, part = divmod(self._num_losses % self.args.steps_per_generation, parts)
        self._num_losses += 1
        if (rows := self._replay[number]) is None:
            return loss
        if part == 0:
            self._pull, self._value = self._differentiated(rows)
        loss = loss + self._value / parts
        if mine := share(len(rows.mask), part, parts, *self._place):
            logprobs = self._logprobs(model, rows.input_ids[mine], rows.attention[mine], rows.mask.shape[1], grad=True)
            pulled = (self._pull[mine] * logprobs).sum() * self.accelerator.num_processes
            loss = loss + pulled - pulled.detach()
        return loss

    def _differentiated(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """[N + 1, T] derivative of gamma(t) * J_replay by the log-probabilities, row -1 being 0; and its value."""
        assert self.spear.imitation
        (count, width), mine = rows.mask.shape, share(len(rows.mask), 0, 1, *self._place)
        scored = self._logprobs(self.model, rows.input_ids[mine], rows.attention[mine], width)
        by_rank = self.accelerator.gather(scored).view(self.accelerator.num_processes, -1, width)
        logprobs = by_rank.transpose(0, 1).reshape(-1, width)[:count].float().requires_grad_()
        imitation = self.spear.imitation
        inputs = LossInputs(logprobs, rows.old_logprobs, rows.advantages, rows.mask, generator=imitation.generator)
        out = imitation.loss(inputs)
        self._note({f"replay/{name}": float(x) for name, x in {"loss": out.loss.detach(), **out.metrics}.items()})
        pull = torch.autograd.grad(self._weight * out.loss, logprobs)[0]
        return torch.cat([pull, torch.zeros_like(pull[:1])]), self._weight * out.loss.detach()

    def _logprobs(self, model: Any, ids: Tensor, attention: Tensor, width: int, *, grad: bool = False) -> Any:
        """[B, T] of the last `width` columns, as TRL scores them."""
        size = None if grad else self.args.per_device_train_batch_size
        with torch.set_grad_enabled(grad):
            return self._get_per_token_logps_and_entropies(model, ids, attention, width, batch_size=size)[0]

    def _note(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name.replace("replay/", "spear/")].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.spear.imitation and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            torch.save({"spear": self.spear.state_dict(), "rng": self._rng.getstate()}, folder / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.spear.imitation and checkpoint and (file := Path(checkpoint) / STATE_FILE).exists():
            saved = stored_state(file)
            with restoring(file):
                self.spear.load_state_dict(saved["spear"])
                self._rng.setstate(saved["rng"])
        elif self.spear.imitation and checkpoint:
            logging.getLogger(__name__).warning("%r has no %s: the replay buffer starts empty", checkpoint, STATE_FILE)
