"""SPEAR inside TRL: TRL samples, scores and trains; we keep good episodes and add a replay term to its loss."""

import inspect
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spear_rl import algorithms
from spear_rl.algorithms import (
    Algorithm,
    ByEntropy,
    BySuccess,
    ClippedSurrogate,
    FixedLength,
    GroupRelative,
    SelfImitation,
    SequenceMean,
    TokenMean,
)
from spear_rl.algorithms.spear import PAPER_BONUS
from spear_rl.errors import ConfigError
from spear_rl.functional import LossInputs, Reduce
from spear_rl.functional.losses import Schedule, as_schedule
from spear_rl.integrations.shared import state_file
from spear_rl.integrations.shared.episodes import Row, episode_of, fields_of, turns_of
from spear_rl.integrations.shared.requirements import require_names, require_surrogate, require_version
from spear_rl.settings.ranges import nearest, shown
from spear_rl.train.step import collate
from spear_rl.types import Group, Metrics, Trajectory

WRAPPED = ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss", "_save_checkpoint")
CALLED = ("_load_optimizer_and_scheduler", "_get_per_token_logps_and_entropies", "_get_output_dir")
LOSS_TYPES = {TokenMean: "dapo", SequenceMean: "grpo", FixedLength: "dr_grpo"}
_SET_BY_SPEAR = {"buffer", "history", "loss", "weight", "full_size", "step_parts", "families", "outcomes", "generator"}
OPTIONS = {field.name for field in fields(algorithms.SelfImitation)} - _SET_BY_SPEAR
OPTIONS |= {*inspect.signature(algorithms.spear).parameters} - {"base", "options"}  # the keys of `spear={...}`


def settings_of(name: str) -> dict[str, Any]:
    """Advantages and loss of an algorithm by name, for GRPOConfig; without filters, and replay is `spear=`."""
    algorithm = algorithms.named(name)
    loss = require_surrogate(algorithm.loss, LOSS_TYPES, setting=name, framework="GRPOConfig")
    advantages = algorithm.advantages
    if not isinstance(advantages, GroupRelative) or advantages.leave_one_out:
        raise ConfigError(f"{name}: GRPOConfig can only express advantages of GRPO and Dr. GRPO")
    # For a negative advantage, a bound on the ratio (delta) is the dual clip.
    clips = {"epsilon": loss.clip_low, "epsilon_high": loss.clip_high, "delta": loss.dual_clip, "beta": loss.kl}
    scale = "group" if advantages.divide_by_std else "none"
    return {"loss_type": LOSS_TYPES[type(loss.reduction)], **clips, "scale_rewards": scale}


def dr_bot_settings(*, gradient_accumulation_steps: int = 1) -> dict[str, Any]:
    """The part of Dr.BoT that GRPOConfig can express: `GRPOConfig(..., **dr_bot_settings())`."""
    # Two optimizer steps per generation: with one, every ratio is 1 and nothing is clipped.
    steps = {"steps_per_generation": 2 * gradient_accumulation_steps}
    steps |= {"gradient_accumulation_steps": gradient_accumulation_steps}
    return settings_of("dr-bot-grpo") | steps | {"mask_truncated_completions": True}


@dataclass
class ToolBonus:
    """A reward function: mu(t) times a tenth per turn that used a tool, at most one; right and wrong answers alike.

    Such a turn is an assistant message with tool calls; a `rollout_func` may count them itself, as `num_tool_turns`.
    """

    weight: Schedule
    updates_per_step: int = 1  # TRL counts optimizer steps, schedules count generations; set by SpearGRPOTrainer
    is_bonus = True  # SpearGRPOTrainer keeps it out of the replay buffer and its baseline
    __name__ = "tool_bonus"  # TRL logs it under this name

    def __call__(
        self, *, completions: Sequence[Any], trainer_state: Any, num_tool_turns: Sequence[int] = (), **_: Any
    ) -> list[float]:
        weight = self.weight(trainer_state.global_step // self.updates_per_step)
        chats = ([] if isinstance(completion, str) else completion for completion in completions)
        counts = num_tool_turns or [sum(bool(message.get("tool_calls")) for message in chat) for chat in chats]
        return [weight * algorithms.tool_bonus.paid(count) for count in counts]


def tool_bonus(weight: float | Schedule = PAPER_BONUS) -> ToolBonus:
    """The paper's bonus, for `reward_funcs`; `weight` is mu(t), a number or a schedule."""
    if isinstance(weight, BySuccess | ByEntropy):
        raise ConfigError("tool_bonus: its weight must be a number or a schedule of steps; TRL tells no success rate")
    return ToolBonus(as_schedule(weight))


def supported_trainer(names: Sequence[str] = WRAPPED + CALLED) -> Any:
    """TRL's GRPOTrainer, after checking the version and the private names that we use."""
    require_version("trl", (1, 16), (1, 17))
    require_names("trl", [f"trl.GRPOTrainer.{name}" for name in names])
    from trl import GRPOTrainer

    return GRPOTrainer


def require_options(options: Any) -> None:
    """Raise one sentence for a name that `spear` does not have, or that TRL has another place for."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"spear: pass a dict of options, e.g. {{'imitation': 1.0}}, or None, not {shown(options)}")
    if {"bonus", "bonus_of"} & options.keys():
        raise ConfigError("spear: in TRL the bonus is a reward function; add tool_bonus(...) to reward_funcs")
    if options.get("join_lost"):
        raise ConfigError("spear: join_lost must be False; TRL computes the advantages of its groups itself")
    if unknown := [name for name in options if name not in OPTIONS]:
        raise ConfigError(f"spear: there is no option {shown(unknown[0])}{nearest(str(unknown[0]), sorted(OPTIONS))}")
    if isinstance(options.get("imitation"), BySuccess | ByEntropy):
        raise ConfigError(
            "spear: imitation must be a number or a schedule of steps; TRL tells neither success nor entropy"
        )
    words = options.get("priority") or ()
    if {"medium", "hard", "rare"} & {*([words] if isinstance(words, str) else words)}:
        raise ConfigError(
            "spear: priority must be confident, fresh or family; TRL does not tell which episodes succeeded"
        )
    if getattr(options.get("covariance"), "joint_means", False):
        raise ConfigError("spear: covariance must have joint_means=False; TRL's rows are not known to replay's loss")


def require_trainable(args: Any, update: str) -> None:
    """Raise one sentence for settings of GRPOConfig, or an update, that self-imitation in TRL cannot work with."""
    steps, parts = args.steps_per_generation, args.gradient_accumulation_steps
    if args.loss_type not in ("grpo", "bnpo", "dr_grpo", "dapo"):
        raise ConfigError(f"loss_type={args.loss_type!r}: self-imitation needs grpo, bnpo, dr_grpo or dapo")
    if args.importance_sampling_level != "token":
        raise ConfigError("importance_sampling_level must be 'token': self-imitation clips per token")
    if steps % parts:
        raise ConfigError(f"steps_per_generation={steps} must be a multiple of gradient_accumulation_steps={parts}")
    if update != "joint":
        raise ConfigError("spear: update must be 'joint'; TRL takes no optimizer steps but its own")


class Rows(NamedTuple):
    """N episodes: prompts padded on the left to P, completions on the right to T, as in TRL."""

    input_ids: Tensor  # [N, P + T]
    attention: Tensor  # [N, P + T]
    old_logprobs: Tensor  # [N, T]
    advantages: Tensor  # [N, T]
    mask: Tensor  # [N, T]


def padded(
    trajectories: Sequence[Trajectory],
    turn_advantages: Sequence[Sequence[float]],
    dropped: Sequence[Sequence[str]] | None = None,
    *,
    pad_id: int,
) -> Rows:
    """One row per episode; `dropped` says why a turn does not train ("" if it does)."""
    batch = collate(trajectories, turn_advantages, pad_id=pad_id, dropped=dropped)
    assert batch is not None, "only episodes with tokens are replayed"
    rows = fields_of(batch)

    def column(name: str, padding: float = 0, side: str = "right", ones: bool = False) -> Tensor:
        tensors = [torch.ones_like(row[name]) if ones else row[name] for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=padding, padding_side=side)

    ids = torch.cat([column("prompts", pad_id, "left"), column("responses", pad_id)], dim=1)
    attention = torch.cat([column("prompts", 0, "left", ones=True), column("responses", ones=True)], dim=1)
    return Rows(ids, attention, column("old_log_probs"), column("advantages"), column("response_mask").bool())


def share(count: int, part: int, parts: int, rank: int, ranks: int) -> list[int]:
    """The rows out of `count` that a rank trains in one micro-batch; -1 fills up a rank that has one row less.

    Five rows, two micro-batches, two ranks: rank 0 has [0, 4] and [1], rank 1 has [2, -1] and [3].
    """
    here = range(part, count, parts)
    return [*here, *[-1] * (-len(here) % ranks)][rank::ranks]


class SpearGRPOTrainer(supported_trainer()):  # type: ignore[misc]
    """A GRPOTrainer that imitates its own past episodes while they are better than the current baseline.

    Args:
        spear: arguments of `spear_rl.algorithms.spear` (imitation, max_age, fraction, covariance, ...), with its
            defaults. None: no self-imitation, exactly a GRPOTrainer.
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
        self._replay: list[Rows | None] = []  # one mini-batch per optimizer step
        self._place = self.accelerator.process_index, self.accelerator.num_processes

    def _algorithm(self, options: Mapping[str, Any] | None) -> Algorithm:
        options = {"imitation": None} if options is None else options
        require_options(options)
        if options.get("imitation", 1) is None:
            return algorithms.grpo()
        require_trainable(self.args, options.get("update", "joint"))
        reductions: dict[str, Reduce] = {"grpo": SequenceMean(), "dr_grpo": FixedLength(self.max_completion_length)}
        reduction = reductions.get(self.loss_type, TokenMean())
        clips = {"clip_low": self.epsilon_low, "clip_high": self.epsilon_high, "dual_clip": self.args.delta}
        base = algorithms.grpo(divide_by_std=self.scale_rewards != "none")
        try:
            base = replace(base, loss=ClippedSurrogate(**clips, reduction=reduction))
            return algorithms.spear(base, bonus=None, **{"seed": self.args.seed, **options})
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
        # Draw what the next updates replay, then store what was just played; every rank does the same.
        step, count = self.state.global_step // self._updates_per_step, self._num_minibatches
        groups, advantages = self._played_groups(inputs, output, imitation)
        played = [t for group in groups for t in group.trajectories]
        dropped = [["" if turn.completion.token_ids else "empty" for turn in t.turns] for t in played]
        imitation.observe(groups, step)
        drawn = imitation.draw(step, self._rng, num_played=len(played))
        imitation.keep(groups, advantages, step, dropped=dropped)
        parts: list[Any] = [drawn.trajectories, drawn.turn_advantages, drawn.dropped]
        dealt = [[part[i::count] for part in parts] for i in range(count)]
        rows = (padded(*chosen, pad_id=self._tokenizer.pad_token_id) if chosen[0] else None for chosen in dealt)
        self._replay = [r and Rows(*(x.to(self.accelerator.device) for x in r)) for r in rows]
        self._weight, self._num_losses = imitation.weight(step), 0
        self._rows_wanted = round(len(drawn.trajectories) / drawn.share) // count
        drawn.metrics.pop("replay/group_success", None)  # TRL does not tell which episodes succeeded
        self._record(drawn.metrics | {"replay/row_share": len(drawn.trajectories) / max(len(played), 1)})
        return output

    def _played_groups(
        self, inputs: Any, output: Any, imitation: SelfImitation
    ) -> tuple[list[Group], list[list[float]]]:
        """All ranks' groups, and one advantage per turn. Only episodes that may be replayed keep their tokens."""
        from accelerate.utils import gather_object

        if "pixel_values" in output:
            raise ConfigError("self-imitation does not store images: pass spear=None")
        mask, old = output["completion_mask"].bool(), output.get("old_per_token_logps")
        if old is None:  # TRL leaves it out if the sampling policy also makes the first update
            ids, attention = (torch.cat([output[f"prompt_{x}"], output[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            old = self._logprobs(self.model, ids, attention, mask.shape[1])
        own, weights = mask & output.get("tool_mask", mask).bool(), output.get("importance_sampling_ratio")
        first = self.accelerator.process_index * len(mask)
        rewards, better = self._task_rewards[first:].tolist(), self._above_the_lowest()[first:].tolist()
        here = []
        for n, advantage in enumerate(output["advantages"].tolist()):
            may_pass = better[n] if imitation.admission else advantage > 0
            real = mask[n] & (imitation.gate == "new" or may_pass)
            ids, is_own, logprobs = (x[n][real].tolist() for x in (output["completion_ids"], own, old))
            ratios = None if weights is None else weights.expand_as(old)[n][real].tolist()
            prompt = output["prompt_ids"][n][output["prompt_mask"][n].bool()].tolist()
            row = Row("", n, 0, prompt, ids, is_own, logprobs, weights=ratios)
            here.append((episode_of(turns_of(row), rewards[n]), advantage, str(inputs[n].get("family", ""))))
        everyone, groups, advantages = gather_object(here), [], []
        for start in range(0, len(everyone), self.num_generations):
            siblings = everyone[start : start + self.num_generations]
            scored = [(t, a) for t, a, _ in siblings if not math.isnan(t.reward)]
            groups.append(Group(str(start), [t for t, _ in scored], info={"family": siblings[0][2]}))
            advantages += [[a] * len(t.turns) for t, a in scored]
        return groups, advantages

    def _above_the_lowest(self) -> Any:
        """[N] whether the task's reward beats the lowest of its group: nothing else can be admitted by that reward."""
        by_group = self._task_rewards.view(-1, self.num_generations)
        lowest = by_group.nan_to_num(math.inf).min(1, keepdim=True).values
        return (by_group > lowest).view(-1)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """TRL's loss plus this micro-batch's part of gamma(t) * J_replay.

        The core's loss needs the whole mini-batch of all ranks: before the first micro-batch every row is scored and
        the loss is differentiated by the log-probabilities. A micro-batch adds a term that is linear in its own
        log-probabilities; gradients add up over micro-batches and are averaged over ranks.
        """
        loss, parts = super()._compute_loss(model, inputs), self.args.gradient_accumulation_steps
        if not (self._replay and self.model.training):
            return loss
        number, part = divmod(self._num_losses % self.args.steps_per_generation, parts)
        self._num_losses += 1
        if (rows := self._replay[number]) is None:
            return loss
        if part == 0:
            self._gradient, self._value = self._differentiated(rows)
        loss = loss + self._value / parts
        if mine := share(len(rows.mask), part, parts, *self._place):
            logprobs = self._logprobs(model, rows.input_ids[mine], rows.attention[mine], rows.mask.shape[1], grad=True)
            linear = (self._gradient[mine] * logprobs).sum() * self.accelerator.num_processes
            loss = loss + linear - linear.detach()  # the gradient only: its value is in self._value
        return loss

    def _differentiated(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """[N + 1, T] derivative of gamma(t) * J_replay by the log-probabilities, row -1 being 0; and its value."""
        imitation = self.spear.imitation
        assert imitation
        (count, width), mine = rows.mask.shape, share(len(rows.mask), 0, 1, *self._place)
        scored = self._logprobs(self.model, rows.input_ids[mine], rows.attention[mine], width)
        by_rank = self.accelerator.gather(scored).view(self.accelerator.num_processes, -1, width)
        logprobs = by_rank.transpose(0, 1).reshape(-1, width)[:count].float().requires_grad_()
        inputs = LossInputs(logprobs, rows.old_logprobs, rows.advantages, rows.mask, generator=imitation.generator)
        out = imitation.loss(inputs)
        weight = self._weight * min(1.0, count / max(self._rows_wanted, 1))
        self._record({f"replay/{name}": float(x) for name, x in {"loss": out.loss.detach(), **out.metrics}.items()})
        gradient = torch.autograd.grad(weight * out.loss, logprobs)[0]
        return torch.cat([gradient, torch.zeros_like(gradient[:1])]), weight * out.loss.detach()

    def _logprobs(self, model: Any, ids: Tensor, attention: Tensor, width: int, *, grad: bool = False) -> Any:
        """[B, T] of the last `width` columns, as TRL scores them."""
        size = None if grad else self.args.per_device_train_batch_size
        with torch.set_grad_enabled(grad):
            return self._get_per_token_logps_and_entropies(model, ids, attention, width, batch_size=size)[0]

    def _record(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name.replace("replay/", "spear/")].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.spear.imitation and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            state_file.save(folder, self.spear, self._rng, key="spear")

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.spear.imitation and checkpoint:
            state_file.restore(Path(checkpoint), self.spear, self._rng, key="spear")
