"""SPEAR inside TRL on two processes: torchrun starts this very file, and each rank leaves behind what it saw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.integrations.trl import SpearGRPOTrainer

WORDS = ["red code ?", "green code 7", "blue code 3", "gold code 1 2 3 4 5 6 7 8 9 0", "look", "right", "wrong"]


def even_share(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Watched(SpearGRPOTrainer):
    """Compares the gradient of the replay term with that of the whole mini-batch on one rank."""

    gap = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.replayed = []

    def _differentiated(self, rows):
        pull, value = super()._differentiated(rows)
        self.replayed.append((rows.input_ids.tolist(), rows.advantages.tolist(), float(value)))
        whole = rows.input_ids, rows.attention, rows.mask.shape[1]
        logprobs = self._get_per_token_logps_and_entropies(self.model, *whole)[0]
        parameters = list(self.model.parameters())
        self.expected = torch.autograd.grad((pull[:-1] * logprobs).sum(), parameters)
        self.policy = [torch.zeros_like(p) for p in parameters]
        return pull, value

    def _compute_loss(self, model, inputs):
        parameters = list(self.model.parameters())
        policy = GRPOTrainer._compute_loss(self, self.model, inputs)
        mine = torch.autograd.grad(policy, parameters)
        loss = super()._compute_loss(model, inputs)
        if self.replayed:
            for total, gradient in zip(self.policy, mine, strict=True):
                total += self.accelerator.reduce(gradient, reduction="mean")
        return loss

    def training_step(self, model, inputs, num_items_in_batch):
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.replayed and self.accelerator.sync_gradients:
            found = [p.grad for p in self.model.parameters()]
            gaps = [(g - p - e).abs().max() for g, p, e in zip(found, self.policy, self.expected, strict=True)]
            self.gap = max(self.gap, *map(float, gaps))
        return loss


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = tiny_tokenizer(WORDS)
    args = GRPOConfig(
        output_dir=str(folder / "run"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        max_steps=4,
        save_strategy="steps",
        save_steps=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    prompts = ["red code ?", "green code ?", "blue code 3 ?", "gold ?"] * 4
    trainer = Watched(
        tiny_model("tiny-xs", tokenizer, seed=0),
        even_share,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        spear={"imitation": 1.0, "fraction": 0.4},  # three rows: one rank has one less in the end
    )
    trainer.train()
    state = {
        "num_processes": trainer.accelerator.num_processes,
        "spear": trainer.spear.state_dict()["imitation"],
        "rng": trainer._rng.getstate(),
        "replayed": trainer.replayed,
        "weights": trainer.model.state_dict(),
        "gradient_gap": trainer.gap,
    }
    torch.save(state, folder / f"rank{trainer.accelerator.process_index}.pt")


@pytest.mark.slow
def test_two_processes_replay_the_same_and_stay_equal(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, str(tmp_path)], env=environment, check=True, timeout=300, capture_output=True)
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert one["num_processes"] == 2
    saved = torch.load(tmp_path / "run" / "checkpoint-4" / "spear.pt", weights_only=True)
    assert one["spear"] == other["spear"] == saved["spear"]["imitation"]
    assert one["rng"] == other["rng"] == saved["rng"]
    assert len(one["replayed"]) >= 3
    assert one["replayed"] == other["replayed"]
    assert one["weights"].keys() == other["weights"].keys()
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    assert one["gradient_gap"] < 1e-6


if __name__ == "__main__":
    main(Path(sys.argv[1]))
