"""CPU milliseconds per sampled token, and a digest of the tokens and log-probabilities, to compare two versions.

    PYTHONPATH=src python benchmarks/generation_cpu.py [--model FOLDER] [--packed] [--repeats 20]

The batch is one of `quickstart`: 64 prompts of 150 tokens, 12 new ones each, which no end token cuts. Run it in turns
with the other version's `src`: a machine's speed drifts. It prints the fastest repeat and the median.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import time
from pathlib import Path

import torch

from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_in_folder
from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.rollout import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a transformers folder; without it the built-in `tiny`")
    parser.add_argument("--packed", action="store_true", help="continuous batching from KV-cache slots, as on a GPU")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model:
        model, tokenizer = model_in_folder(given.model)
    else:
        tokenizer = tiny_tokenizer([" ".join(f"word{number}" for number in range(400))])
        model = tiny_model("tiny", tokenizer)
    sampling, rng = Sampling(max_new_tokens=12), random.Random(0)
    engine = HFEngine(model, tokenizer, sampling=sampling, packed=given.packed, num_slots=given.prompts, end_ids=())
    digest, spent = hashlib.blake2b(digest_size=8), list[float]()
    for _ in range(given.repeats):
        prompts = [[rng.randrange(400) for _ in range(150)] for _ in range(given.prompts)]
        start = time.process_time()
        found = engine.generate(prompts)
        spent.append((time.process_time() - start) / sum(len(c.token_ids) for c in found))
        digest.update(repr([(c.token_ids, c.logprobs) for c in found]).encode())
        engine.sync()
    print(f"CPU ms per token: least {1e3 * min(spent):.4f}, median {1e3 * statistics.median(spent):.4f}", end=", ")
    print(f"tokens and log-probabilities {digest.hexdigest()}")


if __name__ == "__main__":
    main()
