"""The verl adapter's pure parts, which need no verl: rows, padding, layout, notes, and the translation of settings."""

from __future__ import annotations

import random
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_rl.algorithms import dr_bot, gigpo, grpo, spear
from spear_rl.algorithms.imitation import Replay
from spear_rl.config import load
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.functional import LossInputs
from spear_rl.integrations.verl import launch, rows
from spear_rl.train.collate import collate
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn


def trajectory(rng: random.Random, *, chat: bool, turns: int = 3) -> Trajectory:
    played: list[Turn] = []
    for _ in range(turns):
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
        if chat and played:
            prompt = [*played[-1].prompt_ids, *played[-1].completion.token_ids, *prompt]
        size = rng.randint(1, 4)
        said = Completion([rng.randrange(9) for _ in range(size)], [-rng.random() for _ in range(size)])
        key = f"s{rng.randrange(3)}"
        played.append(Turn(prompt, said, reward=rng.choice([0.0, 1.0]), state_key=key, used_tool=rng.random() < 0.5))
    return Trajectory(played, Stop.DONE)


def padded(fields: list[rows.Fields], name: str, width: int) -> torch.Tensor:
    """[B, T] a response field in the columns of its whole row."""
    out = torch.zeros(len(fields), width)
    for line, row in zip(out, fields, strict=True):
        start = len(row["prompts"])
        line[start : start + len(row[name])] = row[name]
    return out


@pytest.mark.parametrize("chat", [True, False])
def test_replay_rows_are_the_rows_the_trainer_of_this_library_would_train(chat):
    rng = random.Random(7)
    drawn = [trajectory(rng, chat=chat) for _ in range(6)]
    advantages = [[rng.random() for _ in t.turns] for t in drawn]
    dropped = [["" if rng.random() < 0.6 else "void" for _ in t.turns] for t in drawn]
    batch = collate(drawn, advantages, pad_id=0, dropped=dropped)
    fields = list(rows.replay_rows(Replay(drawn, advantages, dropped)))
    width = batch.input_ids.shape[1]
    assert [row["input_ids"].tolist() for row in fields] == [
        ids[seen].tolist() for ids, seen in zip(batch.input_ids, batch.attention, strict=True)
    ]
    mask = padded(fields, "spear_mask", width)
    torch.testing.assert_close(mask.bool(), batch.mask)
    torch.testing.assert_close(padded(fields, "advantages", width) * mask, batch.advantages * batch.mask)
    torch.testing.assert_close(padded(fields, "old_log_probs", width) * mask, batch.old_logprobs * batch.mask)


def test_rows_of_another_agent_loop_become_turns_that_used_a_tool_if_one_answered():
    mask = [1, 1, 0, 0, 1]
    spans = rows.spans_of(mask)
    assert spans == [(0, 2), (4, 1)]
    played = rows.trajectory_of(
        [([1, 2], [3, 4, 5, 6, 7], spans)], reward=1.0, max_length=9, decode=lambda ids, **_: str(ids)
    )
    assert [turn.used_tool for turn in played.turns] == [True, False]
    assert [turn.reward for turn in played.turns] == [0.0, 1.0]
    assert played.turns[1].prompt_ids == [1, 2, 3, 4, 5, 6]
    assert played.turns[1].completion.token_ids == [7]
    assert (played.stop, played.success) == (Stop.DONE, True)
    assert rows.rows_of(played)[0].spans == spans


def test_a_response_that_fills_its_length_is_overlong():
    played = rows.trajectory_of([([1], [2, 3], [(0, 2)])], reward=0.0, max_length=2, decode=lambda ids, **_: "")
    assert played.stop is Stop.OVERLONG
    assert played.turns[0].completion.truncated


def test_the_layouts_of_the_docstring():
    sizes = {"dp": 2, "mini": 2, "unit": 1}
    assert rows.cells(4, 3, joint=True, **sizes) == [[[0, 4], [1, 5]], [[2, 6], [3, -1]]]
    assert rows.cells(4, 3, joint=False, **sizes) == [[[0], [1], [4], [5]], [[2], [3], [6], [-1]]]


@given(
    dp=st.integers(1, 4), share=st.integers(1, 6), steps=st.integers(1, 4), replay=st.integers(0, 40),
    unit=st.integers(1, 4), joint=st.booleans(),
)  # fmt: skip
def test_every_row_is_trained_once_and_every_share_is_as_long_as_the_others(dp, share, steps, replay, unit, joint):
    share *= unit
    policy = dp * share * steps
    layout = rows.cells(policy, replay, dp=dp, mini=dp * share, unit=unit, joint=joint)
    numbers = sorted(n for rank in layout for cell in rank for n in cell if n >= 0)
    assert numbers == list(range(policy + replay))
    [size] = {len(cell) for rank in layout for cell in rank}
    assert size % unit == 0
    before = [
        n for rank in rows.cells(policy, 0, dp=dp, mini=dp * share, unit=unit, joint=joint) for c in rank for n in c
    ]
    assert [n for rank in layout for cell in rank for n in cell if 0 <= n < policy] == before == list(range(policy))


def test_a_padding_row_trains_nothing():
    row = rows.padding(3)
    assert len(row["input_ids"]) == rows.PAD_TOKENS
    assert not row["spear_mask"].any()
    assert not row["response_mask"].any()
    assert not row["advantages"].any()


def test_holding_tokens_back_gives_the_core_loss_of_the_covariance_clip():
    rng = random.Random(3)
    drawn = [trajectory(rng, chat=True) for _ in range(8)]
    advantages = [[rng.random() * 3] * len(t.turns) for t in drawn]
    fields = list(rows.replay_rows(Replay(drawn, advantages, [[""] * len(t.turns) for t in drawn])))
    now = [row["old_log_probs"] + 0.1 * torch.randn(len(row["old_log_probs"])) for row in fields]
    base = spear(dr_bot(grpo()), covariance=_clip(), seed=5)
    again = spear(dr_bot(grpo()), covariance=_clip(), seed=5)
    names = ("old_log_probs", "advantages", "spear_mask")
    pad = torch.nn.utils.rnn.pad_sequence
    old, values, mask = (pad([row[name] for row in fields], batch_first=True) for name in names)
    inputs = LossInputs(pad(now, batch_first=True), old, values, mask)
    expected = base.imitation.loss(inputs)
    about = rows.hold_back(again.imitation.loss, fields, now)
    held = pad([row["advantages"] for row in fields], batch_first=True)
    plain = again.imitation.loss.func(
        LossInputs(inputs.logprobs, old, held, mask),
        **{name: value for name, value in again.imitation.loss.keywords.items() if name != "keep"},
    )
    assert about["replay/covariance_clip_fraction"] == pytest.approx(
        float(expected.metrics["covariance_clip_fraction"])
    )
    assert about["replay/covariance_clip_fraction"] > 0
    torch.testing.assert_close(plain.loss, expected.loss, atol=1e-6, rtol=1e-6)


def _clip():
    from spear_rl.algorithms import CovarianceClip

    return CovarianceClip(fraction=0.2, low=0.0)


def test_notes_count_what_trains_in_each_mini_batch():
    rng = random.Random(1)
    fields = list(rows.replay_rows(Replay([trajectory(rng, chat=False, turns=4)], [[1.0] * 4], [["", "", "void", ""]])))
    policy, replay = fields[:2], [fields[2], rows.padding(0)]
    rows.take_notes(policy, replay, [[0, 2], [1, 3]], 0.25)
    sizes = [float(row["spear_mask"].sum()) for row in fields]
    assert policy[0]["spear"].tolist() == [0, 0.25, sizes[0], 1, sizes[2], 1]
    assert replay[0]["spear"].tolist() == [1, 0.25, sizes[0], 1, sizes[2], 1]
    assert replay[1]["spear"].tolist() == [1, 0.25, sizes[1], 1, 0, 0]


def test_an_episode_comes_back_from_its_rows_with_the_advantages_of_the_core():
    """What the trainer does with rows: turns in, one advantage a turn out, spread over the very tokens."""
    rng = random.Random(5)
    groups = [Group(f"t{n}", [trajectory(rng, chat=n % 2 == 0) for _ in range(4)]) for n in range(3)]
    algorithm = gigpo()
    expected = iter(algorithm.advantages(groups))
    for played in (t for group in groups for t in group.trajectories):
        values = iter(next(expected))
        for row in rows.rows_of(played):
            own = [next(values) for _ in row.spans]
            spread = rows.spread(row.spans, own, len(row.response))
            for (start, length), value in zip(row.spans, own, strict=True):
                torch.testing.assert_close(spread[start : start + length], torch.full((length,), value))


@pytest.mark.parametrize("task", ["alfworld", "webshop", "math"])
@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen2.5-7b", "qwen3-32b"])
def test_every_preset_is_a_configuration_that_verl_can_be_given(task, model):
    config, own = launch.preset(f"{task}-{model}", [])
    keys = launch.verl_settings(config, Path("runs"), own)
    assert keys["trainer.v1.trainer_mode"] == "spear"
    assert keys["actor_rollout_ref.model.path"].lower().startswith("qwen/" + model[:7])
    assert keys["actor_rollout_ref.actor.clip_ratio_high"] == 0.28
    assert keys["actor_rollout_ref.actor.clip_ratio_c"] == 10.0
    assert config.algorithm.imitation.history == 10240


def test_the_presets_have_the_papers_numbers():
    webshop, own = launch.preset("webshop-qwen2.5-1.5b", [])
    assert (webshop.rollout.max_turns, webshop.rollout.max_context, webshop.run.steps) == (15, 4096, 350)
    assert (webshop.algorithm.bonus.steps, webshop.algorithm.imitation.warm_steps) == (200, 200)
    assert own["actor_rollout_ref.actor.ppo_mini_batch_size"] * webshop.rollout.group_size == 256
    math, own = launch.preset("math-qwen3-32b", [])
    assert (math.rollout.num_tasks, math.rollout.group_size) == (128, 16)
    assert (math.algorithm.bonus.steps, math.algorithm.imitation.warm_steps) == (200, 300)
    assert math.algorithm.imitation.require_tool
    keys = launch.verl_settings(math, Path("runs"), own)
    assert (keys["data.max_prompt_length"], keys["data.max_response_length"]) == (2048, 16384)
    assert (keys["trainer.total_training_steps"], keys["trainer.total_epochs"]) == (None, 1)


def test_settings_of_verls_own_win_over_translated_ones():
    config = load(None, ["engine.model=some/model"])
    keys = launch.verl_settings(config, Path("runs"), {"data.seed": "7", "trainer.n_gpus_per_node": "4"})
    assert keys["data.seed"] == "7"


def test_the_block_spear_holds_settings_of_ours_over_those_of_its_file(tmp_path):
    (tmp_path / "a.toml").write_text('[algorithm]\nname = "spear-grpo"\ninvalid_penalty = 0.5\n')
    config = launch.config_of({"file": str(tmp_path / "a.toml"), "algorithm": {"invalid_penalty": 0.2}})
    assert (config.algorithm.name, config.algorithm.invalid_penalty) == ("spear-grpo", 0.2)


@pytest.mark.parametrize(
    ("settings", "own", "sentence"),
    [
        (["engine.model=some/model", "rollout.num_tasks=6", "rollout.group_size=3"], {"trainer.nnodes": 4}, "4 GPUs"),
        (["engine.model=some/model", "rollout.num_tasks=6", "optim.num_minibatches=4"], {}, "do not divide"),
        (["engine.model=tiny"], {}, "transformers folder"),
        (["engine.model=some/model", "sft.episodes=3"], {}, "no cold start"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(settings, own, sentence):
    with pytest.raises(ConfigError, match=sentence):
        launch.verl_settings(load(None, settings), Path("runs"), own)


def test_a_run_without_the_block_is_told_how_to_add_it():
    with pytest.raises(ConfigError, match=r"\+spear\.algorithm\.name"):
        launch.config_of(None)


def test_what_verl_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="replay is clip or none"):
        launch.config_of({"algorithm": {"covariance": {"replay": "kl"}}})


def test_a_missing_extra_and_a_wrong_version_are_said_in_one_sentence(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(launch.metadata, "version", missing)
    with pytest.raises(MissingExtraError, match=r"spear-rl\[verl\]"):
        launch.checked()
    monkeypatch.setattr(launch.metadata, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"verl 0\.10\.0 is not supported"):
        launch.checked()


def test_the_task_files_name_every_task_once(tmp_path):
    config = load("lookup", ["engine.model=some/model", "eval.tasks=3"])
    launch.write_files(config, tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert len(lines) == 64
    assert len((tmp_path / "validation.jsonl").read_text().splitlines()) == 3
    assert launch.config_of({"file": str(tmp_path / "config.toml")}) == config
