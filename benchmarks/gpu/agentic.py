"""Multi-turn rollouts as agents make them: prompts of ALFWorld's lengths, 128 episodes in groups, prefix reuse on.

Every episode is a growing conversation: a first prompt that its group shares, then per turn an answer of a few tokens
and an observation. Lengths are drawn from a seed and are the same for everybody; an observation does not depend on the
answer, so everybody has the same work whatever is sampled. Nothing ends an answer but its length. Both return
log-probabilities and go on with an episode as soon as its answer is there (continuous batching); nothing of an earlier
rollout may be reused, as after an update. Tokens per second count sampled tokens only. vLLM has CUDA graphs, prefix
caching and asynchronous scheduling, as it has by default; `vllm` runs it inside this process, as a trainer that shares
the GPU does, and `vllm-process` in a process of its own, which is its default.
"""

from __future__ import annotations

import ast
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.machine import median, parser, peak_gib, repeated, report, sized
from benchmarks.gpu.work import RolloutWork, rollout_work

from spear_rl.types import ShortPrompt

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"episodes": 128, "siblings": 8, "turns": 20, "first": 350, "repeats": 3, "warmups": 2, "seed": 0},
    "cpu": {"episodes": 4, "siblings": 2, "turns": 3, "first": 40, "repeats": 2, "warmups": 1, "seed": 0},
}
ANSWER, OBSERVATION = (8, 24), (25, 70)
"""Fewest and most tokens per turn."""


@dataclass
class Episode:
    """The work of one episode, and how far it is."""

    ids: list[int]
    answers: list[int]
    """Tokens to sample per turn."""
    observations: list[list[int]]
    turn: int = 0

    def prompt(self) -> ShortPrompt:
        return ShortPrompt(self.ids, (), self.answers[self.turn])

    def answered(self, token_ids: list[int]) -> bool:
        """Go on with an answer; False after the last turn."""
        if len(token_ids) != self.answers[self.turn]:
            raise RuntimeError(f"an answer has {len(token_ids)} tokens instead of {self.answers[self.turn]}")
        self.ids = [*self.ids, *token_ids, *self.observations[self.turn]]
        self.turn += 1
        return self.turn < len(self.answers)


def episodes_of(arguments: Any, vocabulary: int, number: int) -> list[Episode]:
    """The work of the rollout with this number."""
    rng, lowest = random.Random(f"{arguments.seed}/{number}"), min(300, vocabulary // 2)

    def text(length: int) -> list[int]:
        return [rng.randrange(lowest, vocabulary) for _ in range(length)]

    found = []
    for _ in range(arguments.episodes // arguments.siblings):
        opening = text(arguments.first + rng.randint(0, arguments.first // 4))
        for _ in range(arguments.siblings):
            answers = [rng.randint(*ANSWER) for _ in range(arguments.turns)]
            found.append(Episode(opening, answers, [text(rng.randint(*OBSERVATION)) for _ in answers]))
    return found


def work_of(episodes: list[Episode], siblings: int) -> RolloutWork:
    """The work of episodes that have not been played yet."""
    turns = [list(zip(e.answers, map(len, e.observations), strict=True)) for e in episodes]
    return rollout_work((len(episodes[at].ids), turns[at : at + siblings]) for at in range(0, len(episodes), siblings))


Rollout = Callable[[list[Episode]], None]


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--engine", choices=["ours", "vllm", "vllm-process"], default="ours")
    for name in SIZES["cuda"]:
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--option", action="append", default=[], help="KEY=VALUE for our engine or for vLLM's LLM")
    arguments = sized(asked.parse_args(), SIZES)
    results: dict[str, Any] = {}
    size = {name: getattr(arguments, name) for name in SIZES["cuda"]}
    for name, (play, vocabulary) in (ours if arguments.engine == "ours" else vllm)(arguments):
        numbers = range(arguments.warmups + arguments.repeats)
        rollouts = [episodes_of(arguments, vocabulary, number) for number in numbers]  # not a part of the time
        last = rollouts[-1]
        size |= {"tokens": sum(sum(episode.answers) for episode in last)}
        work = work_of(last, arguments.siblings)

        def once(number: int, play: Rollout = play, rollouts: list[list[Episode]] = rollouts) -> None:
            play(rollouts[number])

        try:
            first, taken = repeated(
                once, arguments.device, num_warmups=arguments.warmups, num_repeats=arguments.repeats
            )
        except Exception as error:  # another version of vLLM may be driven otherwise: the rest still counts
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        size |= {"longest": max(len(episode.ids) for episode in last)}
        results[name] = {
            "tokens_per_s": size["tokens"] / median(taken),
            "turns_per_s": arguments.episodes * arguments.turns / median(taken),
            "seconds": median(taken),
            "all_s": taken,
            "first_call_s": first,
            "peak_gib": peak_gib(arguments.device) if arguments.engine != "vllm-process" else None,
        }
        told = {"part": "agentic", "engine": arguments.engine, "sizes": size, "work": asdict(work)}
        report(told | {"results": results}, arguments.out)
    if all("error" in result for result in results.values()):
        sys.exit("; ".join(f"{name}: {result['error']}" for name, result in results.items()))


def longest(arguments: Any) -> int:
    """No conversation has more tokens."""
    first, turns = int(arguments.first), int(arguments.turns)
    return first * 5 // 4 + turns * (ANSWER[1] + OBSERVATION[1]) + 2


def ours(arguments: Any) -> Iterator[tuple[str, tuple[Rollout, int]]]:
    from benchmarks.gpu.workload import engine_of, loaded

    from spear_rl.rollout.generator import Sampling

    model, tokenizer = loaded(arguments.model)
    slots = {"num_slots": arguments.episodes, "slot_tokens": longest(arguments)}
    engine = engine_of(
        model,
        tokenizer,
        arguments.device,
        arguments.option,
        sampling=Sampling(max_new_tokens=ANSWER[1]),
        end_ids=(),
        **(slots if arguments.device == "cuda" else {}),
    )

    def play(episodes: list[Episode]) -> None:
        engine.sync()
        stream = engine.stream()
        for key, episode in enumerate(episodes):
            stream.add(key, episode.prompt())
        while finished := stream.finished():
            for key, completion in finished:
                if episodes[key].answered(completion.token_ids):
                    stream.add(key, episodes[key].prompt())

    yield "ours", (play, len(tokenizer))


def vllm(arguments: Any) -> Iterator[tuple[str, tuple[Rollout, int]]]:
    import os

    is_apart = arguments.engine == "vllm-process"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(is_apart))
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork may not use CUDA
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    options = {key: ast.literal_eval(value) for key, _, value in (o.partition("=") for o in arguments.option)}
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": longest(arguments),
        "max_num_seqs": arguments.episodes,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
    }
    llm = LLM(model=arguments.model, **(settings | options))
    vocabulary = len(AutoTokenizer.from_pretrained(arguments.model))

    def params(limit: int) -> Any:
        final = RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            temperature=1.0, max_tokens=limit, ignore_eos=True, detokenize=False, logprobs=0, output_kind=final
        )

    def inputs(episode: Episode) -> Any:
        return {"prompt_token_ids": list(episode.ids)}

    def continuous(episodes: list[Episode]) -> None:
        llm.reset_prefix_cache()
        engine = llm.llm_engine

        def add(key: int) -> None:
            episode = episodes[key]
            engine.add_request(f"{key}/{episode.turn}", inputs(episode), params(episode.answers[episode.turn]))

        for key in range(len(episodes)):
            add(key)
        while engine.has_unfinished_requests():
            for output in engine.step():
                key = int(output.request_id.partition("/")[0])
                if output.finished and episodes[key].answered(list(output.outputs[0].token_ids)):
                    add(key)

    def lockstep(episodes: list[Episode]) -> None:
        """Turn by turn, all episodes at once: what one call of `LLM.generate` per turn gives."""
        llm.reset_prefix_cache()
        for turn in range(arguments.turns):
            outputs = llm.generate(
                [inputs(e) for e in episodes], [params(e.answers[turn]) for e in episodes], use_tqdm=False
            )
            for episode, output in zip(episodes, outputs, strict=True):
                episode.answered(list(output.outputs[0].token_ids))

    yield arguments.engine, (continuous, vocabulary)
    if not is_apart:
        yield "vllm, turn by turn", (lockstep, vocabulary)


if __name__ == "__main__":
    main()
