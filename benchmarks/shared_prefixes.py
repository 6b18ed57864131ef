"""Seconds and peak memory of one update with and without shared prefixes, on rows as `rollout.layout=log` leaves them.

Each turn of an episode is a row: the group's first prompt, a log that grows per turn, a short suffix, the answer. The
model is SmolLM2-135M's shape with random weights, or a transformers folder; on a CPU a tiny one and few rows.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spear_rl.engines.base import Batch, Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_in_folder
from spear_rl.engines.models.tiny import tiny_tokenizer
from spear_rl.functional import clipped_surrogate

SHAPES: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "cpu": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    asked.add_argument("--model", type=Path, help="a transformers folder")
    asked.add_argument("--episodes", type=int)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument(
        "--rows", default="all", choices=["all", "turns", "episodes"],
        help="all, or a quarter as a mini-batch would have it: of the turns, or of the episodes",
    )  # fmt: skip
    sizes = {"group-size": 8, "turns": 16, "first": 350, "log": 30, "suffix": 5, "answer": 12}
    for name, size in sizes.items():
        asked.add_argument(f"--{name}", type=int, default=size)
    arguments = asked.parse_args()
    arguments.episodes = arguments.episodes or (128 if arguments.device == "cuda" else 8)
    for share in (False, True):
        print(measured(arguments, share=share), flush=True)


def measured(arguments: argparse.Namespace, *, share: bool) -> str:
    """One line about one engine, which is gone afterwards."""
    is_gpu = arguments.device == "cuda"
    if arguments.model:
        model, tokenizer = model_in_folder(arguments.model)
    else:
        torch.manual_seed(0)
        model, tokenizer = LlamaForCausalLM(LlamaConfig(**SHAPES[arguments.device])), tiny_tokenizer(["a b c"])
    options: dict[str, Any] = {"micro_batch_tokens": None, "max_kept_tokens": None} if is_gpu else {}
    dtype = torch.bfloat16 if is_gpu else torch.float32
    engine = HFEngine(
        model, tokenizer, device=arguments.device, dtype=dtype, packed=True, share_prefixes=share, **options
    )
    batch = chosen_rows(log_rows(arguments, model.config.vocab_size), arguments.rows, arguments.turns)
    parts = engine._micro_batches(batch)
    tokens, num_parts = sum(part.model_inputs["input_ids"].numel() for part in parts), len(parts)
    del parts
    taken = []
    for number in range(1 + arguments.repeats):
        if number == 1 and is_gpu:  # the first update compiles
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        engine.update([Term("policy", batch, clipped_surrogate)])  # its metrics wait for the device
        taken.append(time.perf_counter() - start)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if is_gpu else ""
    del engine, model
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return (
        f"{'shared' if share else 'separate'}: {len(batch.input_ids)} rows, {tokens} tokens fed in {num_parts} "
        f"micro-batches, {statistics.median(taken[1:]):.3f} s per update (first {taken[0]:.1f} s){peak}"
    )


def chosen_rows(batch: Batch, which: str, turns: int) -> Batch:
    """All rows, or a random quarter of them, or all of a random quarter of the episodes."""
    if which == "all":
        return batch
    together = turns if which == "episodes" else 1
    begins = range(0, len(batch.input_ids), together)
    drawn = random.Random(1).sample(begins, len(begins) // 4)
    return batch.rows(torch.tensor([begin + turn for begin in drawn for turn in range(together)]))


def log_rows(sizes: argparse.Namespace, vocabulary: int) -> Batch:
    """Random tokens in the shape of episodes; an answer's tokens are trained."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    rows, suffix = [], text(sizes.suffix)
    for _ in range(max(sizes.episodes // sizes.group_size, 1)):
        opening = text(sizes.first)
        for _ in range(sizes.group_size):
            log = opening
            for _ in range(sizes.turns):
                rows.append([*log, *suffix, *text(sizes.answer)])
                log = log + text(sizes.log)
    lengths, width = torch.tensor([len(row) for row in rows]), max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    is_real = torch.arange(width) < lengths[:, None]
    mask = is_real & (torch.arange(width) >= lengths[:, None] - sizes.answer)
    return Batch(ids, is_real, mask, torch.full(ids.shape, -10.0), torch.randn(ids.shape))


if __name__ == "__main__":
    main()
