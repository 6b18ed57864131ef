"""PPO: advantages from a critic, the critic's own learning, and whole runs with it."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import references
from conftest import RecordingCritic, RecordingEngine, logged, random_batch
from references import episode, group, turn
from spear_rl.algorithms import GAE, Algorithm, ClippedSurrogate, Critic, dr_bot, named, ppo, spear
from spear_rl.app.build.training import algorithm_of
from spear_rl.app.config import load
from spear_rl.engines.base import Batch
from spear_rl.errors import ConfigError
from spear_rl.functional import explained_variance, gae, value_loss, whitened
from spear_rl.integrations.verl import launch
from spear_rl.train.step import train_step
from spear_rl.types import Group, Stop

quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)
shares = st.sampled_from([0.0, 0.5, 0.9, 1.0])
SMALL = [
    "run.steps=4",
    "run.checkpoint_every=2",
    "sft.episodes=32",
    "sft.epochs=1",
    "eval.tasks=4",
    "rollout.num_tasks=2",
]


# -- the estimator ------------------------------------------------------------------------------------------------


def gae_by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float, last: float = 0.0
) -> list[float]:
    """The sum over all later errors, each written out: A_t = sum_k (gamma lam)^k (r + gamma V' - V)_{t+k}."""
    following = [*values[1:], last]
    errors = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
        for now in range(len(errors))
    ]


@quick
@given(seeds, shares, shares, st.booleans())
def test_gae_is_the_discounted_sum_of_errors_however_episodes_are_padded(seed, gamma, lam, cut):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(4)]
    width = max(lengths) + rng.randint(0, 3)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    rewards, values = torch.randn(2, 4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    last = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)) if cut else None
    found = gae(rewards, values, mask, gamma=gamma, lam=lam, last_values=last)
    for row, length in enumerate(lengths):
        after = float(last[row]) if last is not None else 0.0
        expected = gae_by_definition(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam, after)
        assert found[row, :length].tolist() == pytest.approx(expected, abs=1e-9)
        assert not found[row, length:].any()


def steps_of(
    trajectory, values: list[list[float]], level: str
) -> tuple[list[float], list[float], list[tuple[int, int]]]:
    """(rewards, values, (turn, token) of each step) of an episode, from the words of the documentation."""
    rewards, known, places = [], [], []
    for number, t in enumerate(trajectory.turns):
        count = len(t.completion.token_ids)
        for token in range(count if level == "token" else 1):
            is_last = token == count - 1 or level == "turn"
            rewards.append(t.reward + t.shaping if is_last else 0.0)
            known.append(values[number][token])
            places.append((number, token))
    rewards[-1] += trajectory.bonus
    return rewards, known, places


lengthy_turns = st.builds(
    turn,
    references.rewards,
    shaping=st.sampled_from([0.0, -0.1]),
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
lengthy = st.builds(
    lambda turns, bonus, stop: episode(*turns, bonus=bonus, stop=stop),
    st.lists(lengthy_turns, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([Stop.DONE, Stop.MAX_TURNS, Stop.OVERLONG]),
)
played_groups = st.lists(
    st.builds(lambda ts: group(*ts), st.lists(lengthy, min_size=1, max_size=3)), min_size=1, max_size=3
)


@quick
@given(played_groups, seeds, shares, shares, st.sampled_from(["token", "turn"]), st.booleans())
def test_an_episodes_turns_are_one_chain_and_pay_at_their_last_token(groups, seed, gamma, lam, level, bootstrap):
    rng = random.Random(seed)
    played = [t for g in groups for t in g.trajectories]
    values = [[[rng.gauss(0, 1) for _ in t.completion.token_ids] for t in e.turns] for e in played]
    flat = torch.tensor([v for e in values for t in e for v in t], dtype=torch.float64)
    found = GAE(gamma=gamma, lam=lam, level=level, bootstrap=bootstrap).estimate(groups, flat)
    advantages, returns, fits = [], [], []
    for trajectory, known in zip(played, values, strict=True):
        rewards, chain, places = steps_of(trajectory, known, level)
        last = chain[-1] if bootstrap and trajectory.stop != Stop.DONE else 0.0
        own = dict(zip(places, gae_by_definition(rewards, chain, gamma, lam, last), strict=True))
        for number, t in enumerate(trajectory.turns):
            for token in range(len(t.completion.token_ids)):
                is_step = (number, token) in own
                advantage = own[number, token if level == "token" else 0]
                advantages.append(advantage)
                fits.append(is_step)
                returns.append(advantage + known[number][token] if is_step else 0.0)
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-9)
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-9)
    assert found.fits.tolist() == fits


@pytest.mark.parametrize("level", ["token", "turn"])
def test_what_a_turn_without_tokens_earned_is_not_lost(level):
    empty = turn(2.0, tokens=())
    for turns in ([turn(1.0), empty], [empty, turn(1.0)], [turn(), empty, turn(1.0)]):
        values = torch.zeros(sum(len(t.completion.token_ids) for t in turns))
        found = GAE(lam=1.0, level=level).estimate([group(episode(*turns))], values)
        assert found.returns[found.fits][0] == 3.0
    assert len(GAE(level=level).estimate([group(episode(empty))], torch.zeros(0)).advantages) == 0


def test_with_lambda_one_and_no_critic_every_token_gets_the_score_and_a_perfect_critic_leaves_nothing():
    groups = [group(episode(turn(), turn(1.0, shaping=-0.1), bonus=0.5), episode(turn(0.0)))]
    found = GAE(lam=1.0).estimate(groups, torch.zeros(9))
    assert found.advantages.tolist() == pytest.approx([1.4] * 6 + [0.0] * 3)
    for lam in (0.0, 0.5, 1.0):
        assert not GAE(lam=lam).estimate(groups, found.returns).advantages.abs().gt(1e-12).any()


# -- the value loss -----------------------------------------------------------------------------------------------


@quick
@given(seeds, st.sampled_from([None, 0.05, 0.5]))
def test_the_value_loss_and_its_gradient_are_those_of_the_formula(seed, clip):
    rng = random.Random(seed)
    rows = [
        [(rng.gauss(0, 1), rng.gauss(0, 1), rng.gauss(0, 2), rng.random() < 0.7) for _ in range(5)] for _ in range(3)
    ]
    values, old, wanted = (torch.tensor([[c[k] for c in r] for r in rows], dtype=torch.float64) for k in range(3))
    mask = torch.tensor([[c[3] for c in r] for r in rows])
    loss, silenced = value_loss(values.requires_grad_(), old, wanted, mask, clip=clip)
    count, total, clipped_away, slopes = max(int(mask.sum()), 1), 0.0, 0, []
    for value, before, goal, counts in (c for r in rows for c in r):
        kept = value if clip is None else min(max(value, before - clip), before + clip)
        error, bounded = (value - goal) ** 2, (kept - goal) ** 2
        total += 0.5 * max(error, bounded) * counts
        clipped_away += counts and bounded > error
        # Where the clipped error is the larger one, the value is outside the clip and its own gradient is 0.
        slopes.append((value - goal) / count if counts and not bounded > error else 0.0)
    assert loss.item() == pytest.approx(total / count)
    assert float(silenced) == pytest.approx(clipped_away / count)
    if mask.any():
        loss.backward()
        assert values.grad.flatten().tolist() == pytest.approx(slopes, abs=1e-12)


def test_explained_variance_is_one_for_a_perfect_critic_and_nothing_for_a_constant():
    returns = torch.tensor([1.0, 0.0, 2.0, 5.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full_like(returns, 3.0), returns) == pytest.approx(0.0)
    assert explained_variance(torch.zeros(4), torch.ones(4)) == 0.0


@quick
@given(seeds)
def test_whitening_looks_at_the_tokens_that_train_alone(seed):
    values = torch.randn(20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 7 + 3
    mask = torch.rand(20, generator=torch.Generator().manual_seed(seed)) < 0.6
    white = whitened(values, mask)
    if mask.sum() > 1:
        assert float(white[mask].mean()) == pytest.approx(0.0, abs=1e-6)
        assert float(white[mask].std()) == pytest.approx(1.0, abs=1e-4)
    elsewhere = torch.where(mask, values, 1e6)
    assert torch.equal(whitened(elsewhere, mask)[mask], white[mask])


# -- through the training step ------------------------------------------------------------------------------------


def one_step(algorithm: Algorithm, groups: list[Group], *, step: int = 0, critic=None, **options):
    engine = RecordingEngine(None, [""])
    engine.critic = critic or RecordingCritic()
    options = {"collect": lambda _: list(groups), "rng": random.Random(0)} | options
    metrics = train_step(step, algorithm=algorithm, engine=engine, **options)
    return engine, metrics


def numbered(rng: random.Random) -> list[Group]:
    """Groups whose tokens are all different, so that each can be found again."""
    names = iter(range(1, 1000))
    return [
        group(
            *(
                episode(*(
                    turn(rng.choice([0.0, 1.0]), invalid=rng.choice(["", "no_action"]),
                         tokens=[next(names) for _ in range(rng.randint(1, 4))])
                    for _ in range(rng.randint(1, 3))
                ))
                for _ in range(3)
            )
        )
        for _ in range(3)
    ]  # fmt: skip


@quick
@given(seeds, st.sampled_from(["token", "turn"]), st.booleans(), st.integers(1, 3))
def test_every_token_trains_with_its_own_advantage_and_every_value_with_its_own_target(seed, level, drops, parts):
    rng = random.Random(seed)
    groups, estimator = numbered(rng), GAE(lam=0.7, gamma=0.9, level=level, divide_by_std=False)
    base = replace(ppo(), advantages=estimator, invalid_penalty=0.25, critic=Critic(value_clip=0.2))
    algorithm = replace(dr_bot(base, keep_groups=1.0), advantages=estimator) if drops else base
    shaped = algorithm.shaped(groups, 0)
    turns = [t for g in shaped for e in g.trajectories for t in e.turns]
    ids = [token for t in turns for token in t.completion.token_ids]
    expected = estimator.estimate(shaped, torch.tensor(ids).double() / 100)
    advantage = dict(zip(ids, expected.advantages.tolist(), strict=True))
    critic = RecordingCritic(lambda tokens: tokens / 100)
    engine, metrics = one_step(algorithm, groups, critic=critic, num_minibatches=parts)

    reasons = [why for turns in algorithm.dropped(shaped) for why in turns]
    training = {i for t, why in zip(turns, reasons, strict=True) if not why for i in t.completion.token_ids}
    trained: dict[int, float] = {}
    for batch in (term.batch for terms in engine.updates for term in terms):
        trained |= dict(zip(batch.input_ids[batch.mask].tolist(), batch.advantages[batch.mask].tolist(), strict=True))
    assert trained == pytest.approx({i: advantage[i] for i in training}, abs=1e-5)

    learned: dict[int, float] = {}
    for batch, old, returns, clip in critic.updates:
        seen = batch.input_ids[batch.mask]
        assert old[batch.mask].tolist() == pytest.approx((seen / 100).tolist())
        assert clip == 0.2
        learned |= dict(zip(seen.tolist(), returns[batch.mask].tolist(), strict=True))
    targets = {i: float(r) for i, r, f in zip(ids, expected.returns, expected.fits, strict=True) if f}
    assert learned == pytest.approx(targets, abs=1e-5), "also turns that a filter drops"
    assert len(critic.updates) == min(parts, len(turns))
    assert metrics["critic/return"] == pytest.approx(references.mean(list(targets.values())), abs=1e-5)


def test_importance_weights_multiply_a_tokens_advantage():
    heavy = turn(1.0)
    heavy = replace(heavy, completion=replace(heavy.completion, weights=[0.5, 1.0, 2.0]))
    engine, _ = one_step(replace(ppo(), advantages=GAE(lam=1.0, divide_by_std=False)), [group(episode(heavy))])
    batch = engine.updates[0][0].batch
    assert batch.advantages[batch.mask].tolist() == [0.5, 1.0, 2.0]


def test_the_log_of_a_turn_shows_the_mean_of_its_tokens():
    shown = []
    estimator = GAE(lam=0.5, divide_by_std=False)
    one_step(
        replace(ppo(), advantages=estimator), [group(episode(turn(), turn(1.0)), episode(turn()))],
        on_played=lambda groups, advantages, dropped: shown.extend(advantages),
    )  # fmt: skip
    tokens = gae_by_definition([0.0] * 5 + [1.0], [0.0] * 6, 1.0, 0.5)
    assert [a for turns in shown for a in turns] == pytest.approx([sum(tokens[:3]) / 3, sum(tokens[3:]) / 3, 0.0])


def test_in_its_warm_up_only_the_critic_learns():
    algorithm = replace(ppo(), critic=Critic(warmup_steps=2))
    for step, updates in ((0, 0), (1, 0), (2, 1)):
        engine, metrics = one_step(algorithm, [group(1.0, 0.0)], step=step)
        assert len(engine.updates) == updates
        assert len(engine.critic.updates) == 1
        assert "critic/explained_variance" in metrics


def test_replay_admits_by_the_siblings_rewards_and_does_not_train_the_critic():
    algorithm = spear(ppo(), bonus=1.0, imitation=1.0, fraction=100.0)
    groups = [group(episode(turn(1.0, tokens=[7])), episode(turn(0.0, tool=True, tokens=[8])))]
    one_step(algorithm, groups)
    assert [stored.reward for stored in algorithm.imitation.buffer.items] == [1.0]
    engine, metrics = one_step(
        algorithm, [group(episode(turn(0.0, tokens=[9])), episode(turn(0.0, tokens=[9])))], step=1
    )
    assert metrics["replay/fired"] == 1
    [replayed] = [term.batch for terms in engine.updates for term in terms if term.name == "replay"]
    assert replayed.input_ids[replayed.mask].tolist() == [7]
    assert {int(i) for batch, *_ in engine.critic.updates for i in batch.input_ids[batch.mask]} == {9}


def test_an_episode_without_a_token_stops_no_run():
    engine, metrics = one_step(ppo(), [group(episode(turn(tokens=())), episode(turn(tokens=())))])
    assert engine.updates == engine.critic.updates == []
    assert metrics["rollout/episodes"] == 2


# -- the critic of the transformers engine ------------------------------------------------------------------------


def targets_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(batch.mask.shape), torch.where(batch.mask, batch.advantages, 0.0)


def holding(engine, learning_rate: float = 1e-3):
    engine.hold_critic(learning_rate)
    return engine


def test_a_new_critic_says_zero_and_learning_changes_it_and_not_the_policy(make_engine):
    engine, batch = holding(make_engine(max_grad_norm=1e9)), random_batch(random.Random(1), rows=6, vocabulary=250)
    before = copy.deepcopy(engine.model.state_dict())
    assert not engine.critic.values(batch).any()
    old, returns = targets_of(batch)
    losses = [engine.critic.update(batch, old, returns, clip=None)["critic/value_loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(0.5 * float((returns[batch.mask] ** 2).mean()), rel=1e-5)
    assert losses[-1] < 0.2 * losses[0]
    assert not engine.critic.values(batch)[~batch.mask].any()
    assert all(torch.equal(x, before[name]) for name, x in engine.model.state_dict().items())


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_values_and_what_a_critic_learns_do_not_depend_on_how_a_batch_is_cut(tokenizer, seed):
    from spear_rl.engines.hf import HFEngine
    from spear_rl.engines.models.tiny import tiny_model

    batch = random_batch(random.Random(seed), rows=5, vocabulary=250)
    found = []
    for tokens, extra in ((10**9, 0), (1, 0), (50, 7)):
        given_batch = Batch(*(torch.nn.functional.pad(getattr(batch, n), (0, extra)) for n in Batch.__slots__))
        engine = HFEngine(
            tiny_model("tiny-xs", tokenizer, seed=0), tokenizer, micro_batch_tokens=tokens, max_grad_norm=1e9
        )
        holding(engine)
        metrics = [engine.critic.update(given_batch, *targets_of(given_batch), clip=0.1) for _ in range(2)]
        found.append((metrics, engine.critic.values(given_batch)[given_batch.mask]))
    for metrics, values in found[1:]:
        for mine, first in zip(metrics, found[0][0], strict=True):
            assert mine == pytest.approx(first, rel=1e-3, abs=1e-6)
        torch.testing.assert_close(values, found[0][1], rtol=1e-3, atol=1e-4)


def test_the_value_of_a_token_sees_what_came_before_it_and_nothing_else(make_engine):
    engine, batch = holding(make_engine(), 1e-2), random_batch(random.Random(2), rows=4, vocabulary=250)
    for _ in range(5):
        engine.critic.update(batch, *targets_of(batch), clip=None)
    values, changed = engine.critic.values(batch), batch.input_ids.clone()
    column = 6
    changed[:, column] = (changed[:, column] + 1) % 250
    after = engine.critic.values(replace(batch, input_ids=changed))
    torch.testing.assert_close(after[:, : column + 1], values[:, : column + 1])
    assert not torch.allclose(after[:, column + 1 :], values[:, column + 1 :])


def test_packed_rows_have_the_values_of_padded_ones(make_engine):
    batch, found = random_batch(random.Random(3), rows=5, vocabulary=250), []
    for packed in (False, True):
        engine = holding(make_engine(packed=packed, compiled=False))
        for _ in range(3):
            engine.critic.update(batch, *targets_of(batch), clip=0.5)
        found.append(engine.critic.values(batch))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_critic_goes_on_bit_for_bit(make_engine, dtype):
    batch, engine = random_batch(random.Random(4), rows=5, vocabulary=250), holding(make_engine(dtype=dtype))
    learn = lambda e: e.critic.update(batch, *targets_of(batch), clip=None)  # noqa: E731
    for _ in range(3):
        learn(engine)
    other = holding(make_engine(dtype=dtype))
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    assert torch.equal(other.critic.values(batch), engine.critic.values(batch))
    assert learn(other) == learn(engine)
    assert torch.equal(other.critic.values(batch), engine.critic.values(batch))


def test_without_a_critic_the_state_of_an_engine_is_what_it_was(make_engine):
    assert set(make_engine().state_dict()) == {"optimizer", "generator", "num_streams"}


def test_under_an_adapter_the_critics_trunk_trains_its_adapter_alone(tokenizer):
    pytest.importorskip("peft")
    from test_lora import adapted

    engine = holding(adapted("Llama", tokenizer), 1e-2)
    batch = random_batch(random.Random(5), rows=4, vocabulary=250)
    before = {name: p.detach().clone() for name, p in engine.critic._trunk.named_parameters()}
    for _ in range(3):
        engine.critic.update(batch, *targets_of(batch), clip=None)
    for name, parameter in engine.critic._trunk.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


# -- settings, names and refusals ---------------------------------------------------------------------------------


def test_every_setting_reaches_its_record():
    changes = {"level": "turn", "gamma": 0.9, "lam": 0.5, "bootstrap": True}
    own = {"learning_rate": 0.01, "value_clip": 0.5, "warmup_steps": 3}
    overrides = [f"algorithm.ppo.{name}={str(x).lower()}" for name, x in (changes | own).items()]
    made = algorithm_of(load(None, ["algorithm.name=spear-dr-bot-ppo", *overrides]))
    assert made.advantages == GAE(divide_by_std=False, **changes)
    assert made.critic == Critic(**own)


@pytest.mark.parametrize("setting", ["gamma=0.9", "level=turn", "value_clip=0.1", "warmup_steps=2"])
def test_an_algorithm_without_a_critic_refuses_its_settings(setting):
    with pytest.raises(ConfigError, match=rf"algorithm\.ppo\.{setting}: .*with algorithm.name=grpo leave it out"):
        algorithm_of(load(None, ["algorithm.name=grpo", f"algorithm.ppo.{setting}"]))


def test_an_engine_without_a_critic_refuses_ppo_before_it_learns_anything(spear, tmp_path, monkeypatch):
    from spear_rl.engines.hf import HFEngine

    monkeypatch.delattr(HFEngine, "hold_critic")
    code, text = spear("train", "lookup", f"run.dir={tmp_path / 'run'}", *SMALL, "algorithm.name=ppo")
    assert code == 2, text
    assert "the engine HFEngine cannot hold a critic" in text
    assert "Traceback" not in text
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("name", ["ppo", "spear-dr-bot-ppo"])
def test_verl_refuses_a_critic_in_one_sentence(name):
    with pytest.raises(ConfigError, match="not inside verl"):
        launch.config_of({"algorithm": {"name": name}})


def test_its_advantages_without_values_are_those_of_a_critic_that_says_zero():
    groups = [group(episode(turn(), turn(1.0)), episode(turn(0.5), turn(tokens=())))]
    assert GAE(divide_by_std=False)(groups) == [[1.0, 1.0], [0.5, 0.0]]
    shown = []
    one_step(ppo(), groups, on_played=lambda _, advantages, dropped: shown.extend(advantages))
    assert ppo().advantages(groups) == shown


def no_estimate() -> Algorithm:
    return Algorithm(advantages=lambda groups: [], loss=ClippedSurrogate(), critic=Critic())


def test_an_algorithm_of_ones_own_with_a_critic_needs_an_estimator():
    with pytest.raises(ConfigError, match="without a method estimate"):
        named("test_ppo:no_estimate")


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["spear-ppo", "dr-bot-ppo", "spear-dr-bot-ppo"])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_ppo_runs_under_every_wrapper_on_both_levels(spear, tmp_path, name, level):
    settings = [*SMALL, f"algorithm.name={name}", f"algorithm.ppo.level={level}", "optim.num_minibatches=2"]
    code, text = spear("train", "lookup", f"run.dir={tmp_path}", *settings)
    assert code == 0, text
    assert all("critic/value_loss" in row for row in logged(tmp_path))


def test_a_resume_takes_up_critic_and_optimizer_where_they_were(spear, tmp_path):
    settings = [*SMALL, "algorithm.name=ppo", "optim.num_minibatches=2", "algorithm.ppo.learning_rate=0.003"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert spear("train", "lookup", f"run.dir={whole}", *settings)[0] == 0
    assert spear("train", "lookup", f"run.dir={cut}", *settings, "run.steps=2", "algorithm.bonus.steps=4")[0] == 0
    code, text = spear("train", f"run.dir={cut}", "run.resume=true", "run.steps=4")
    assert code == 0, text
    assert logged(cut) == logged(whole)
    ends = [
        torch.load(run / "checkpoints" / "step_000004" / "trainer_state.pt", weights_only=True) for run in (cut, whole)
    ]
    mine, theirs = (end["engine"]["critic"] for end in ends)
    assert all(torch.equal(a, b) for a, b in zip(mine["weights"], theirs["weights"], strict=True))
    assert mine["optimizer"]["param_groups"][0]["lr"] == 0.003
    code, text = spear("train", f"run.dir={cut}", "run.resume=true", "run.steps=5", "algorithm.ppo.learning_rate=0.001")
    assert code == 0, text
    last = torch.load(cut / "checkpoints" / "step_000005" / "trainer_state.pt", weights_only=True)
    assert last["engine"]["critic"]["optimizer"]["param_groups"][0]["lr"] == 0.001


def test_an_adapter_and_ppo_resume_bit_for_bit(spear, tmp_path):
    pytest.importorskip("peft")
    settings = [*SMALL, "algorithm.name=spear-ppo", "engine.lora_rank=2", "algorithm.imitation.warm_steps=2"]
    settings += ["algorithm.bonus.steps=4"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert spear("train", "lookup", f"run.dir={whole}", *settings)[0] == 0
    assert spear("train", "lookup", f"run.dir={cut}", *settings, "run.steps=2")[0] == 0
    code, text = spear("train", f"run.dir={cut}", "run.resume=true", "run.steps=4")
    assert code == 0, text
    assert logged(cut) == logged(whole)


def test_the_doctor_counts_the_critic():
    from spear_rl.app.doctor import estimate

    shared = ["engine.model=smollm2", "engine.device=cpu", "engine.micro_batch_tokens=1024"]
    without, with_critic = (
        estimate(load(None, [*shared, f"algorithm.name={n}"]), free=1 << 40)[0] for n in ("grpo", "ppo")
    )
    assert with_critic.weights == 2 * without.weights
    assert with_critic.optimizer == 2 * without.optimizer
