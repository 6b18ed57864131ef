"""With verl installed: its hooks are there, and through our wrapper it trains on what the core's step trains on."""

from __future__ import annotations

import inspect
import random
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("verl.trainer")
import torch
from omegaconf import OmegaConf
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss

from spear_rl.algorithms import CovarianceClip, TokenMean, dr_bot, gigpo, grpo, spear
from spear_rl.app.config import Optim
from spear_rl.engines.base import Term
from spear_rl.functional import LossInputs
from spear_rl.integrations.shared.episodes import Row, from_json, groups_of
from spear_rl.integrations.verl import launch, loop, rows, trainer
from spear_rl.integrations.verl.rows import covariance_clipped
from spear_rl.rollout import Task
from spear_rl.train.step import collate, train_step
from spear_rl.types import Completion, Stop, Trajectory, Turn

WEIGHT, LENGTH = 0.37, 11


def trajectory(rng: random.Random, *, chat: bool = True, turns: int = 2) -> Trajectory:
    played: list[Turn] = []
    for _ in range(turns):
        prompt = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
        if chat and played:
            prompt = [*played[-1].prompt_ids, *played[-1].completion.token_ids, *prompt]
        size = rng.randint(1, 5)
        said = Completion([rng.randint(1, 9) for _ in range(size)], [-rng.random() for _ in range(size)])
        played.append(
            Turn(prompt, said, reward=rng.choice([0.0, 1.0, 3.0]), state_key=str(rng.randrange(3)), used_tool=True)
        )
    return Trajectory(played, Stop.DONE, success=True)


def term(rng: random.Random, name: str, count: int, loss, weight: float = 1.0) -> Term:
    episodes = [trajectory(rng) for _ in range(count)]
    sign = abs if name == "replay" else float
    advantages = [[sign(rng.gauss(0, 1)) for _ in t.turns] for t in episodes]
    return Term(name, collate(episodes, advantages, pad_id=0), loss, weight)


def micro_batch(part: list[dict], now: list[torch.Tensor]) -> tuple[dict, TensorDict]:
    """What verl's workers give a loss: nested rows, and log-probabilities of whole rows, one column early."""
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    fields = {name: nested([row[name] for row in part]) for name in part[0] if name != "spear"}
    data = TensorDict({**fields, "spear": torch.stack([row["spear"] for row in part])}, batch_size=len(part))
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=10**6, global_batch_size=10**6)
    whole = [
        torch.cat([torch.zeros(len(row["prompts"]) - 1), x, torch.zeros(1)]) for row, x in zip(part, now, strict=True)
    ]
    return {"log_probs": nested(whole)}, data


@pytest.mark.parametrize("name", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 7]])
def test_verls_loss_is_the_cores_on_the_same_rows_however_they_are_cut(name, cuts):
    rng = random.Random(2)
    torch.manual_seed(0)
    bases = {"seq-mean-token-mean": grpo(), "token-mean": grpo(reduction=TokenMean())}
    base = bases.get(name) or dr_bot(grpo(), max_length=LENGTH)
    policy, replay = term(rng, "policy", 6, base.loss), term(rng, "replay", 3, base.loss, WEIGHT)
    laid = rows.rows_of([policy, replay], size=10)
    now = [row["old_log_probs"] + 0.3 * torch.randn(len(row["old_log_probs"])) for row in laid]
    config = {
        "strategy": "fsdp",
        "rollout_n": 1,
        "use_dynamic_bsz": True,
        "clip_ratio_low": base.loss.clip_low,
        "clip_ratio_high": base.loss.clip_high,
        "clip_ratio_c": base.loss.dual_clip or 1e9,
        "loss_agg_mode": name,
        "loss_scale_factor": LENGTH if name == "seq-mean-token-sum-norm" else None,
    }
    losses = [partial(ppo_loss, config=ActorConfig(**config)) for _ in range(2)]
    total = 0.0
    for begin, end in zip([0, *cuts], [*cuts, len(laid)], strict=True):
        output, data = micro_batch(laid[begin:end], now[begin:end])
        total += float(rows.joint_loss(output, data, losses=losses)[0])
    expected, start = 0.0, 0
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    for entry in (policy, replay):
        own = slice(start, start + len(entry.batch))
        fields = ([row[n] for row in laid[own]] for n in ("old_log_probs", "advantages", "response_mask"))
        old, advantages, mask = map(pad, fields)
        expected += entry.weight * float(base.loss(LossInputs(pad(now[own]), old, advantages, mask.bool())).loss)
        start += len(entry.batch)
    assert total == pytest.approx(expected, abs=1e-6)


class Queue:
    """TransferQueue in a dictionary."""

    KVBatchMeta = KVBatchMeta

    def __init__(self) -> None:
        self.rows: dict[str, dict] = {}

    def kv_batch_put(self, keys, partition_id, fields, tags):
        for number, key in enumerate(keys):
            self.rows[key] = {name: value[number] for name, value in fields.items()}

    def kv_batch_get(self, keys, partition_id, select_fields):
        own = [{name: self.rows[key][name] for name in select_fields} for key in keys]
        return tu.list_of_dict_to_tensordict(own)

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.rows[key]


def played_by_verl(queue: Queue, groups: dict[str, list[Trajectory]], rng: random.Random):
    """The rows of our agent loop as verl's trainer has them when it updates its actor, in some order, with padding."""
    keys, stored = [], []
    for uid, episodes in groups.items():
        for session, played in enumerate(episodes):
            task = Task(id=f"task {uid}", make_env=lambda: None, family="kind")
            for number, output in enumerate(loop.outputs_of(played, task, {})):
                field = output.as_dict()
                field |= {"loss_mask": field["response_mask"], "extra_fields": NonTensorData(field["extra_fields"])}
                field["old_log_probs"] = field["rollout_log_probs"] - 0.125
                keys.append(f"{uid}_{session}_{number}")
                names = ("prompts", "responses", "loss_mask", "old_log_probs", "rm_scores", "extra_fields")
                stored.append({name: field[name] for name in names})
    order = rng.sample(range(len(keys)), len(keys))
    tags = [{"is_padding": False} for _ in keys]
    fields = tu.list_of_dict_to_tensordict([stored[n] for n in order])
    keys = [keys[n] for n in order]
    queue.kv_batch_put(keys, "train", fields, tags)
    return KVBatchMeta(keys, tags, "train", [*stored[0]])


def scores(size: int) -> torch.Tensor:
    """Log-probabilities of a row by the policy of today, token 1 first."""
    return torch.linspace(-0.7, -0.4, size)


class Workers:
    """Two ranks that score rows."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._dispatch_info = queue, {"actor": [0, 1]}
        self.num_calls = 0

    def compute_log_prob(self, batch) -> None:
        assert len(batch.keys) % 2 == 0
        self.num_calls += 1
        for key in batch.keys:
            self._queue.rows[key]["log_probs"] = scores(len(self._queue.rows[key]["input_ids"]))


class Recorder:
    """The core's engine: what it was told to train on, covariance clipping done beforehand."""

    pad_id = 0

    def __init__(self) -> None:
        self.updates: list[list[Term]] = []

    def update(self, terms):
        self.updates.append([self._clipped(term) for term in terms])
        return {}

    def _clipped(self, term: Term) -> Term:
        if term.name == "policy":
            return term
        now = torch.zeros_like(term.batch.advantages)
        for row, seen in zip(now, term.batch.attention, strict=True):
            row[1 : int(seen.sum())] = scores(int(seen.sum()))[:-1]
        return covariance_clipped(term, now)[0]

    def sync(self) -> None:
        pass


def a_trainer(algorithm, queue: Queue, *, num_minibatches: int):
    made = object.__new__(trainer.SpearTrainer)
    made._algorithm, made._rng, made._is_plain, made.global_steps = algorithm, random.Random(0), False, 1
    made._optim = Optim()
    made.tokenizer, made.actor_rollout_wg = SimpleNamespace(decode=lambda *_, **__: ""), Workers(queue)
    actor = {"use_dynamic_bsz": True, "ppo_mini_batch_size": 6 // num_minibatches, "ppo_micro_batch_size_per_gpu": None}
    rollout = {"n": 4, "temperature": 1.0, "log_prob_micro_batch_size_per_gpu": None}
    data = {"train_batch_size": 6, "max_response_length": 99}
    made.config = OmegaConf.create({"data": data, "actor_rollout_ref": {"actor": actor, "rollout": rollout}})
    return made


def an_algorithm(name: str):
    base = {"gigpo": lambda: dr_bot(gigpo(), max_length=7), "grpo": grpo}[name]()
    clip = CovarianceClip(fraction=0.2, low=0.0)
    return spear(base, imitation=lambda step: 0.5, fraction=1.0, update="joint", covariance=clip)


def groups_in_core(groups: dict[str, list[Trajectory]], step: int):
    """The same episodes with the log-probabilities that verl's trainer gave them."""
    sent = []
    for uid, episodes in groups.items():
        for session, played in enumerate(episodes):
            logprobs = [x - 0.125 for turn in played.turns for x in turn.completion.logprobs]
            about = (f"task {uid}", "kind", played)
            sent.append(Row(uid, session, 0, [], [], [1] * len(logprobs), logprobs, episode=about))
    return groups_of(sent, step=step, group_size=4, max_length=99, text=str)


def split_by_verl(self, batch, queue: Queue) -> list[list[dict]]:
    """How verl's workers cut a batch: a stretch a rank, in it a share an optimizer step."""
    config = self.config.actor_rollout_ref
    placed, share = [queue.rows[key] for key in batch.keys], config.actor.ppo_mini_batch_size * config.rollout.n // 2
    ranks = placed[: len(placed) // 2], placed[len(placed) // 2 :]
    return [[row for rank in ranks for row in rank[start : start + share]] for start in range(0, len(ranks[0]), share)]


def assert_same(row: dict, term: Term, number: int) -> None:
    batch, start = term.batch, len(row["prompts"])
    own = slice(start, start + len(row["responses"]))
    mask = batch.mask[number, own]
    assert row["input_ids"].tolist() == batch.input_ids[number][batch.attention[number]].tolist()
    assert row["response_mask"].bool().tolist() == mask.tolist()
    assert row["spear"][0] == (term.name == "replay")
    for name, tensor in (("old_log_probs", batch.old_logprobs), ("advantages", batch.advantages)):
        torch.testing.assert_close(row[name][mask], tensor[number, own][mask], atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_minibatches", [1, 3])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", ["gigpo", "grpo"])
def test_verl_trains_on_the_rows_the_cores_step_trains_on(monkeypatch, name, chat, num_minibatches):
    """Advantages, recalibrated advantages, masks, old log-probabilities: the same rows in the same optimizer steps."""
    queue, rng, trained, fractions = Queue(), random.Random(1), [], []
    monkeypatch.setattr(trainer, "tq", queue)
    upstream = lambda self, batch, metrics: trained.extend(split_by_verl(self, batch, queue))  # noqa: E731
    monkeypatch.setattr(trainer.PPOTrainerSync, "_update_actor", upstream)
    core, core_rng = an_algorithm(name), random.Random(0)
    verl = a_trainer(an_algorithm(name), queue, num_minibatches=num_minibatches)
    for step in range(3):
        groups = {f"u{n}": [trajectory(rng, chat=chat) for _ in range(4)] for n in range(6)}
        metrics, engine, verl.global_steps = {}, Recorder(), step + 1
        trained.clear()
        verl._update_actor(played_by_verl(queue, groups, rng), metrics)
        collect = partial(groups_in_core, groups)
        found = train_step(
            step, collect=collect, algorithm=core, engine=engine, rng=core_rng, num_minibatches=num_minibatches
        )
        assert len(trained) == len(engine.updates) == num_minibatches
        for laid, terms in zip(trained, engine.updates, strict=True):
            training = [row for row in laid if row["response_mask"].any()]
            expected = [(term, number) for term in terms for number in range(len(term.batch))]
            for row, (term, number) in zip(training, expected, strict=True):
                assert_same(row, term, number)
        told = {key: value for key, value in found.items() if not key.startswith("time/")}
        assert {key: metrics[f"spear/{key}"] for key in told} == pytest.approx(told, abs=1e-6)
        assert metrics["spear/replay/fired"] == (step > 0)
        assert verl.actor_rollout_wg.num_calls == step, "replay is scored once a step, whatever the mini-batches"
        fractions.append(metrics.get("spear/replay/covariance_clip_fraction", 0.0))
    assert any(fractions)
    assert not [key for key in queue.rows if key.startswith("spear")]


def test_the_self_check_finds_every_hook():
    assert launch.checked().startswith("verl 0.9")


def test_a_hook_that_is_gone_is_named(monkeypatch):
    monkeypatch.setitem(launch._TABLES, "hooks", ["verl.workers.utils.losses.no_such_loss"])
    with pytest.raises(launch.ConfigError, match=r"verl 0\.9\.\d+ has no verl\.workers\.utils\.losses\.no_such_loss"):
        launch.checked()


def test_a_plug_in_that_was_not_loaded_is_said(monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.delitem(trainer_base.TRAINER_REGISTRY, "spear")
    with pytest.raises(launch.ConfigError, match="did not load our plug-in"):
        launch.checked()


def test_the_trainer_wraps_and_never_replaces():
    """Every method of verl's that we override calls verl's own."""
    own = [name for name in vars(trainer.SpearTrainer) if hasattr(trainer.PPOTrainerSync, name)]
    methods = [name for name in own if inspect.isfunction(vars(trainer.SpearTrainer)[name])]
    assert {"_update_actor", "_save_checkpoint", "_load_checkpoint"} <= {*methods}
    for name in methods:
        assert f"super().{name}" in inspect.getsource(vars(trainer.SpearTrainer)[name])


def test_an_episode_travels_with_the_first_of_its_rows():
    played = trajectory(random.Random(0), chat=False, turns=3)
    outputs = loop.outputs_of(played, Task(id="t", make_env=lambda: None, family="f"), {"global_steps": 2})
    assert len(outputs) == 3
    assert from_json(outputs[0].extra_fields["spear"]) == ("t", "f", played)
    assert [output.extra_fields["spear"] for output in outputs[1:]] == [b"", b""]
    assert {output.extra_fields["global_steps"] for output in outputs} == {2}
