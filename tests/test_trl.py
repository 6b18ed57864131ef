"""SPEAR inside TRL, through the real train(): what it replays is what the core would, and off it is GRPOTrainer."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from importlib import metadata

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import TrainerState
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template
from trl.trainer import grpo_trainer

import spear_rl.integrations.trl
from spear_rl.algorithms import ALGORITHMS, ByEntropy, BySuccess, CovarianceClip, TokenMean, spear
from spear_rl.algorithms import tool_bonus as core_tool_bonus
from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.functional import (
    LossInputs,
    clipped_surrogate,
    cosine,
    fixed_length_mean,
    group_relative,
    keep_low_covariance,
    recalibrate,
    sequence_mean,
    token_mean,
)
from spear_rl.integrations.shared.episodes import Row, episode_of, turns_of
from spear_rl.integrations.trl import (
    SpearGRPOTrainer,
    dr_bot_settings,
    padded,
    settings_of,
    share,
    supported_trainer,
    tool_bonus,
)
from spear_rl.types import Completion, Stop, Trajectory, Turn

WORDS = ["red code ?", "green code 7", "blue code 3", "gold code 1 2 3 4 5 6 7 8 9 0", "look", "right", "wrong"]
PROMPTS = ["red code ?", "green code ?", "blue code 3 ?", "gold ?"] * 4
ALWAYS = {"imitation": 1.0, "fraction": 0.5}
TIGHT = CovarianceClip(fraction=0.2, low=0.0, high=40.0)  # so that even small rewards have something to clip


def even_share(completion_ids, **_):
    """The share of even token ids: something a random policy differs in."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def words():
    return tiny_tokenizer(WORDS)


@pytest.fixture
def trainer(words, tmp_path):
    def make(kind=SpearGRPOTrainer, *, rewards=even_share, prompts=PROMPTS, tokenizer=words, **options):
        ours = {k: options.pop(k) for k in ("spear", "tools", "environment_factory", "rollout_func") if k in options}
        settings = {
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
        }
        return kind(
            tiny_model("tiny-xs", tokenizer, seed=0),
            rewards,
            args=GRPOConfig(**(settings | options)),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            **ours,
        )

    return make


class Watched(SpearGRPOTrainer):
    """Writes down what passed through the hooks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.outputs, self.replays, self.losses = [], [], []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.outputs.append((output, self._task_rewards, [rows for rows in self._replay if rows is not None]))
        return output

    def _differentiated(self, rows):
        generator = self.spear.generators[0].clone_state()
        pull, value = super()._differentiated(rows)
        with torch.no_grad():
            whole = rows.input_ids, rows.attention, rows.mask.shape[1]
            logprobs = self._get_per_token_logps_and_entropies(self.model, *whole)[0]
        self.replays.append((rows, logprobs, pull, float(value), generator))
        return pull, value


def history(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def trained(trainer, *args, **options):
    """A run from start to end: TRL seeds when a trainer is made, so two must not be made before one of them trains."""
    run = trainer(*args, **options)
    run.train()
    return run


def assert_same_run(one, other):
    assert history(one, "loss") == history(other, "loss")
    assert history(one, "grad_norm") == history(other, "grad_norm")
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one).values(), weights_of(other).values(), strict=True))


# --- the contract: TRL's numbers and the core's are the same ---


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_are_the_cores(trainer, scale):
    run = trainer(Watched, spear=ALWAYS, scale_rewards=scale)
    run.train()
    for output, rewards, _ in run.outputs:
        labels = torch.arange(len(rewards)) // 4
        ours = group_relative(rewards, labels, divide_by_std=scale == "group", eps=1e-4)
        torch.testing.assert_close(output["advantages"], ours, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", ["none", "group"])
def test_recalibrated_advantages_are_rewards_above_the_median_group(trainer, scale):
    run = trainer(Watched, spear=ALWAYS, max_steps=6, scale_rewards=scale)
    run.train()
    means, stds, played = [], [], {}
    for output, rewards, replay in run.outputs:
        means += rewards.view(-1, 4).double().mean(1).tolist()
        stds += [std for std in rewards.view(-1, 4).double().std(1).tolist() if std > 0]
        baseline, std = (torch.tensor(x, dtype=torch.float64).quantile(0.5) for x in (means, stds))
        for rows in replay:
            for row in range(len(rows.mask)):
                reward = played[tuple(rows.input_ids[row][rows.attention[row].bool()].tolist())]
                exact = torch.tensor(reward, dtype=torch.float64)
                expected = float(recalibrate(exact, baseline, std if scale == "group" else None))
                assert rows.advantages[row][rows.mask[row]].tolist() == pytest.approx(
                    [expected] * int(rows.mask[row].sum()), abs=1e-6, rel=1e-5
                )
        for row, reward in enumerate(rewards.tolist()):
            prompt, answer = (
                output[f"{part}_ids"][row][output[f"{part}_mask"][row].bool()].tolist()
                for part in ("prompt", "completion")
            )
            played[tuple(prompt + answer)] = reward
    assert any(replay for _, _, replay in run.outputs)


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "dr_grpo", "grpo"])
def test_the_replay_term_and_its_gradient_are_the_cores_on_the_same_rows(trainer, loss_type):
    """Whole mini-batch at once in the core; in TRL two micro-batches that must add up to the same."""
    gradients, plain = {}, {}

    class Caught(Watched):
        def training_step(self, model, inputs, num_items_in_batch):
            loss = super().training_step(model, inputs, num_items_in_batch)
            gradients[self.state.global_step] = {n: p.grad.clone() for n, p in model.named_parameters()}
            return loss

        def _compute_loss(self, model, inputs):
            policy = GRPOTrainer._compute_loss(self, model, inputs)
            none = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
            sums = plain.setdefault(self.state.global_step, none).values()
            for total, gradient in zip(sums, torch.autograd.grad(policy, list(model.parameters())), strict=True):
                total += gradient
            return super()._compute_loss(model, inputs)

    run = trainer(Caught, spear=ALWAYS | {"covariance": TIGHT}, loss_type=loss_type, max_steps=2, epsilon_high=0.28)
    run.train()
    (rows, logprobs, pull, value, generator), *_ = run.replays
    reduce = {"grpo": sequence_mean, "dr_grpo": partial(fixed_length_mean, length=6)}.get(loss_type, token_mean)
    keep = partial(keep_low_covariance, fraction=0.2, low=0.0, high=40.0, generator=generator)
    inputs = LossInputs(logprobs.requires_grad_(), rows.old_logprobs, rows.advantages, rows.mask)
    out = clipped_surrogate(inputs, clip_low=0.2, clip_high=0.28, reduce=reduce, keep=keep)
    assert value == pytest.approx(float(out.loss.detach()), abs=1e-6)
    assert float(out.metrics["covariance_clip_fraction"]) > 0
    torch.testing.assert_close(pull[:-1], torch.autograd.grad(out.loss, logprobs)[0], atol=1e-7, rtol=1e-5)

    # At the second update the weights are those the run ended with, less that update: rebuild it from the first.
    model = trainer(spear=ALWAYS | {"covariance": TIGHT}, loss_type=loss_type, max_steps=1, epsilon_high=0.28)
    model.train()
    scored = model._get_per_token_logps_and_entropies(model.model, rows.input_ids, rows.attention, rows.mask.shape[1])
    named = dict(model.model.named_parameters())
    expected = torch.autograd.grad((pull[:-1] * scored[0]).sum(), list(named.values()))
    for name, gradient in zip(named, expected, strict=True):
        torch.testing.assert_close(gradients[1][name] - plain[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_ratios_of_replayed_tokens_are_new_over_old(trainer):
    run = trainer(Watched, spear=ALWAYS, steps_per_generation=4, learning_rate=1e-4)
    run.train()
    assert len(run.replays) >= 2
    for (rows, logprobs, *_), logged in zip(run.replays, history(run, "spear/ratio"), strict=True):
        ratio = (logprobs - rows.old_logprobs)[rows.mask].exp()
        assert ratio.isfinite().all()
        assert float(ratio.min()) > 0.3
        assert float(ratio.max()) < 3
        assert logged == pytest.approx(float(ratio.mean()), abs=1e-5)


def test_what_the_buffer_holds_is_what_was_sampled(trainer):
    """Scored again by the weights that played, a remembered episode has the log-probabilities stored with it."""
    run = trainer(spear=ALWAYS, learning_rate=0.0)
    run.train()
    kept = [stored.item.trajectory for stored in run.spear.imitation.buffer.items]
    rows = padded(kept, [[1.0] * len(t.turns) for t in kept], pad_id=run._tokenizer.pad_token_id)
    with torch.no_grad():
        whole = rows.input_ids, rows.attention, rows.mask.shape[1]
        logprobs = run._get_per_token_logps_and_entropies(run.model, *whole)[0]
    torch.testing.assert_close(logprobs[rows.mask], rows.old_logprobs[rows.mask], atol=1e-5, rtol=1e-5)
    assert history(run, "spear/ratio") == pytest.approx([1.0] * 3, abs=1e-5)


# --- off is plain ---


@pytest.mark.parametrize("settings", [{}, {"steps_per_generation": 4, "num_iterations": 2, "loss_type": "dr_grpo"}])
@pytest.mark.parametrize("off", [None, {"imitation": None}, {"imitation": 0.0}])
def test_without_imitation_a_run_is_grpo_trainers_bit_for_bit(trainer, off, settings):
    assert_same_run(trained(trainer, GRPOTrainer, **settings), trained(trainer, spear=off, **settings))


def test_dr_bot_settings_are_accepted_and_switch_off_cleanly(trainer):
    settings = dr_bot_settings(gradient_accumulation_steps=2) | {"mask_truncated_completions": False}
    assert_same_run(trained(trainer, GRPOTrainer, **settings), trained(trainer, spear=None, **settings))


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "dr-bot-grpo"])
def test_a_name_is_the_same_algorithm_as_everywhere(trainer, name):
    """TRL plays, so filters are not ours there; the bonus is a reward function. Replay is as in the paper."""
    run = trainer(**settings_of(name), max_completion_length=1024)
    assert run.spear == replace(spear(ALGORITHMS[name]()), bonus=None, filters=())
    assert tool_bonus().weight == spear(ALGORITHMS[name]()).bonus.weight


def test_grpo_config_as_it_comes_is_grpo_with_trls_token_mean_and_its_own_mean_is_one_setting(trainer):
    own = ALGORITHMS["grpo"]().loss
    assert trainer().spear.loss == replace(own, reduction=TokenMean())
    assert trainer(**settings_of("grpo")).spear.loss == own
    assert settings_of("spear-grpo") == settings_of("grpo")


@pytest.mark.parametrize("name", ["gigpo", "rloo", "ppo", "spear-dr-bot-gigpo"])
def test_what_grpo_config_cannot_express_is_said(name):
    with pytest.raises(ConfigError, match="GRPOConfig can only express"):
        settings_of(name)


def test_dual_clip_and_trls_delta_are_one_thing(trainer):
    run = trainer(spear=None, **dr_bot_settings())
    old, logprobs = torch.zeros(1, 4), torch.tensor([[-1.0, 0.1, 1.0, 3.0]])
    advantages, mask = torch.full((1, 4), -0.5), torch.ones(1, 4)
    core = clipped_surrogate(
        LossInputs(logprobs, old, advantages, mask), dual_clip=10.0, reduce=partial(fixed_length_mean, length=6)
    )
    run._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, torch.zeros(1, 4), None)
    run.current_gradient_accumulation_steps = 1
    ids = torch.zeros(1, 4, dtype=torch.long)
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    loss = run._compute_loss(run.model, batch | {"advantages": advantages[:, 0], "old_per_token_logps": old})
    assert float(loss) == pytest.approx(float(core.loss), abs=1e-6)


# --- through train() ---


def test_replay_fires_once_there_is_something_to_replay(trainer):
    run = trainer(spear=ALWAYS)
    run.train()
    assert history(run, "spear/fired") == [0, 1, 1, 1]
    assert history(run, "spear/buffer_size")[-1] > 0
    assert history(run, "spear/trajectories")[1:] == pytest.approx([4, 4, 4], abs=1)
    assert history(run, "spear/row_share")[-1] == history(run, "spear/trajectories")[-1] / 8
    assert history(run, "spear/weight") == [1.0] * 4
    assert all(map(math.isfinite, history(run, "loss")))


def test_evaluation_neither_remembers_nor_replays(trainer):
    run = trainer(spear=ALWAYS, per_device_eval_batch_size=4, max_steps=2)
    run.train()
    before = run.spear.state_dict()["imitation"]
    run.evaluate(Dataset.from_dict({"prompt": PROMPTS[:2]}))
    assert run.spear.state_dict()["imitation"] == before


def test_the_weight_follows_its_schedule_by_generations(trainer):
    run = trainer(spear=ALWAYS | {"imitation": cosine(0, 1, 4)}, steps_per_generation=4, max_steps=8)
    run.train()
    assert history(run, "spear/weight") == pytest.approx([cosine(0, 1, 4)(step) for step in range(4)])
    assert history(run, "spear/fired")[0] == 0


def test_a_resumed_run_has_the_buffer_and_goes_on_alike(trainer, tmp_path):
    whole = trainer(spear=ALWAYS, max_steps=6, save_strategy="steps", save_steps=3, lr_scheduler_type="constant")
    whole.train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    saved = torch.load(checkpoint / "spear.pt", weights_only=True)
    seen = []

    class Resumed(SpearGRPOTrainer):
        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            seen.append((self.spear.state_dict(), self._rng.getstate()))

    again = trainer(Resumed, spear=ALWAYS, max_steps=6, lr_scheduler_type="constant")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert len(saved["spear"]["imitation"]["buffer"]["items"]) > 0
    assert seen[0][0]["imitation"] == saved["spear"]["imitation"]
    assert seen[0][1] == saved["rng"]
    assert history(again, "spear/fired")[-3:] == [1, 1, 1]
    assert history(again, "spear/buffer_size") == history(whole, "spear/buffer_size")
    assert history(again, "loss") == pytest.approx(history(whole, "loss"), abs=1e-6)


def test_a_plain_checkpoint_resumes_with_an_empty_buffer_and_says_so(trainer, tmp_path, caplog):
    trainer(spear=None, max_steps=2, save_strategy="steps", save_steps=2).train()
    run = trainer(spear=ALWAYS, max_steps=3)
    run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert "replay buffer starts empty" in caplog.text
    assert history(run, "spear/buffer_size") == [0]


def test_truncated_completions_count_in_the_baseline_but_are_not_replayed(trainer, words):
    def rollout(prompts, trainer):
        """Only every other answer ends itself; among those of a group the later ones are worth more."""
        asked = words(prompts, add_special_tokens=False)["input_ids"]
        ends = [words.eos_token_id, 9]
        ids = [[7 + number % 4, ends[number % 2]] for number in range(len(prompts))]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": [[-1.0] * 2] * len(ids)}

    run = trainer(
        rewards=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        spear=ALWAYS,
        rollout_func=rollout,
        mask_truncated_completions=True,
    )
    run.train()
    imitation = run.spear.imitation
    assert list(imitation.history.means) == [8.5] * 8
    assert {tuple(s.item.trajectory.turns[0].completion.token_ids) for s in imitation.buffer.items} == {
        (9, words.eos_token_id)
    }


def test_an_episode_without_a_score_is_left_out_of_its_group(trainer):
    def sometimes(completion_ids, **_):
        return [None if number % 4 == 0 else float(number % 4) for number in range(len(completion_ids))]

    run = trainer(rewards=sometimes, spear=ALWAYS)
    run.train()
    assert list(run.spear.imitation.history.means) == [2.0] * 8


# --- the bonus ---


def test_the_bonus_is_the_cores_and_fades():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}
    chats = [[call, {"role": "tool", "content": "7"}] * n + [{"role": "assistant", "content": "7"}] for n in (0, 3, 12)]
    turn = Turn([], Completion([], []), used_tool=True)
    core = [core_tool_bonus(Trajectory([turn] * n, Stop.DONE)) for n in (0, 3, 12)]
    bonus = tool_bonus(cosine(1, 0, 10))
    for step in (0, 5, 10):
        mu = cosine(1, 0, 10)(step)
        paid = bonus(completions=chats, trainer_state=TrainerState(global_step=step), prompts=[])
        assert paid == pytest.approx([mu * b for b in core])
    assert tool_bonus(2.0)(completions=["text"] * 2, trainer_state=TrainerState(), num_tool_turns=[1, 2]) == [0.2, 0.4]
    assert tool_bonus()(completions=["text"], trainer_state=TrainerState()) == [0.0]


def test_the_bonus_trains_but_never_reaches_replay(trainer):
    class Counted(type(tool_bonus())):
        def __call__(self, *, completions, **rest):
            rest |= {"num_tool_turns": [number % 5 for number in range(len(completions))]}
            return super().__call__(completions=completions, **rest)

    run = trainer(Watched, rewards=[even_share, Counted(lambda step: 5.0)], spear=ALWAYS, reward_weights=[2.0, 1.0])
    run.train()
    assert history(run, "rewards/tool_bonus/mean")[0] > 0
    for output, rewards, _ in run.outputs:
        answers = zip(output["completion_ids"], output["completion_mask"].bool(), strict=True)
        task = torch.tensor(even_share([ids[mask].tolist() for ids, mask in answers]))
        torch.testing.assert_close(rewards, 2.0 * task)
        assert not torch.allclose(output["advantages"].sign(), group_relative(rewards, torch.arange(8) // 4).sign())
    assert max(run.spear.imitation.history.means) <= 2.0


def test_a_bonus_alone_admits_nothing_and_a_low_one_keeps_no_win_out(trainer):
    class Turned(type(tool_bonus())):
        """Pays most where the task pays least."""

        def __call__(self, *, completions, **rest):
            return super().__call__(completions=completions, **rest | {"num_tool_turns": [9, 6, 3, 0] * 2})

    for task, by_reward, by_score in (([1.0] * 4, set(), {1.0}), ([0.0, 0.0, 0.0, 1.0], {1.0}, {0.0})):
        for options, expected in (({}, by_reward), ({"admit_by_score": True}, by_score)):
            paid = partial(lambda completion_ids, values, **_: values * (len(completion_ids) // 4), values=task)
            paid.__name__ = "paid"
            run = trained(trainer, rewards=[paid, Turned(lambda _: 5.0)], spear=ALWAYS | options, max_steps=2)
            stored = run.spear.imitation.buffer.items
            assert {s.reward for s in stored} == expected
            assert all(s.item.trajectory.num_tokens for s in stored)


def test_a_replay_term_weighs_by_the_episodes_drawn_of_those_wanted(trainer):
    """One win of four in a group: two of eight episodes are remembered where eight are wanted."""
    rewards = lambda completion_ids, **_: [float(n % 4 == 0) for n in range(len(completion_ids))]  # noqa: E731
    for options, weight in (({}, 2 / 8), ({"scale_by_rows": False}, 1.0)):
        spear = {"imitation": 1.0, "fraction": 1.0, "covariance": None, "percentile": 0.0} | options
        run = trained(trainer, Watched, rewards=rewards, spear=spear, max_steps=2, learning_rate=0.0)
        (rows, logprobs, _, value, _), *_ = run.replays
        assert len(rows.mask) == 2
        inputs = LossInputs(logprobs, rows.old_logprobs, rows.advantages, rows.mask)
        assert value == pytest.approx(weight * float(clipped_surrogate(inputs).loss), abs=1e-6)
        assert value < 0


# --- tools, environments, rollouts ---

CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "red"}}\n</tool_call>'


class Scripted(Watched):
    """Every other episode uses its tool and then answers; the rest of TRL's machinery is the real one."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = []
        for number, ids in enumerate(prompt_ids):
            is_answered = "<tool_response>" in self._tokenizer.decode(ids)
            uses_tool = len(prompt_ids) == 8 and number % 2 == 0
            texts.append(("7" if is_answered else CALL if uses_tool else "3") + "<|im_end|>")
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"], None


@pytest.fixture(scope="module")
def qwen_words():
    tokenizer = tiny_tokenizer([*WORDS, CALL, "<tool_response> </tool_response> system user assistant tool"])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def right_answer(completions, **_):
    return [float(chat[-1]["content"].strip() == "7") for chat in completions]


def look(place: str) -> str:
    """Look at a place.

    Args:
        place: where to look.
    """
    return f"{place} code 7"


class Room:
    def reset(self, **_):
        return None

    def look(self, place: str) -> str:
        """Look at a place.

        Args:
            place: where to look.
        """
        return look(place)


@pytest.mark.parametrize("tools", [{"tools": [look]}, {"environment_factory": Room}], ids=["tools", "environment"])
def test_episodes_with_tools_are_replayed_without_the_tools_own_tokens(trainer, qwen_words, tools):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    rewards = [right_answer, tool_bonus(1.0)]
    options = ALWAYS | {"require_tool": True}
    tools |= {"max_completion_length": 256, "learning_rate": 1e-5}
    run = trainer(Scripted, rewards=rewards, prompts=chats, tokenizer=qwen_words, spear=options, **tools)
    run.train()
    assert history(run, "rewards/tool_bonus/mean")[0] == pytest.approx(0.05)
    assert history(run, "spear/fired")[1:] == [1, 1, 1]
    for rows, logprobs, *_ in run.replays:
        for row in range(len(rows.mask)):
            own = rows.input_ids[row][-rows.mask.shape[1] :][rows.mask[row]]
            assert "code 7" not in qwen_words.decode(own)
            assert "code 7" in qwen_words.decode(rows.input_ids[row])
        assert (logprobs - rows.old_logprobs)[rows.mask].abs().max() < 0.1
    stored = run.spear.imitation.buffer.items[0]
    assert (stored.reward, len(stored.item.trajectory.turns), stored.item.trajectory.num_tool_turns) == (1.0, 2, 1)


def test_a_rollout_function_brings_its_own_masks_and_tool_counts(trainer, words):
    def rollout(prompts, trainer):
        asked = words(prompts, add_special_tokens=False)["input_ids"]
        answers = [words.encode(text, add_special_tokens=False) for text in ("look 7", "look 3")]
        ids = [[*answers[number % 2], words.eos_token_id] for number in range(len(prompts))]
        masks = [[1, *[0] * (len(row) - 2), 1] for row in ids]
        logprobs = [[-1.0] * len(row) for row in ids]
        turns = [number % 2 for number in range(len(prompts))]
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": logprobs} | {
            "env_mask": masks,
            "num_tool_turns": turns,
        }

    def seven(completions, **_):
        return [float("7" in text) for text in completions]

    run = trainer(Watched, rewards=[seven, tool_bonus(1.0)], spear=ALWAYS, rollout_func=rollout)
    run.train()
    assert history(run, "rewards/tool_bonus/mean")[0] == pytest.approx(0.05)
    assert len(run.replays) == 3
    assert all(rows.mask.sum(1).tolist() == [2] * len(rows.mask) for rows, *_ in run.replays)


def test_no_line_of_trls_is_copied():
    ours = {line.strip() for line in inspect.getsource(spear_rl.integrations.trl).splitlines()}
    theirs = {line.strip() for line in inspect.getsource(grpo_trainer).splitlines()}
    common = {line for line in ours & theirs if len(line) > 25 and not line.startswith(("from ", "import "))}
    assert all(line.startswith("super().") for line in common)


# --- rows ---


def test_a_row_becomes_turns_and_the_same_row_again():
    weights = [0.5, 0.0, 0.0, 2.0]
    row = Row("", 0, 0, [1, 2], [7, 3, 4, 8], [True, False, False, True], [-0.1, 0.0, 0.0, -0.2], weights=weights)
    made = episode_of(turns_of(row), 3.0)
    assert [(t.prompt_ids, t.completion.token_ids, t.used_tool) for t in made.turns] == [
        ([1, 2], [7], True),
        ([1, 2, 7, 3, 4], [8], False),
    ]
    assert made.reward == 3.0
    other = episode_of(turns_of(Row("", 0, 0, [5, 5, 5], [9], [True], [-0.3])), 1.0)
    rows = padded([made, other], [[2.0, 2.0], [4.0]], pad_id=0)
    assert rows.input_ids.tolist() == [[0, 1, 2, 7, 3, 4, 8], [5, 5, 5, 9, 0, 0, 0]]
    assert rows.attention.tolist() == [[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]]
    assert rows.mask.tolist() == [[True, False, False, True], [True, False, False, False]]
    assert rows.advantages.tolist() == [[1.0, 0.0, 0.0, 4.0], [4.0, 0.0, 0.0, 0.0]]
    torch.testing.assert_close(rows.old_logprobs, torch.tensor([[-0.1, 0, 0, -0.2], [-0.3, 0, 0, 0]]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_row_is_trained_once_and_ranks_have_as_many_rows(parts, ranks):
    for count in range(1, 12):
        shares = [[share(count, part, parts, rank, ranks) for rank in range(ranks)] for part in range(parts)]
        assert all(len({len(mine) for mine in part}) == 1 for part in shares)
        assert sorted(row for part in shares for mine in part for row in mine if row >= 0) == list(range(count))


# --- mistakes ---


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss_type='cispo'"),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, "importance_sampling_level"),
        ({"steps_per_generation": 3}, "multiple of gradient_accumulation_steps=2"),
        ({"spear": {"bonus": 1.0}}, "tool_bonus"),
        ({"spear": {"update": "separate"}}, "joint"),
        ({"spear": {"covariance": CovarianceClip(joint_means=True)}}, "joint_means=False"),
        ({"spear": {"priority": ["fresh", "medium"]}}, "priority must be confident, fresh or family"),
        ({"spear": {"priority": ["rare"]}}, "priority must be confident, fresh or family"),
        ({"spear": {"priority": "rare"}}, "priority must be confident, fresh or family"),
        ({"spear": {"gate": "bth"}}, r"^spear: gate cannot be 'bth'; did you mean both\?"),
        ({"spear": {"percentile": 101}}, r"^spear: percentile must be 0 or more and at most 100"),
        ({"spear": {"covariance": "clip"}}, r"^spear: covariance: pass CovarianceClip\(...\) or None"),
        ({"spear": {"imitation": BySuccess(0.0, 1.0)}}, "neither success nor entropy"),
        ({"spear": {"imitation": ByEntropy(1.0)}}, "neither success nor entropy"),
        ({"spear": {"priority": ["newest"]}}, "there is no 'newest'"),
        ({"spear": {"join_lost": True}}, "join_lost must be False"),
        ({"spear": {"max_agee": 3}}, r"^spear: there is no option 'max_agee'; did you mean max_age\?$"),
        ({"spear": {"imitaton": 0.5}}, r"^spear: there is no option 'imitaton'; did you mean imitation\?$"),
        (
            {"spear": {"imitation": None, "age_dekay": 0.5}},
            r"^spear: there is no option 'age_dekay'; did you mean age_d",
        ),
        ({"spear": {"buffer": None}}, r"^spear: there is no option 'buffer'"),
        ({"spear": {3: 1}}, r"^spear: there is no option 3"),
        ({"spear": True}, r"^spear: pass a dict of options, .* not True$"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(trainer, settings, says):
    if "steps_per_generation" in settings:
        settings |= {"per_device_train_batch_size": 8}
    with pytest.raises(ConfigError, match=says):
        trainer(**({"spear": ALWAYS} | settings))


def test_without_imitation_any_loss_type_goes(trainer):
    trainer(spear=None, loss_type="cispo", epsilon_high=5.0, max_steps=1).train()


class _Found:
    def __init__(self, version):
        self.version = version


@pytest.mark.parametrize("version", ["1.15.0", "1.17.0", "1.160.0", "0.29.1"])
def test_another_version_of_trl_is_refused_in_one_sentence(monkeypatch, version):
    monkeypatch.setattr(metadata, "distributions", lambda **_: [_Found(version)])
    with pytest.raises(ConfigError, match=rf"^trl {version} is not supported: pip install 'trl>=1\.16,<1\.17'$"):
        supported_trainer(())


def test_missing_trl_names_the_extra(monkeypatch):
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    with pytest.raises(MissingExtraError, match=r"pip install 'spear-rl\[trl\]'"):
        supported_trainer(())


def test_a_method_that_is_gone_is_named():
    with pytest.raises(ConfigError, match=r"^trl .* has no trl\.GRPOTrainer\._not_there: pip install"):
        supported_trainer(("_compute_loss", "_not_there"))
