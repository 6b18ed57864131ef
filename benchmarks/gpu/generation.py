"""Tokens a second of generation: distinct prompts of one length, the same number of new tokens each, temperature 1.

Ours returns log-probabilities with the tokens; transformers and the first number of vLLM do not, which is in their
favour. vLLM is also measured with them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.machine import dtype_of, median, parser, peak_gib, repeated, report, sized

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"batch": 256, "prompt": 256, "new_tokens": 48, "repeats": 5, "warmups": 2},
    "cpu": {"batch": 8, "prompt": 32, "new_tokens": 8, "repeats": 2, "warmups": 1},
}

GenerateFn = Callable[[Sequence[list[int]]], list[int]]
"""Prompts in, the number of new tokens of each out."""


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--engine", choices=sorted(ENGINES), default="ours")
    for name in ("batch", "prompt", "new-tokens", "repeats", "warmups"):
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--option", action="append", default=[], help="KEY=VALUE for our engine or for vLLM's LLM")
    arguments = sized(asked.parse_args(), SIZES)
    results: dict[str, Any] = {}
    for name, generate in ENGINES[arguments.engine](arguments).items():
        numbers = range(arguments.warmups + arguments.repeats)
        prompts = [random_prompts(arguments.batch, arguments.prompt, arguments.vocabulary, seed=n) for n in numbers]

        def once(number: int, generate: GenerateFn = generate, prompts: list[list[list[int]]] = prompts) -> None:
            lengths = generate(prompts[number])
            if lengths != [arguments.new_tokens] * arguments.batch:
                raise RuntimeError(f"not every prompt got {arguments.new_tokens} tokens: {sorted(set(lengths))}")

        first, taken = repeated(once, arguments.device, num_warmups=arguments.warmups, num_repeats=arguments.repeats)
        tokens = arguments.batch * arguments.new_tokens
        results[name] = {
            "tokens_per_s": tokens / median(taken),
            "seconds": taken,
            "first_call_s": first,
            "peak_gib": peak_gib(arguments.device),
        }
    size = {name: getattr(arguments, name) for name in SIZES["cuda"]}
    report({"part": "generation", "engine": arguments.engine, "sizes": size, "results": results}, arguments.out)


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts that share nothing, new ones for every seed, so that no cache of prefixes helps anybody."""
    rng = random.Random(seed)
    return [[rng.randrange(min(300, vocabulary // 2), vocabulary) for _ in range(length)] for _ in range(count)]


def ours(arguments: Any) -> dict[str, GenerateFn]:
    from benchmarks.gpu.workload import engine_of, loaded

    from spear_rl.rollout.generator import Sampling

    model, tokenizer = loaded(arguments.model)
    arguments.vocabulary = len(tokenizer)
    engine = engine_of(
        model,
        tokenizer,
        arguments.device,
        arguments.option,
        sampling=Sampling(max_new_tokens=arguments.new_tokens),
        end_ids=(),
        **({"num_slots": arguments.batch} if arguments.device == "cuda" else {}),
    )

    def generate(prompts: Sequence[list[int]]) -> list[int]:
        engine.sync()  # as after an update: nothing of the last call may be reused
        return [len(completion.token_ids) for completion in engine.generate(prompts)]

    return {"ours": generate}


def transformers(arguments: Any, *, cache: str) -> dict[str, GenerateFn]:
    from benchmarks.gpu.workload import loaded
    from transformers import GenerationConfig

    model, tokenizer = loaded(arguments.model)
    arguments.vocabulary = len(tokenizer)
    model = model.to(arguments.device, dtype_of(arguments.device)).eval()
    model.config.eos_token_id = None  # or generate takes it up again
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=arguments.new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=None if cache == "dynamic" else cache,
    )
    model.generation_config = settings

    @torch.inference_mode()
    def generate(prompts: Sequence[list[int]]) -> list[int]:
        ids = torch.tensor(list(prompts), device=arguments.device)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return [len(row) - ids.shape[1] for row in out.tolist()]

    return {f"transformers {cache} cache": generate}


def vllm(arguments: Any) -> dict[str, GenerateFn]:
    import os

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    options = {key: ast.literal_eval(value) for key, _, value in (o.partition("=") for o in arguments.option)}
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": arguments.prompt + arguments.new_tokens,
        "max_num_seqs": arguments.batch,
        "gpu_memory_utilization": 0.5,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
    }
    llm = LLM(model=arguments.model, **(settings | options))
    arguments.vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def generate(prompts: Sequence[list[int]], logprobs: int | None) -> list[int]:
        sampling = SamplingParams(
            temperature=1.0, max_tokens=arguments.new_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return {"vllm": partial(generate, logprobs=None), "vllm with log-probs": partial(generate, logprobs=0)}


ENGINES: dict[str, Callable[[Any], dict[str, GenerateFn]]] = {
    "ours": ours,
    "transformers": partial(transformers, cache="dynamic"),
    "transformers-static": partial(transformers, cache="static"),
    "vllm": vllm,
}


if __name__ == "__main__":
    main()
