"""Training: real tokens per second and peak memory of one optimizer step over rows as rollouts leave them.

All cut the rows into micro-batches of the same number of tokens, padding included where there is padding, and count
only real tokens. `ours` keeps no activations between the forward and the backward pass of a mini-batch and computes
twice; `ours-roomy` keeps as many as the memory allows, with micro-batches to match, which is what it does when not
told otherwise. The plain one is what a page of transformers code does: rows padded to the longest of their
micro-batch, logits of all tokens, float32 log-softmax, AdamW. `plain` keeps weights and optimizer in bfloat16 (fast,
small, loses small updates) and uses scaled_dot_product_attention with a mask; `plain-flash` uses the package
flash-attn, or, where it is missing, PyTorch's own flash kernel, which takes no mask: rows padded on the right need
none. `plain-mixed` keeps weights in float32 and computes in bfloat16 by autocast, as ours does. `trl` is the update of
TRL's GRPOTrainer (bfloat16 weights, rows of the same micro-batches), given the rows by a rollout_func; its time is that
of a step without the rollout_func. With --layout log rows share prefixes as an episode's turns do; all count the tokens
of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from benchmarks.gpu.machine import (
    dtype_of,
    forget_peak,
    median,
    parser,
    peak_gib,
    repeated,
    report,
    sized,
    synchronize,
)
from benchmarks.gpu.work import row_work
from benchmarks.gpu.workload import engine_of, loaded, log_rows, rollout_rows

from spear_rl.algorithms import BASES
from spear_rl.engines.base import Batch, Term
from spear_rl.functional.losses import LossInputs

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"rows": 1024, "micro_batch_tokens": 32768, "repeats": 4, "warmups": 2, "layout": "turns"},
    "cpu": {"rows": 12, "micro_batch_tokens": 2048, "repeats": 2, "warmups": 1, "layout": "turns"},
}
LEARNING_RATE = 1e-6


def main() -> None:
    asked = parser(__doc__)
    engines = ["ours", "ours-roomy", "plain", "plain-flash", "plain-mixed", "trl"]
    asked.add_argument("--engine", choices=engines, default="ours")
    asked.add_argument("--layout", choices=["turns", "log"], help="rows without shared prefixes, or with them")
    for name in ("rows", "micro-batch-tokens", "repeats", "warmups"):
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--option", action="append", default=[], help="KEY=VALUE for our engine")
    arguments = sized(asked.parse_args(), SIZES)
    model, tokenizer = loaded(arguments.model)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    batches = [rows_of(arguments, len(tokenizer), pad_id, seed) for seed in range(2)]
    if arguments.engine == "trl":
        taken = trl(model, tokenizer, batches, arguments)
        first, taken = taken[0], taken[arguments.warmups :]
    else:
        update = plain(model, arguments) if "plain" in arguments.engine else ours(model, tokenizer, arguments)
        first, taken = repeated(
            lambda number: update(batches[number % 2]),
            arguments.device,
            num_warmups=arguments.warmups,
            num_repeats=arguments.repeats,
        )
    tokens = sum(int(batch.attention.sum()) for batch in batches) / 2
    trained = sum(int(batch.mask.sum()) for batch in batches) / 2
    ids = [row[real].tolist() for row, real in zip(batches[0].input_ids, batches[0].attention, strict=True)]
    whole, distinct = (row_work(ids, int(batches[0].mask.sum()), share=share) for share in (False, True))
    report(
        {
            "part": "training",
            "engine": arguments.engine,
            "sizes": {name: getattr(arguments, name) for name in SIZES["cuda"]}
            | {"tokens": tokens, "trained": trained},
            "work": asdict(whole),
            "distinct": asdict(distinct),
            "results": {
                arguments.engine: {
                    "tokens_per_s": tokens / median(taken),
                    "seconds": taken,
                    "first_call_s": first,
                    "peak_gib": peak_gib(arguments.device),
                }
            },
        },
        arguments.out,
    )


def rows_of(arguments: Any, vocabulary: int, pad_id: int, seed: int) -> Batch:
    if arguments.layout == "turns":
        return rollout_rows(arguments.rows, vocabulary, pad_id, seed)
    return log_rows(max(arguments.rows // 16, 1), vocabulary, pad_id, seed, turns=min(arguments.rows, 16))


def ours(model: Any, tokenizer: Any, arguments: Any) -> Callable[[Batch], Any]:
    engine = engine_of(
        model,
        tokenizer,
        arguments.device,
        arguments.option,
        learning_rate=LEARNING_RATE,
        micro_batch_tokens=arguments.micro_batch_tokens if arguments.engine == "ours" else None,
        max_kept_tokens=0 if arguments.engine == "ours" else None,
    )
    loss = BASES["grpo"]().loss
    return lambda batch: engine.update([Term("policy", batch, loss)])


def plain(model: Any, arguments: Any) -> Callable[[Batch], Any]:
    device, is_mixed = arguments.device, arguments.engine == "plain-mixed"
    model = model.to(device, torch.float32 if is_mixed else dtype_of(device)).train()
    has_package, is_flash = find_spec("flash_attn") is not None, arguments.engine == "plain-flash"
    model.set_attn_implementation("flash_attention_2" if is_flash and has_package else "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device == "cuda")
    policy_loss = BASES["grpo"]().loss

    def update(batch: Batch) -> None:
        lengths = batch.attention.sum(1)
        per_piece = max(arguments.micro_batch_tokens // int(lengths.max()), 1)
        total = batch.mask.sum().to(device)
        for rows in torch.arange(len(batch)).split(per_piece):
            width = int(lengths[rows].max())
            ids, attention, mask, old, advantages = (
                x[rows, :width].to(device)
                for x in (batch.input_ids, batch.attention, batch.mask, batch.old_logprobs, batch.advantages)
            )
            autocast = torch.autocast(device, torch.bfloat16) if is_mixed and device == "cuda" else nullcontext()
            with autocast:
                seen = None if is_flash and not has_package else attention.long()
                logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits
            scores = logits[:, :-1].float().log_softmax(-1)
            picked = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
            logprobs = torch.cat([torch.zeros_like(picked[:, :1]), picked], 1)
            loss = policy_loss(LossInputs(logprobs, old, advantages, mask)).loss
            (loss * mask.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def trl(model: Any, tokenizer: Any, batches: list[Batch], arguments: Any) -> list[float]:
    """Seconds of each update of GRPOTrainer over the batches in turn."""
    import os
    import tempfile
    import time

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    count, widest = len(batches[0]), int(max(batch.attention.sum(1).max() for batch in batches))
    wanted = max(arguments.micro_batch_tokens // widest, 1)
    per_piece = next(size for size in range(min(wanted, count), 0, -1) if count % size == 0)
    clock: dict[str, Any] = {"calls": 0, "rollout": 0.0, "seconds": []}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        start = time.perf_counter()
        batch = batches[clock["calls"] % len(batches)]
        clock["calls"] += 1
        prompt_ids, answers = [], []
        for ids, attention, mask in zip(batch.input_ids, batch.attention, batch.mask, strict=True):
            prompt_ids.append(ids[attention & ~mask].tolist())
            answers.append(ids[mask].tolist())
        clock["rollout"] = time.perf_counter() - start
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": answers,
            "logprobs": None,
            "coin": [0.0, 1.0] * (count // 2),
        }

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize(arguments.device)
            if len(clock["seconds"]) == arguments.warmups:
                forget_peak(arguments.device)
            clock["start"] = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(arguments.device)
            clock["seconds"].append(time.perf_counter() - clock["start"] - clock["rollout"])

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model.to(dtype_of(arguments.device)),
            reward_funcs=lambda completions, coin, **others: coin,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=per_piece,
                gradient_accumulation_steps=count // per_piece,
                num_generations=2,
                max_steps=arguments.warmups + arguments.repeats,
                learning_rate=LEARNING_RATE,
                beta=0.0,
                max_completion_length=64,
                bf16=False,
                use_cpu=arguments.device == "cpu",
                gradient_checkpointing=False,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": str(number)} for number in range(count)]),
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[Clock()],
        )
        trainer.train()
    return list(clock["seconds"])


if __name__ == "__main__":
    main()
