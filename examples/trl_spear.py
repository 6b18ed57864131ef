"""SPEAR in TRL, start to end on a CPU in a minute or two: a tiny agent learns to open a drawer before it answers.

    pip install 'spear-rl[trl]'
    python examples/trl_spear.py            # with SPEAR
    python examples/trl_spear.py --off      # the same script, plain GRPOTrainer

Each task hides a digit that only the tool `open_drawer` shows. The model starts from clumsy demonstrations,
most of which guess. With a real model everything between the two lines of dashes goes: a pretrained one calls tools.
"""

from __future__ import annotations

import argparse
import random

import torch
from datasets import Dataset
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_template

from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.functional import cosine
from spear_rl.integrations.trl import SpearGRPOTrainer, tool_bonus

QUESTION = [{"role": "user", "content": "Which digit?"}]
CALL = {"type": "function", "function": {"name": "open_drawer", "arguments": {}}}


class Drawer:
    """The environment: its public methods are the tools."""

    def reset(self, digit: int, **_: object) -> None:
        self.digit = digit

    def open_drawer(self) -> str:
        """Show the digit."""
        return f"digit {self.digit}"


def right_digit(completions, digit, **_):
    """The task's own reward: 1 where the last message is the hidden digit."""
    return [float(chat[-1].get("content", "").strip() == str(d)) for chat, d in zip(completions, digit, strict=True)]


# ---------------------------------------------------------------- a model from scratch that has seen a tool call

# Qwen's format, without the page that explains the tools to a model that can read.
CHAT_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501


def demonstration(rng: random.Random) -> list[dict]:
    digit, uses_tool = str(rng.randrange(10)), rng.random() < 0.3
    opened = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": f"digit {digit}"}]
    return [*QUESTION, *(opened if uses_tool else []), {"role": "assistant", "content": digit}]


def tiny_agent(rng: random.Random):
    texts = [
        "Which digit? digit 0 1 2 3 4 5 6 7 8 9 user assistant tool",
        '<tool_call>{"name": "open_drawer", "arguments"',
    ]
    tokenizer = tiny_tokenizer([*texts, CHAT_TEMPLATE])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, qwen3_template
    model = tiny_model("tiny-xs", tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        chats = [demonstration(rng) for _ in range(16)]
        batch = tokenizer.apply_chat_template(chats, padding=True, return_dict=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


# ---------------------------------------------------------------- the TRL script


def main(off: bool, steps: int) -> None:
    torch.set_num_threads(1)  # nothing here is big enough for two
    rng = random.Random(0)
    model, tokenizer = tiny_agent(rng)
    tasks = Dataset.from_list([{"prompt": QUESTION, "digit": rng.randrange(10)} for _ in range(256)])
    args = GRPOConfig(
        output_dir="runs/trl_spear",
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=96,
        max_tool_calling_iterations=2,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = SpearGRPOTrainer(
        model,
        [right_digit] if off else [right_digit, tool_bonus(cosine(1, 0, 20))],
        args=args,
        train_dataset=tasks,
        processing_class=tokenizer,
        environment_factory=Drawer,
        spear=None if off else {"imitation": cosine(0, 1, 10)},
    )
    trainer.train()
    rewards = [entry["rewards/right_digit/mean"] for entry in trainer.state.log_history if "loss" in entry]
    print("right answers, every fifth step:", [round(reward, 2) for reward in rewards])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--off", action="store_true", help="plain GRPOTrainer: no bonus, no self-imitation")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    main(given.off, given.steps)
