"""Training: real tokens per second and peak memory of one optimizer step over rows as rollouts leave them.

All cut the rows into micro-batches of the same number of tokens, padding included where there is padding, and count
only real tokens. `ours` keeps no activations between the forward and the backward pass of a mini-batch and computes
twice; `ours-roomy` keeps as many as the memory allows, with micro-batches to match, which is what it does when not
told otherwise. The plain one is what a page of transformers code does: rows padded to the longest of their
micro-batch, logits of all tokens, float32 log-softmax, AdamW. `plain` keeps weights and optimizer in bfloat16 (fast,
small, loses small updates); `plain-mixed` keeps them in float32 and computes in bfloat16 by autocast, as ours does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from benchmarks.gpu.machine import dtype_of, median, parser, peak_gib, repeated, report, sized
from benchmarks.gpu.workload import engine_of, loaded, rollout_rows

from spear_rl.algorithms import BASES
from spear_rl.engines.base import Batch, Term
from spear_rl.functional.losses import LossInputs

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"rows": 1024, "micro_batch_tokens": 32768, "repeats": 4, "warmups": 2},
    "cpu": {"rows": 12, "micro_batch_tokens": 2048, "repeats": 2, "warmups": 1},
}
LEARNING_RATE = 1e-6


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--engine", choices=["ours", "ours-roomy", "plain", "plain-mixed"], default="ours")
    for name in ("rows", "micro-batch-tokens", "repeats", "warmups"):
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--option", action="append", default=[], help="KEY=VALUE for our engine")
    arguments = sized(asked.parse_args(), SIZES)
    model, tokenizer = loaded(arguments.model)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    batches = [rollout_rows(arguments.rows, len(tokenizer), pad_id, seed) for seed in range(2)]
    update = plain(model, arguments) if "plain" in arguments.engine else ours(model, tokenizer, arguments)

    first, taken = repeated(
        lambda number: update(batches[number % 2]),
        arguments.device,
        num_warmups=arguments.warmups,
        num_repeats=arguments.repeats,
    )
    tokens = sum(int(batch.attention.sum()) for batch in batches) / 2
    trained = sum(int(batch.mask.sum()) for batch in batches) / 2
    report(
        {
            "part": "training",
            "engine": arguments.engine,
            "sizes": {name: getattr(arguments, name) for name in SIZES["cuda"]}
            | {"tokens": tokens, "trained": trained},
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
                logits = model(input_ids=ids, attention_mask=attention.long(), use_cache=False).logits
            scores = logits[:, :-1].float().log_softmax(-1)
            picked = scores.gather(-1, ids[:, 1:, None]).squeeze(-1)
            logprobs = torch.cat([torch.zeros_like(picked[:, :1]), picked], 1)
            loss = policy_loss(LossInputs(logprobs, old, advantages, mask)).loss
            (loss * mask.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


if __name__ == "__main__":
    main()
