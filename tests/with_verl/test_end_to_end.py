"""verl's own main on two cores, with SPEAR in it: `make test-verl`, in an environment with verl (docs/verl.md)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl.trainer")
import torch

HERE = Path(__file__).parent
ON_CPU = """
    data.dataloader_num_workers=0 actor_rollout_ref.model.use_remove_padding=False
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
    actor_rollout_ref.actor.fsdp_config.dtype=float32 actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
    actor_rollout_ref.rollout.name=cpu actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.load_format=auto transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    +ray_kwargs.ray_init.num_gpus=1 ray_kwargs.ray_init.num_cpus=32 +ray_kwargs.ray_init.include_dashboard=False
    trainer.device=cpu reward.num_workers=1 data.shuffle=False
"""
SETTINGS = """
    task.env=game:tasks rollout.num_tasks=4 rollout.group_size=4 rollout.max_turns=2 rollout.max_new_tokens=4
    rollout.max_context=256 rollout.detail=short optim.learning_rate=1e-3 run.checkpoint_every=3 eval.tasks=4
    algorithm.imitation.warm_steps=1 algorithm.bonus.steps=4 algorithm.covariance.low=0.001
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A language model of some thousand weights, of a kind verl knows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from spear_rl.engines.models.tiny import tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer(["red code 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", "blue code ?", "right", "wrong"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False, initializer_range=0.125,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    with torch.no_grad():  # words instead of bytes, and an end soon: one dimension is the same for every token
        policy.model.embed_tokens.weight[:, 0] = 30.0
        policy.lm_head.weight[:, 0] = 0.0
        policy.lm_head.weight[5:261, 0] = -0.7
        policy.lm_head.weight[tokenizer.eos_token_id, 0] = 0.33
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, *settings: str, verl: tuple[str, ...] = ()) -> list[dict[str, float]]:
    """Run to the end; the metrics of every step."""
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "cpu",  # ours is found by its entry point
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    ours = [*SETTINGS.split(), f"engine.model={model}", f"run.dir={folder}", *settings]
    command = [sys.executable, "-m", "spear_rl.cli", "verl", *ours, "--", *ON_CPU.split(), *verl]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=HERE)
    (folder / "log.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = re.findall(r"step:\d+ - .*", done.stdout)
    number = re.compile(r"(\S+):(?:np\.\w+\()?(-?[\d.e+-]+|nan)\)?(?= - |$)")
    return [{k: float(v) for k, v in number.findall(line)} for line in lines]


def on(ranks: int) -> tuple[str, ...]:
    return (f"trainer.n_gpus_per_node={ranks}", f"ray_kwargs.ray_init.num_gpus={ranks}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_replay_fires_and_a_resumed_run_goes_on_with_the_buffer(tmp_path, model, ranks):
    """Independent turns, GiGPO under Dr.BoT, replay in the on-policy update; every rank has a rollout server."""
    settings, verl = ["algorithm.name=spear-dr-bot-gigpo", "rollout.layout=turns"], on(ranks)
    first = train(tmp_path, model, *settings, "run.steps=3", verl=verl)
    assert len(first) == 3
    assert [bool(step["spear/replay/fired"]) for step in first] == [False, True, True]
    assert all(0.5 < step["spear/replay/ratio"] < 2 for step in first[1:])
    assert any(step["spear/replay/covariance_clip_fraction"] > 0 for step in first[1:])
    assert first[1]["spear/replay/age"] == 1
    assert first[0]["spear/rollout/bonus"] == pytest.approx(0.1)  # one tool turn each, mu(0) = 1
    state = torch.load(tmp_path / "checkpoints" / "global_step_3" / "spear.pt", weights_only=True)
    stored = len(state["algorithm"]["imitation"]["buffer"]["items"])
    assert stored > 0
    assert len(state["algorithm"]["imitation"]["history"]["means"]) == 12
    running = state["algorithm"]["running"]
    assert running["entropy_name"] == "rollout/entropy"  # verl's updates tell theirs to no step
    assert len(running["first_entropies"]) == 3
    assert min(running["first_entropies"]) > 0

    [resumed] = train(tmp_path, model, *settings, "run.steps=4", "run.resume=true", verl=verl)
    assert resumed["training/global_step"] == 4
    assert resumed["spear/replay/buffer_size"] == stored
    assert resumed["spear/replay/fired"] == 1


def test_a_growing_chat_replays_in_optimizer_steps_of_its_own(tmp_path, model):
    settings = ["algorithm.name=spear-grpo", "algorithm.imitation.update=separate", "run.steps=3"]
    steps = train(tmp_path, model, *settings, "algorithm.kl=0.01", "algorithm.entropy_bonus=0.001")
    assert steps[-1]["spear/replay/fired"] == 1
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["actor/kl_loss"] > 1e-6
    assert steps[-1]["actor/lr"] == pytest.approx(1e-3)


def test_without_replay_and_bonus_the_metrics_are_plain_verls(tmp_path, model):
    (tmp_path / "spear").mkdir()
    (tmp_path / "plain").mkdir()
    # A small rate: Adam's first steps blow up what the order of a sum leaves in weights without a gradient.
    off = ["algorithm.name=grpo", "run.steps=2", "algorithm.invalid_penalty=0", "optim.learning_rate=1e-6"]
    ours = train(tmp_path / "spear", model, *off)
    plain = train(tmp_path / "plain", model, *off, verl=("trainer.v1.trainer_mode=sync",))
    assert len(ours) == 2
    for mine, theirs in zip(ours, plain, strict=True):
        names = [n for n in theirs if n.startswith(("actor/", "critic/", "response_length/")) and "/perf/" not in n]
        assert {"actor/pg_loss", "actor/grad_norm", "critic/advantages/max"} <= {*names}
        assert {n: mine[n] for n in names} == pytest.approx({n: theirs[n] for n in names}, rel=1e-6, abs=1e-6)


def test_two_ranks_train_as_one_and_validate(tmp_path, model):
    """Rows are dealt out to ranks; what is learned, in float32, is the same. Every step ends with a validation."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    settings = ["algorithm.name=spear-dr-bot-grpo", "run.steps=3", "optim.learning_rate=1e-6"]
    settings += ["eval.every=1", "eval.tasks=16", "eval.temperature=1"]
    exact = ("+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",)
    one_server = ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",)  # so that it draws the same
    one = train(tmp_path / "one", model, *settings, verl=exact)
    two = train(tmp_path / "two", model, *settings, verl=exact + on(2) + one_server)
    assert [bool(step["spear/replay/fired"]) for step in two] == [False, True, True]
    for alone, shared in zip(one, two, strict=True):
        names = [n for n in alone if n.startswith(("actor/", "critic/", "spear/", "val-core/")) and "/perf/" not in n]
        assert {"actor/pg_loss", "actor/grad_norm", "spear/replay/weight"} <= {*names}
        assert ("spear/replay/baseline" in names) is bool(alone["spear/replay/fired"])
        assert {n: shared[n] for n in names} == pytest.approx({n: alone[n] for n in names}, rel=1e-5, abs=1e-6)
    assert 0 < sum(step["val-core/game:tasks/acc/mean@1"] for step in two) < 3


def test_a_run_with_verls_own_agent_loop_and_reward_replays_too(tmp_path, model):
    lines = [
        {"prompt": [{"role": "user", "content": f"red code {n}"}], "data_source": "mine", "extra_info": {"index": n},
         "reward_model": {"ground_truth": ""}}
        for n in range(16)
    ]  # fmt: skip
    data = tmp_path / "mine.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)) + "\n")
    own = (f"data.train_files={data}", f"data.val_files={data}", f"reward.custom_reward_function.path={HERE}/reward.py")
    steps = train(tmp_path, model, "algorithm.name=spear-grpo", "run.steps=2", verl=own)
    assert steps[1]["spear/replay/fired"] == 1
    assert steps[1]["spear/replay/ratio"] == pytest.approx(1, abs=0.5)
    assert steps[0]["spear/rollout/reward"] == pytest.approx(steps[0]["critic/score/mean"], abs=1e-6)
