"""With verl installed: its hooks are there, and its loss under our wrapper is the core's on the same rows."""

from __future__ import annotations

import random
from functools import partial

import pytest

pytest.importorskip("verl.trainer")
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from spear_rl.algorithms import dr_bot, grpo, spear
from spear_rl.algorithms.imitation import Replay
from spear_rl.functional import LossInputs
from spear_rl.integrations.verl import launch, rows, trainer
from spear_rl.integrations.verl.loss import JointLoss
from spear_rl.types import Completion, Stop, Trajectory, Turn

WEIGHT, LENGTH = 0.37, 11


def random_rows(rng: random.Random, count: int, *, positive: bool) -> list[rows.Fields]:
    made: list[rows.Fields] = []
    while len(made) < count:
        sizes = [rng.randint(1, 5) for _ in range(2)]
        first = Turn([1, 2, 3], Completion([4] * sizes[0], [-rng.random() for _ in range(sizes[0])]))
        second = Turn(
            [*first.prompt_ids, *first.completion.token_ids, 5, 6],
            Completion([7] * sizes[1], [-rng.random() for _ in range(sizes[1])]),
        )
        advantages = [abs(rng.gauss(0, 1)) if positive else rng.gauss(0, 1) for _ in sizes]
        dropped = ["" if rng.random() < 0.7 else "void" for _ in sizes]
        made += rows.replay_rows(Replay([Trajectory([first, second], Stop.DONE)], [advantages], [dropped]))
    return made[:count]


def core_loss(loss, fields: list[rows.Fields], logprobs: list[torch.Tensor]) -> float:
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    old, advantages, mask = (pad([row[n] for row in fields]) for n in ("old_log_probs", "advantages", "spear_mask"))
    return float(loss(LossInputs(pad(logprobs), old, advantages, mask.bool())).loss)


def verl_loss(joint: JointLoss, fields: list[rows.Fields], logprobs: list[torch.Tensor], cuts: list[int]) -> float:
    """The sum over micro-batches, as verl's engine adds them up."""
    total = 0.0
    for begin, end in zip([0, *cuts], [*cuts, len(fields)], strict=True):
        part = fields[begin:end]
        whole = [torch.cat([torch.zeros(len(row["prompts"]) - 1), now, torch.zeros(1)]) for row, now in
                 zip(part, logprobs[begin:end], strict=True)]  # fmt: skip
        nested = {
            name: torch.nested.as_nested_tensor([row[name] for row in part], layout=torch.jagged)
            for name in part[0]
            if name != "spear"
        }
        data = TensorDict({**nested, "spear": torch.stack([row["spear"] for row in part])}, batch_size=len(part))
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=10**6, global_batch_size=10**6)
        output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
        total += float(joint(model_output=output, data=data)[0])
    return total


@pytest.mark.parametrize("name", ["grpo", "dr_bot"])
@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 7]])
def test_verls_loss_is_the_cores_on_the_same_rows_however_they_are_cut(name, cuts):
    rng = random.Random(2)
    torch.manual_seed(0)
    base = grpo() if name == "grpo" else dr_bot(grpo(), max_length=LENGTH)
    algorithm = spear(base)
    policy, replay = random_rows(rng, 6, positive=False), [*random_rows(rng, 3, positive=True), rows.padding(0)]
    fields = [*policy, *replay]
    now = [row["old_log_probs"] + 0.3 * torch.randn(len(row["old_log_probs"])) for row in fields]
    rows.take_notes(policy, replay, [list(range(len(fields)))], WEIGHT)
    keywords = base.loss.keywords
    config = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "use_dynamic_bsz": True,
        "clip_ratio_low": keywords["clip_low"],
        "clip_ratio_high": keywords["clip_high"],
        "clip_ratio_c": keywords.get("dual_clip") or 1e9,
        "loss_agg_mode": "token-mean" if name == "grpo" else "seq-mean-token-sum-norm",
        "loss_scale_factor": None if name == "grpo" else LENGTH,
    }
    joint = JointLoss(*(partial(ppo_loss, config=ActorConfig(**config)) for _ in range(2)))
    plain = {key: value for key, value in algorithm.imitation.loss.keywords.items() if key != "keep"}
    replayed = partial(algorithm.imitation.loss.func, **plain)
    expected = core_loss(base.loss, policy, now[:6]) + WEIGHT * core_loss(replayed, replay[:3], now[6:9])
    assert verl_loss(joint, fields, now, cuts) == pytest.approx(expected, abs=1e-6)


def test_the_self_check_finds_every_hook():
    assert launch.checked().startswith("verl 0.9")


def test_a_hook_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(launch._WORDS["hooks"], "verl.workers.utils.losses", ["no_such_loss"])
    with pytest.raises(launch.ConfigError, match=r"verl\.workers\.utils\.losses\.no_such_loss"):
        launch.checked()


def test_a_plug_in_that_was_not_loaded_is_said(monkeypatch):
    monkeypatch.delitem(trainer._base.TRAINER_REGISTRY, "spear")
    with pytest.raises(launch.ConfigError, match="did not load our plug-in"):
        launch.checked()


def test_the_trainer_wraps_and_never_replaces():
    """Every method of verl's that we override calls verl's own."""
    import inspect

    own = [name for name in vars(trainer.SpearTrainer) if hasattr(trainer._sync.PPOTrainerSync, name)]
    methods = [name for name in own if inspect.isfunction(vars(trainer.SpearTrainer)[name])]
    assert {"_compute_advantage", "_update_actor", "_save_checkpoint", "_load_checkpoint"} <= {*methods}
    for name in methods:
        assert f"super().{name}(" in inspect.getsource(vars(trainer.SpearTrainer)[name])
