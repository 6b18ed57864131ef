"""A stored win joins a group that lost: what it trains, and where it must not be seen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from conftest import RecordingEngine, logged
from spear_rl.algorithms import dr_bot, dr_grpo, gigpo, graphgpo, grpo, ppo, rloo, spear
from spear_rl.algorithms.wrapping import SettingError
from spear_rl.app.build.cautions import cautions
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load
from spear_rl.app.train import train_from
from spear_rl.errors import ConfigError
from spear_rl.integrations.verl import launch
from spear_rl.train.step import train_step
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

BASES = [grpo, dr_grpo, rloo, gigpo, graphgpo, lambda: dr_bot(gigpo()), lambda: dr_bot(grpo(), keep_groups=0.25)]


def episode(rng: random.Random, *, won: bool, tag: int, faults: bool = True) -> Trajectory:
    turns = []
    for n in range(rng.randint(1, 4)):
        ids = [rng.randrange(10, 90) for _ in range(rng.randint(1, 3))]
        completion = Completion(ids, [-tag - n - 0.25] * len(ids), truncated=faults and rng.random() < 0.2)
        invalid = "inadmissible" if faults and rng.random() < 0.2 else ""
        turns.append(Turn([tag], completion, state_key=f"s{n}", observation=f"o{n}", text="look", invalid=invalid))
    good = Completion([5], [-tag - 0.75])
    turns.append(Turn([tag, 7], good, reward=float(won), state_key="last", observation="last", text="take"))
    return Trajectory(turns, Stop.DONE, success=won)


def group(rng: random.Random, task: str, wins: list[bool], *, step: int, tag: int) -> Group:
    played = [episode(rng, won=won, tag=tag + n) for n, won in enumerate(wins)]
    return Group(task, played, step, {"family": "f"})


class Steps:
    """Steps of `train_step` on given groups; keeps what the dump and the engine got."""

    def __init__(self, algorithm, tokenizer) -> None:
        self.algorithm, self.engine, self.rng = algorithm, RecordingEngine(tokenizer, []), random.Random(0)
        self.dumped: list = []

    def take(self, step: int, groups: list[Group]):
        return train_step(
            step,
            collect=lambda _: groups,
            algorithm=self.algorithm,
            engine=self.engine,
            rng=self.rng,
            on_played=lambda *played: self.dumped.append(played),
        )

    def trained(self) -> dict[float, float]:
        """Old log-probability, which names a turn here, -> advantage, of the last step's on-policy rows."""
        [batch] = [term.batch for term in self.engine.updates[-1] if term.name == "policy"]
        own = zip(batch.old_logprobs[batch.mask].tolist(), batch.advantages[batch.mask].tolist(), strict=True)
        return dict(own)


def joining(make, *, join_lost: bool = True, **options):
    return spear(make(), bonus=None, imitation=1.0, join_lost=join_lost, **options)


@pytest.mark.parametrize("make", BASES)
@pytest.mark.parametrize("seed", range(4))
def test_the_win_trains_with_its_own_logprobs_and_a_positive_advantage_and_the_losses_with_negative_ones(
    make, seed, tokenizer
):
    rng = random.Random(seed)
    steps = Steps(joining(make), tokenizer)
    first = [group(rng, "t", [True, False, False], step=0, tag=100)]
    lost = [group(rng, "t", [False] * 3, step=3, tag=200), group(rng, "u", [False] * 3, step=3, tag=300)]
    assert steps.take(0, first)["replay/joined_groups"] == 0
    assert steps.take(3, lost)["replay/joined_groups"] == 1
    advantages = steps.trained()
    win = first[0].trajectories[0]
    stored = [turn.completion.logprobs[0] for turn in win.turns if not turn.invalid and not turn.completion.truncated]
    of_the_win = {logprob: a for logprob, a in advantages.items() if -150 < logprob < -100}
    assert set(of_the_win) == set(stored)
    assert all(a > 0 for a in of_the_win.values())
    losses = [a for logprob, a in advantages.items() if -300 < logprob < -200]
    assert losses
    assert sum(losses) < 0
    if make in (grpo, dr_grpo, rloo):
        assert all(a < 0 for a in losses)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_but_training_sees_the_win(seed, tokenizer):
    rng = random.Random(seed)
    first = [group(rng, f"t{n}", [True, False, False], step=0, tag=1000 + 10 * n) for n in range(4)]
    then = [
        group(rng, f"t{n}", [n == 3 and rng.random() < 0.5, False, False], step=2, tag=2000 + 10 * n) for n in range(4)
    ]
    runs = [Steps(joining(grpo, join_lost=on), tokenizer) for on in (True, False)]
    metrics = [(each.take(0, first), each.take(2, then))[1] for each in runs]
    assert metrics[0].pop("replay/joined_groups") >= 3
    same = [{k: v for k, v in m.items() if not k.startswith("time/")} for m in metrics]
    # Flat groups train on neither side of these counts: only losses and the engine's figures may differ, and how large
    # the advantages are.
    assert [m.pop("policy/advantage") > 0 for m in same] == [True, True]
    assert same[0] == same[1]
    dumps = [each.dumped[-1] for each in runs]
    assert dumps[0][0] == dumps[1][0]
    assert [len(a) for a in dumps[0][1]] == [len(a) for a in dumps[1][1]]
    assert dumps[0][2] == dumps[1][2]
    memories = [each.algorithm.imitation for each in runs]
    assert memories[0].state_dict()["buffer"] == memories[1].state_dict()["buffer"]
    assert memories[0].history.means == memories[1].history.means


@pytest.mark.parametrize(
    ("change", "joins"),
    [
        ({}, True),
        ({"step": 6}, False),  # older than max_age
        ({"step": 5}, True),
        ({"task": "other"}, False),
        ({"wins": [False, True]}, False),
    ],
)
def test_only_a_fresh_win_of_the_same_task_joins_and_only_a_group_without_one(change, joins, tokenizer):
    rng = random.Random(1)
    steps = Steps(joining(dr_grpo, max_age=5), tokenizer)
    steps.take(0, [group(rng, "t", [True, False], step=0, tag=100)])
    wanted = {"task": "t", "step": 2, "wins": [False, False]} | change
    then = group(rng, wanted["task"], wanted["wins"], step=wanted["step"], tag=200)
    assert steps.take(wanted["step"], [then])["replay/joined_groups"] == float(joins)


def test_the_newest_win_joins(tokenizer):
    rng = random.Random(2)
    steps = Steps(joining(dr_grpo), tokenizer)
    for step in range(3):
        steps.take(step, [group(rng, "t", [True, False], step=step, tag=100 * (step + 1))])
    steps.take(3, [group(rng, "t", [False, False], step=3, tag=900)])
    assert any(-350 < logprob < -300 for logprob in steps.trained())
    assert not any(-300 < logprob < -100 for logprob in steps.trained())


def test_the_flat_group_filter_sees_the_joined_group(tokenizer):
    rng = random.Random(3)
    for on in (True, False):
        steps = Steps(joining(lambda: dr_bot(grpo(), keep_groups=1.0), join_lost=on), tokenizer)
        steps.take(0, [group(rng, "t", [True, False], step=0, tag=100)])
        flat = replace(
            group(rng, "t", [False], step=1, tag=200), trajectories=[episode(rng, won=False, tag=200, faults=False)] * 2
        )
        metrics = steps.take(1, [flat])
        assert metrics.get("policy/dropped_flat_group", 0) == (0 if on else metrics["policy/turns"])
        assert (metrics["policy/turns_trained"] > 0) == on


def test_off_is_the_step_of_before(tokenizer):
    rng = random.Random(4)
    played = [[group(rng, "t", [step == 0, False], step=step, tag=100 * (step + 1))] for step in range(3)]
    ends = []
    for options in ({}, {"join_lost": False}):
        steps = Steps(spear(grpo(), imitation=1.0, **options), tokenizer)
        metrics = [steps.take(n, groups) for n, groups in enumerate(played)]
        assert all("replay/joined_groups" not in m for m in metrics)
        ends.append([term.batch.advantages for update in steps.engine.updates for term in update])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_what_cannot_have_it_says_so_in_one_sentence():
    with pytest.raises(SettingError, match="critic"):
        spear(ppo(), join_lost=True)
    with pytest.raises(ConfigError, match=r"^algorithm\.imitation\.join_lost=true: a critic"):
        algorithm_of(load("lookup", ["algorithm.name=spear-ppo", "algorithm.imitation.join_lost=true"]))
    for setting in ("algorithm.imitation.join_lost=true", "rollout.return_share=0.5"):
        config = load(None, ["engine.model=a/b", setting])
        with pytest.raises(ConfigError, match=f"^{setting.replace('.', '[.]')}: verl"):
            launch.verl_settings(config, None, {})  # type: ignore[arg-type]


def test_a_run_whose_tasks_do_not_return_is_told():
    on = "algorithm.imitation.join_lost=true"
    assert any("rollout.return_share" in text for text in cautions(load("lookup", [on])))
    assert not any("return_share" in text for text in cautions(load("lookup", [on, "rollout.return_share=0.1"])))
    assert not any("return_share" in text for text in cautions(load("lookup")))


def test_wins_join_in_a_real_run_and_a_resume_is_exact(tmp_path):
    settings = [
        "run.steps=8", "run.checkpoint_every=4", "sft.episodes=160", "sft.epochs=1", "eval.tasks=0", "run.threads=1",
        "rollout.num_tasks=6", "rollout.group_size=3", "rollout.return_share=0.5", "rollout.return_when=mixed",
        "algorithm.imitation.join_lost=true", "algorithm.imitation.warm_steps=1", "algorithm.bonus.steps=8",
    ]  # fmt: skip
    train_from(load("lookup", [f"run.dir={tmp_path / 'whole'}", *settings]))
    rows = logged(tmp_path / "whole")
    assert sum(row["replay/joined_groups"] for row in rows) > 0
    assert {row["rollout/episodes"] for row in rows} == {18}
    train_from(load("lookup", [f"run.dir={tmp_path / 'run'}", *settings, "run.steps=4"]))
    train_from(load("lookup", [f"run.dir={tmp_path / 'run'}", *settings, "run.resume=true"]))
    assert logged(tmp_path / "run") == rows
    ends = [tmp_path / name / "checkpoints" / "step_000008" / "model.safetensors" for name in ("run", "whole")]
    assert ends[0].read_bytes() == ends[1].read_bytes()
