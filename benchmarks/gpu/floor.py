"""The floor under each part: what this machine's own copy and matrix product would take for the work.

Ceilings are measured here and now: a large copy (bytes read and written a second) and a large matrix product. Work is
counted from below: multiplications of the matrices and of causal attention, weights and keys and values read once a
decoding step, the optimizer's state read and written once. Nothing is counted for sampling, softmax, norms or launches.
Of multi-turn rollouts and of whole steps the parts count their own work (`RolloutWork`, `RowWork`), where prefixes that
rows or siblings share count once; the table joins it with the ceilings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from benchmarks.gpu import generation, training
from benchmarks.gpu.machine import dtype_of, median, parser, repeated, report
from benchmarks.gpu.work import RolloutWork, RowWork
from benchmarks.gpu.workload import loaded, rollout_rows


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer, as far as operations and bytes go."""

    num_layers: int
    width: int
    kv_width: int
    """Key (or value) numbers of one token and layer."""
    body: int
    """Parameters beside the embedding."""
    head: int
    """Vocabulary times width."""


def main() -> None:
    asked = parser(__doc__)
    for name in ("batch", "prompt", "new-tokens", "rows"):
        asked.add_argument(f"--{name}", type=int)
    arguments = asked.parse_args()
    for sizes in (generation.SIZES, training.SIZES):
        for name, size in sizes[arguments.device].items():
            if getattr(arguments, name, None) is None:
                setattr(arguments, name, size)
    model, tokenizer = loaded(arguments.model)
    shape = shape_of(model)
    copy, matmul = ceilings(arguments.device)
    rows = rollout_rows(arguments.rows, len(tokenizer), 0, seed=0)
    lengths, trained = rows.attention.sum(1).tolist(), int(rows.mask.sum())
    results = {
        "generation": generation_floor(
            shape, copy, matmul, batch=arguments.batch, prompt=arguments.prompt, new_tokens=arguments.new_tokens
        ),
        "training": training_floor(shape, copy, matmul, lengths=lengths, num_trained=trained),
    }
    report(
        {
            "part": "floor",
            "engine": "floor",
            "ceilings": {"copy_bytes_per_s": copy, "matmul_flops": matmul},
            "shape": asdict(shape),
            "results": results,
        },
        arguments.out,
    )


def shape_of(model: Any) -> Shape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    embedding = model.get_input_embeddings().weight.numel()
    everything = sum(p.numel() for p in model.parameters())
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return Shape(
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        kv_width=kv_heads * head_width,
        body=everything - embedding * (1 if is_tied else 2),
        head=embedding,
    )


def ceilings(device: str) -> tuple[float, float]:
    """Bytes a second of a copy (reads and writes together), operations a second of a matrix product."""
    size, side = (2**31, 8192) if device == "cuda" else (2**26, 1024)
    dtype = dtype_of(device)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    _, copied = repeated(lambda _: target.copy_(source), device, num_warmups=3, num_repeats=10)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    _, multiplied = repeated(lambda _: a @ b, device, num_warmups=3, num_repeats=10)
    return 2 * size / median(copied), 2 * side**3 / median(multiplied)


def generation_floor(
    shape: Shape, copy: float, matmul: float, *, batch: int, prompt: int, new_tokens: int, width: int = 2
) -> dict[str, float]:
    """Seconds and tokens per second if every phase ran at the ceiling that binds it; `width` is bytes per number."""
    kv_bytes = 2 * shape.num_layers * shape.kv_width * width
    weights = (shape.body + shape.head) * width
    attention = 2 * shape.num_layers * shape.width
    prefill = max(
        (2 * shape.body * batch * prompt + attention * batch * prompt**2 + 2 * shape.head * batch) / matmul,
        (weights + kv_bytes * batch * prompt) / copy,
    )
    decode = 0.0
    for position in range(1, new_tokens):
        length = prompt + position
        operations = 2 * (shape.body + shape.head) * batch + 2 * attention * batch * length
        decode += max(operations / matmul, (weights + kv_bytes * batch * length) / copy)
    total = prefill + decode
    return {"seconds": total, "prefill_s": prefill, "decode_s": decode, "tokens_per_s": batch * new_tokens / total}


def training_floor(
    shape: Shape, copy: float, matmul: float, *, lengths: list[int], num_trained: int
) -> dict[str, float]:
    """Forward and backward of every real token, the head of trained ones only, and AdamW with float32 masters."""
    tokens = sum(lengths)
    forward = 2 * shape.body * tokens + 2 * shape.num_layers * shape.width * sum(n * n for n in lengths)
    forward += 2 * shape.head * num_trained
    parameters = shape.body + shape.head
    # master, two moments: read and written (24 bytes); gradient: read (2); bfloat16 weight: written (2).
    optimizer = parameters * 28 / copy
    total = 3 * forward / matmul + optimizer
    return {"seconds": total, "optimizer_s": optimizer, "tokens_per_s": tokens / total}


def seconds_of_rollout(shape: Shape, copy: float, matmul: float, work: RolloutWork, *, width: int = 2) -> float:
    """Lower bound of the time: all multiplications at one ceiling, at the same time all reads at the other."""
    operations = 2 * shape.body * work.computed + 2 * shape.head * work.sampled
    operations += 4 * shape.num_layers * shape.width * work.attended
    kv_bytes = 2 * shape.num_layers * shape.kv_width * width
    return max(operations / matmul, (work.steps * (shape.body + shape.head) * width + kv_bytes * work.keys_read) / copy)


def seconds_of_update(shape: Shape, copy: float, matmul: float, work: RowWork) -> float:
    """As `training_floor`, of rows that may share their beginnings."""
    forward = 2 * shape.body * work.tokens + 4 * shape.num_layers * shape.width * work.attended
    forward += 2 * shape.head * work.trained
    return 3 * forward / matmul + (shape.body + shape.head) * 28 / copy


if __name__ == "__main__":
    main()
