"""The vLLM generator: translation against a stand-in for vLLM, and the real one where it is installed."""

from __future__ import annotations

import math
import os
import random
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conftest import install_vllm
from spear_rl.engines.vllm import VLLMGenerator
from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.rollout.generator import Sampling

HAS_VLLM = find_spec("vllm") is not None


class FakeModel(torch.nn.Module):
    """vLLM's side: two weights, filled by the names of the transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(4, 2)
        self.layer = torch.nn.Linear(2, 2, bias=False)
        self.received: list[str] = []

    def load_weights(self, weights: Any) -> set[str]:
        own, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            self.received.append(name)
            if name.removeprefix("model.") in own:
                own[name.removeprefix("model.")].copy_(weight)
                loaded.add(name.removeprefix("model."))
        return loaded


class FakeLLM:
    """Answers every prompt with its last token plus one, twice."""

    finish_reason = "stop"
    is_idle = True

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(settings["seed"])
        random.seed(settings["seed"])
        self.settings, self.model, self.asked, self.num_resets = settings, FakeModel(), [], 0

    def generate(self, inputs: list[dict[str, list[int]]], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.asked = list(zip(inputs, params, strict=True))
        return [SimpleNamespace(outputs=[self._output(entry["prompt_token_ids"])]) for entry in inputs]

    def _output(self, prompt: list[int]) -> Any:
        ids = (prompt[-1] + 1, prompt[-1] + 1)
        steps = [
            {ids[0]: SimpleNamespace(logprob=-0.5)},
            {9999: SimpleNamespace(logprob=-0.1), ids[1]: SimpleNamespace(logprob=-2)},
        ]
        return SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=self.finish_reason)

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return self.is_idle


class Saved:
    """A configuration or tokenizer that notes where it was saved."""

    folder = ""

    def save_pretrained(self, folder: str) -> None:
        self.folder = folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    llm = type("LLM", (FakeLLM,), {})
    install_vllm(monkeypatch, llm, is_cpu=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return llm


def trained_model() -> Any:
    weights = {"model.embed_tokens.weight": torch.full((4, 2), 3.0), "model.layer.weight": torch.full((2, 2), 5.0)}
    return SimpleNamespace(config=Saved(), generation_config=Saved(), state_dict=lambda: weights, named_modules=list)


def test_without_vllm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spear_rl.engines.vllm.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'spear-rl\[vllm\]'"):
        VLLMGenerator("folder")


def test_token_ids_go_in_and_token_ids_with_their_own_log_probs_come_out(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder", sampling=Sampling(max_new_tokens=7, stop=("</action>",)))
    [first, second] = generator.generate([[1, 2], [5]])
    assert (first.token_ids, second.token_ids) == ([3, 3], [6, 6])
    assert first.logprobs == [-0.5, -2.0]
    assert not first.truncated
    [(entry, params), _] = generator._llm.asked
    assert entry == {"prompt_token_ids": [1, 2]}
    assert (params.max_tokens, params.stop, params.logprobs) == (7, ["</action>"], 0)
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens
    assert not params.ignore_eos


def test_a_completion_that_hit_its_limit_is_truncated_and_an_abandoned_one_is_an_error(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder")
    fake.finish_reason = "length"
    assert generator.generate([[1]])[0].truncated
    fake.finish_reason = "abort"
    with pytest.raises(RuntimeError, match="abort"):
        generator.generate([[1]])


def test_no_prompts_are_no_completions(fake: type[FakeLLM]) -> None:
    assert VLLMGenerator("folder").generate([]) == []


def test_a_prompt_that_does_not_fit_is_a_clear_error(fake: type[FakeLLM]) -> None:
    with pytest.raises(ConfigError, match="a prompt of 8 tokens"):
        VLLMGenerator("folder", max_model_len=8).generate([[1] * 8])


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (Sampling(temperature=0.7), "processed_logprobs"),
        (Sampling(top_p=0.9), "raw_logprobs"),
    ],
)
def test_log_probs_are_of_the_whole_distribution_at_the_temperature(
    fake: type[FakeLLM], sampling: Sampling, mode: str
) -> None:
    assert VLLMGenerator("folder", sampling=sampling)._llm.settings["logprobs_mode"] == mode


def test_a_nucleus_at_another_temperature_is_refused(fake: type[FakeLLM]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.top_p=0\.9"):
        VLLMGenerator("folder", sampling=Sampling(top_p=0.9, temperature=0.7))


def test_every_prompt_has_a_seed_of_its_own_and_the_same_calls_have_the_same_seeds(fake: type[FakeLLM]) -> None:
    def seeds(generator: Any) -> list[int]:
        generator.generate([[1], [1], [1]])
        return [params.seed for _, params in generator._llm.asked]

    first, second = VLLMGenerator("folder", seed=4), VLLMGenerator("folder", seed=4)
    calls = [seeds(first), seeds(first)]
    assert len({seed for call in calls for seed in call}) == 6
    assert calls == [seeds(second), seeds(second)]
    assert seeds(VLLMGenerator("folder", seed=5)) != calls[0]
    assert all(0 <= seed < 2**63 for call in calls for seed in call)


def test_an_evaluation_has_its_own_settings_and_leaves_training_as_it_was(fake: type[FakeLLM]) -> None:
    generator, other = VLLMGenerator("folder"), VLLMGenerator("folder")
    generator.evaluation_generator(Sampling(temperature=0, max_new_tokens=2), seed=9).generate([[1]])
    assert (generator._llm.asked[0][1].temperature, generator._llm.asked[0][1].max_tokens) == (0, 2)
    generator.generate([[1]])
    other.generate([[1]])
    assert generator._llm.asked[0][1].seed == other._llm.asked[0][1].seed


def test_ends_can_be_switched_off(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder", end_ids=())
    generator.generate([[1]])
    assert generator._llm.asked[0][1].ignore_eos


def test_a_models_weights_go_straight_into_vllm_and_its_tied_head_with_them(fake: type[FakeLLM]) -> None:
    model, tokenizer = trained_model(), Saved()
    generator = VLLMGenerator(model, tokenizer)
    inside = generator._llm.model
    assert generator._llm.settings["load_format"] == "dummy"
    assert generator._llm.settings["model"] == tokenizer.folder == model.config.folder
    assert inside.received == ["model.embed_tokens.weight", "model.layer.weight", "lm_head.weight"]
    assert torch.equal(inside.layer.weight, torch.full((2, 2), 5.0))
    assert generator._llm.num_resets == 1
    generator.close()
    assert not os.path.exists(tokenizer.folder)


def test_a_head_that_is_sent_is_not_sent_twice(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder")
    weights = trained_model().state_dict() | {"lm_head.weight": torch.ones(4, 2)}
    generator.load(weights.items())
    assert generator._llm.model.received.count("lm_head.weight") == 1


def test_a_weight_left_out_is_an_error(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder")
    with pytest.raises(RuntimeError, match=r"missing: layer\.weight"):
        generator.load([("model.embed_tokens.weight", torch.ones(4, 2))])


def test_weights_never_change_under_a_running_request(fake: type[FakeLLM]) -> None:
    generator = VLLMGenerator("folder")
    fake.is_idle = False
    with pytest.raises(RuntimeError, match="still generating"):
        generator.load(trained_model().state_dict().items())


def test_vllm_leaves_the_random_streams_of_training_alone(fake: type[FakeLLM]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(1), random.random()
    torch.manual_seed(1)
    random.seed(1)
    VLLMGenerator("folder", seed=77).generate([[1]])
    assert (torch.rand(1), random.random()) == expected


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_real_vllm_agrees_with_transformers_before_and_after_an_update() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from spear_rl.engines.models.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(["go to the desk and take the mug from it"])
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompts = [[random.Random(seed).randrange(5, len(tokenizer)) for _ in range(10)] for seed in range(6)]
    generator = VLLMGenerator(
        model,
        tokenizer,
        sampling=Sampling(max_new_tokens=12, temperature=0.7),
        dtype=torch.float32,
        gpu_memory_utilization=0.1,
        max_model_len=128,
        max_num_seqs=16,
        options={"enforce_eager": True},
    )

    @torch.no_grad()
    def gap() -> float:
        """Largest difference between vLLM's log-probs and the model's own."""
        worst = 0.0
        for prompt, completion in zip(prompts, generator.generate(prompts), strict=True):
            scores = (model(torch.tensor([prompt + completion.token_ids])).logits[0] / 0.7).log_softmax(-1)
            for at, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                worst = max(worst, abs(float(scores[len(prompt) + at - 1, token]) - logprob))
        return worst

    try:
        # On a GPU float32 matrix products may round their inputs.
        near = 1e-4 if not torch.cuda.is_available() else 2e-2
        assert gap() < near
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
        assert gap() > 10 * near
        generator.load(model.state_dict().items())
        assert gap() < near
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(torch.randn(config.vocab_size, config.hidden_size) * 0.2)
        generator.load(model.named_parameters())  # without the tied head's own name
        assert gap() < near
        assert math.isfinite(gap())
    finally:
        generator.close()
