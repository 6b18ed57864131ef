"""What is measured: the model, our engine over it, rows of the lengths real rollouts have."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from benchmarks.gpu.machine import RANDOM, dtype_of

from spear_rl.engines.base import Batch
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_by_name
from spear_rl.envs import ENVIRONMENTS


def loaded(name: str) -> tuple[Any, Any]:
    """(model in float32, tokenizer); of RANDOM in bfloat16."""
    if name in RANDOM:
        model = random_model(name)
        return model, random_tokenizer(model.config.vocab_size)
    return model_by_name(name, texts=_texts, seed=0)


def random_model(name: str) -> Any:
    """A model of a known shape with random weights: as fast as the real one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=32768, dtype=torch.bfloat16, **RANDOM[name]
    )
    return Qwen2ForCausalLM._from_config(config)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_tokenizer(size: int) -> Any:
    """`size` tokens, all of them with a text: random weights write any number, and no text would be no episode.

    Of the class that transformers takes for a Qwen2 model whatever its folder names, so that it is read as it was.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import Qwen2Tokenizer

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(_texts(), vocab_size=2048, min_frequency=2, show_progress=False)
    known = json.loads(trained.to_str())["model"]
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    words = known["vocab"] | {f"\u0120q{number}z": number for number in range(len(known["vocab"]), size - len(special))}
    tokenizer = Qwen2Tokenizer(
        vocab=words,
        merges=[tuple(pair) for pair in known["merges"]],
        unk_token=special[0],
        pad_token=special[0],
        eos_token=special[1],
        extra_special_tokens=special[2:],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def _texts() -> list[str]:
    """What the tiny model's tokenizer takes its words from."""
    texts: list[str] = []
    for task in ENVIRONMENTS["household"]("train", level="easy")[:20]:
        env = task.make_env()
        observation = env.reset()
        texts += [task.instructions, observation.text, *observation.choices]
    return texts


def engine_of(model: Any, tokenizer: Any, device: str, options: Sequence[str], **given: Any) -> HFEngine:
    """Our engine as a user of that device would make it; `options` are KEY=VALUE of the command line."""
    asked = {key: ast.literal_eval(value) for key, _, value in (option.partition("=") for option in options)}
    place: dict[str, Any] = {"device": "cuda", "dtype": dtype_of(device)} if device == "cuda" else {}
    return HFEngine(model, tokenizer, **(place | given | asked))


def log_rows(episodes: int, vocabulary: int, pad_id: int, seed: int, *, siblings: int = 8, turns: int = 16) -> Batch:
    """Turns as `rollout.layout=log` leaves them: the group's first prompt, a growing log, a short end, the answer."""
    rng, lowest = random.Random(seed), min(300, vocabulary // 2)

    def text(length: int) -> list[int]:
        return [rng.randrange(lowest, vocabulary) for _ in range(length)]

    rows, end = [], text(5)
    for _ in range(max(episodes // siblings, 1)):
        opening = text(350)
        for _ in range(min(siblings, episodes)):
            log = opening
            for _ in range(turns):
                rows.append([*log, *end, *text(12)])
                log = log + text(30)
    lengths, width = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
    is_real = torch.arange(width) < lengths[:, None]
    mask = is_real & (torch.arange(width) >= lengths[:, None] - 12)
    advantages = torch.tensor([[rng.choice([-1.0, 1.0])] for _ in rows]).expand(ids.shape) * mask
    return Batch(ids, is_real, mask, torch.full(ids.shape, -9.0) * mask, advantages)


def rollout_rows(count: int, vocabulary: int, pad_id: int, seed: int) -> Batch:
    """Independent turns as an ALFWorld rollout leaves them: 270 to 390 tokens of prompt, 8 to 20 of answer."""
    rng, lowest = random.Random(seed), min(300, vocabulary // 2)
    prompts = [rng.randint(270, 390) for _ in range(count)]
    answers = [rng.randint(8, 20) for _ in range(count)]
    width = max(p + a for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((count, width), pad_id)
    attention, mask = (torch.zeros(count, width, dtype=torch.bool) for _ in range(2))
    advantages = torch.zeros(count, width)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, : prompt + answer] = torch.tensor([rng.randrange(lowest, vocabulary) for _ in range(prompt + answer)])
        attention[row, : prompt + answer] = True
        mask[row, prompt : prompt + answer] = True
        advantages[row, prompt : prompt + answer] = rng.choice([-1.0, 1.0])
    return Batch(ids, attention, mask, torch.full((count, width), -9.0) * mask, advantages)
