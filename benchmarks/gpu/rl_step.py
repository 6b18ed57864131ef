"""A whole RL step on `household` (easy): play every task by a group of siblings, learn from it, one optimizer step.

Everybody plays the same environments with the same model, growing conversations, turn and token limits. A task's own
reward would be 0 for an untrained model, and nothing to learn from is no work: episodes are paid by a coin that their
own text tosses. `base` is GRPO, `spear` is GRPO with SPEAR's replay, and `trl` is TRL's GRPOTrainer with a rollout_func
that plays through transformers' generate and keeps its weights in bfloat16 (its fastest setting; ours keeps float32
masters). `trl-vllm` is the same with vLLM colocated, all living episodes in one call per turn. `verl` is verl's own
synchronous trainer with vLLM; our agent loop plays the same tasks there, and verl looks for finished episodes every
tenth of a second instead of every two seconds. Nobody does a forward pass for importance weights: the sampler's
log-probabilities are the old ones (TRL takes the first forward pass of the update). An update is a step without its
rollout. The table shows the turns and tokens of each (verl's log counts observations with the answers, so its tokens
are in the JSON only).
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.machine import dtype_of, forget_peak, median, parser, peak_gib, report, sized, synchronize
from benchmarks.gpu.work import rollout_work, row_work
from benchmarks.gpu.workload import engine_of, loaded

from spear_rl.envs import ENVIRONMENTS
from spear_rl.rollout.env import Environment, Observation, StepResult, Task
from spear_rl.rollout.generator import Sampling

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"tasks": 16, "siblings": 8, "turns": 10, "new_tokens": 32, "steps": 5, "warmups": 3, "trl_rows": 0},
    "cpu": {"tasks": 2, "siblings": 2, "turns": 2, "new_tokens": 6, "steps": 2, "warmups": 1, "trl_rows": 2},
}
LEARNING_RATE = 1e-6
STOP = "</action>"
MAX_CONTEXT = 2048
Steps = list[dict[str, float]]


class CoinEnv:
    """An environment whose last turn pays 1 or 0 by a coin that the episode's own words toss."""

    def __init__(self, make_env: Any, num_turns: int) -> None:
        self._env: Environment = make_env()
        self._num_left, self._toss = num_turns, 0

    def reset(self) -> Observation:
        return self._env.reset()

    def step(self, action: str) -> StepResult:
        self._num_left -= 1
        self._toss = zlib.crc32(action.encode(), self._toss)
        result = self._env.step(action)
        is_last = result.done or self._num_left == 0
        return replace(result, reward=float(self._toss & 1) if is_last else 0.0, done=is_last)

    def close(self) -> None:
        self._env.close()


def coin_env(task: Task, num_turns: int) -> CoinEnv:
    return CoinEnv(task.make_env, num_turns)


def coin_tasks(split: str = "train", *, turns: int = 10, max_tasks: int = 64) -> list[Task]:
    """The panel of `task.env=benchmarks.gpu.rl_step:coin_tasks`."""
    panel = ENVIRONMENTS["household"](split, level="easy")[:max_tasks]
    return [replace(task, make_env=partial(coin_env, task, turns)) for task in panel]


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--engine", choices=["base", "spear", "trl", "trl-vllm", "verl"], default="base")
    for name in ("tasks", "siblings", "turns", "new-tokens", "steps", "warmups"):
        asked.add_argument(f"--{name}", type=int)
    asked.add_argument("--trl-rows", type=int, help="of one of TRL's micro-batches; 0 goes by the model's size")
    asked.add_argument("--trl-weights", choices=["bf16", "fp32"], default="bf16", help="fp32 computes by autocast")
    asked.add_argument("--vllm-memory", type=float, default=0.3, help="share of the GPU for TRL's and verl's vLLM")
    asked.add_argument("--option", action="append", default=[], help="KEY=VALUE for our engine, or for verl")
    arguments = sized(asked.parse_args(), SIZES)
    tasks = coin_tasks(turns=arguments.turns, max_tasks=arguments.tasks * 4)
    if arguments.engine == "trl" and arguments.device == "cuda":
        arguments.steps, arguments.warmups = 2, 1  # a step takes it long, and it compiles nothing

    def keep(steps: Steps, **known: Any) -> None:
        """Write what there is, so that a run cut short tells of the steps it made."""
        if len(steps) > arguments.warmups:
            told = {"part": "rl_step", "engine": arguments.engine} | {"sizes": sizes_of(arguments)}
            told["work"] = known.pop("work", None)
            report(told | {"results": {arguments.engine: summary(steps, arguments) | known}}, arguments.out)

    {"trl": trl, "trl-vllm": trl, "verl": verl}.get(arguments.engine, ours)(tasks, arguments, keep)


def sizes_of(arguments: Any) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in SIZES["cuda"]}


def ours(tasks: Sequence[Task], arguments: Any, keep: Callable[..., None]) -> None:
    from spear_rl.algorithms import OURS, grpo, spear
    from spear_rl.rollout.collect import collect_groups
    from spear_rl.rollout.rendering.renderer import ChatRenderer
    from spear_rl.train.step import train_step

    model, tokenizer = loaded(arguments.model)
    engine = engine_of(
        model,
        tokenizer,
        arguments.device,
        arguments.option,
        sampling=Sampling(max_new_tokens=arguments.new_tokens, stop=(STOP,)),
        learning_rate=LEARNING_RATE,
        micro_batch_tokens=None,
        max_kept_tokens=None,
        **({"num_slots": arguments.tasks * arguments.siblings} if arguments.device == "cuda" else {}),
    )
    algorithm = grpo()
    if arguments.engine == "spear":
        # As presets replay; a model that knows no action has no other turns than invalid ones.
        algorithm = spear(algorithm, **OURS | {"fraction": 0.25, "skip_invalid": False})
    renderer, rng, played = ChatRenderer(tokenizer), random.Random(0), list[Any]()

    def collect(step: int) -> Any:
        groups = collect_groups(
            [tasks[(step * arguments.tasks + number) % len(tasks)] for number in range(arguments.tasks)],
            group_size=arguments.siblings,
            generator=engine,
            renderer=renderer,
            max_turns=arguments.turns,
            step=step,
            max_context=MAX_CONTEXT,
        )
        played[:] = groups
        return groups

    steps: Steps = []
    for step in range(arguments.warmups + arguments.steps):
        if step == arguments.warmups:
            forget_peak(arguments.device)
        synchronize(arguments.device)
        start = time.perf_counter()
        metrics = train_step(step, collect=collect, algorithm=algorithm, engine=engine, rng=rng)
        synchronize(arguments.device)
        taken = time.perf_counter() - start
        steps.append(
            {
                "seconds": taken,
                "rollout_s": metrics["time/rollout"],
                "update_s": taken - metrics["time/rollout"],
                "optimizer_s": metrics["time/update"],
                "turns": metrics["rollout/turns"] * metrics["rollout/episodes"],
                "tokens": metrics["rollout/tokens"],
                "flat_groups": metrics["rollout/flat_groups"],
                "replayed": metrics.get("replay/trajectories", 0.0),
            }
        )
        keep(steps, work=work_of(played))


def work_of(groups: Sequence[Any]) -> dict[str, Any]:
    """What cannot be left out of a step with these episodes; siblings share their first prompt."""
    shapes, rows, trained = [], [], 0
    for group in groups:
        if not group.trajectories:
            continue
        episodes = []
        for trajectory in group.trajectories:
            prompts = [len(turn.prompt_ids) for turn in trajectory.turns]
            answers = [len(turn.completion.token_ids) for turn in trajectory.turns]
            ends = [*prompts[1:], prompts[-1] + answers[-1]]
            episodes.append([(a, e - p - a) for p, a, e in zip(prompts, answers, ends, strict=True)])
            rows.append([*trajectory.turns[-1].prompt_ids, *trajectory.turns[-1].completion.token_ids])
            trained += sum(answers)
        shapes.append((len(group.trajectories[0].turns[0].prompt_ids), episodes))
    return {"rollout": asdict(rollout_work(shapes)), "rows": asdict(row_work(rows, trained, share=True))}


def trl(tasks: Sequence[Task], arguments: Any, keep: Callable[..., None]) -> None:
    import os
    import tempfile

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from transformers import GenerationConfig, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import unwrap_model_for_generation

    from spear_rl.rollout.rendering.renderer import ChatRenderer

    model, tokenizer = loaded(arguments.model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    is_mixed = arguments.device == "cuda" and arguments.trl_weights == "fp32"
    model = model.to(torch.float32 if is_mixed else dtype_of(arguments.device))
    renderer, by_id = ChatRenderer(tokenizer), {task.id: task for task in tasks}
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=arguments.new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        stop_strings=[STOP],
    )
    num_episodes, counts = arguments.tasks * arguments.siblings, dict[str, float]()
    millions = model.num_parameters() / 1e6
    wanted = arguments.trl_rows or (16 if millions < 300 else 8 if millions < 1000 else 4)
    arguments.trl_rows = next(size for size in range(min(wanted, num_episodes), 0, -1) if num_episodes % size == 0)
    with_vllm = arguments.engine == "trl-vllm"
    if with_vllm:
        model.name_or_path = arguments.model  # where TRL's vLLM reads it

    def from_transformers(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        batch = batch.to(trainer.accelerator.device)
        with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as unwrapped:
            out = unwrapped.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=settings,
                tokenizer=tokenizer,
            )
        return [_without_padding(row, tokenizer) for row in out[:, batch["input_ids"].shape[1] :].tolist()]

    def from_vllm(prompts: list[list[int]], trainer: Any) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0,
            max_tokens=arguments.new_tokens,
            stop=[STOP],
            include_stop_str_in_output=True,
            logprobs=0,
        )
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = trainer.vllm_generation.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Play every episode turn by turn, all living ones in one padded batch."""
        start = time.perf_counter()
        envs = [by_id[prompt].make_env() for prompt in prompts]
        observations = [env.reset() for env in envs]
        texts = [_shown(by_id[p].instructions, o) for p, o in zip(prompts, observations, strict=True)]
        opening = [renderer.prompt([{"role": "user", "content": text}]) for text in texts]
        ids = [list(prompt) for prompt in opening]
        masks: list[list[int]] = [[] for _ in prompts]
        rewards, living = [0.0] * len(prompts), list(range(len(prompts)))
        turns = tokens = 0
        while living:
            answers = (from_vllm if with_vllm else from_transformers)([ids[i] for i in living], trainer)
            for i, said in zip(list(living), answers, strict=True):
                turns, tokens = turns + 1, tokens + len(said)
                result = envs[i].step(renderer.parse(said))
                rewards[i] += result.reward
                masks[i] += [1] * len(said)
                following = renderer.extended(ids[i], said, _shown("", result.observation))
                if result.done or len(following) > MAX_CONTEXT:
                    ids[i] = [*ids[i], *said]
                    living.remove(i)
                else:
                    masks[i] += [0] * (len(following) - len(ids[i]) - len(said))
                    ids[i] = following
        counts.update(turns=float(turns), tokens=float(tokens), rollout_s=time.perf_counter() - start)
        return {
            "prompt_ids": opening,
            "completion_ids": [all_ids[len(prompt) :] for all_ids, prompt in zip(ids, opening, strict=True)],
            "logprobs": None,
            "env_mask": masks,
            "coin": rewards,
        }

    class Clock(TrainerCallback):  # type: ignore[misc]
        steps: Steps = []  # noqa: RUF012

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize(arguments.device)
            if len(self.steps) == arguments.warmups:
                forget_peak(arguments.device)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(arguments.device)
            taken = time.perf_counter() - self.start
            self.steps.append({"seconds": taken, "update_s": taken - counts["rollout_s"], "replayed": 0.0} | counts)
            keep(self.steps)

    vllm_settings: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": arguments.vllm_memory,
        "vllm_max_model_length": MAX_CONTEXT + arguments.new_tokens,
        "vllm_importance_sampling_correction": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, coin, **others: coin,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=arguments.trl_rows,
                gradient_accumulation_steps=num_episodes // arguments.trl_rows,
                num_generations=arguments.siblings,
                max_steps=arguments.warmups + arguments.steps,
                learning_rate=LEARNING_RATE,
                beta=0.0,
                temperature=1.0,
                max_completion_length=arguments.turns * 512,
                bf16=is_mixed,
                use_cpu=arguments.device == "cpu",
                gradient_checkpointing=False,  # with it on, generate would lose its key-value cache
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                **(vllm_settings if with_vllm else {}),
            ),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in tasks]),
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[Clock()],
        )
        trainer.train()


def verl(tasks: Sequence[Task], arguments: Any, keep: Callable[..., None]) -> None:
    """Runs `spear verl` with verl's own trainer in a process group of its own, and reads its log."""
    import os
    import signal
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    from benchmarks.in_verl.__main__ import steps_of

    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(root), str(root / "src")]))
    own = {"VERL_USE_EXTERNAL_MODULES": "spear_rl.integrations.verl.trainer,benchmarks.in_verl.same_answers"}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # through the finally below
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log, known = Path(folder) / "log", 0
        with log.open("w") as out:
            process = subprocess.Popen(
                verl_command(arguments, folder),
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | own | {"PYTHONPATH": path},
                cwd=root,
                start_new_session=True,
            )
            try:
                while (code := process.poll()) is None:
                    time.sleep(2)
                    is_whole = log.read_bytes().endswith(b"\n")  # no line is half written
                    if is_whole and len(found := steps_of(log)) > known:
                        known = len(found)
                        _keep_verls(found, arguments, keep)
            finally:
                for how in (signal.SIGTERM, signal.SIGKILL):
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, how)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(8)
                if sys.exc_info()[0]:
                    print(log.read_text("utf-8", errors="replace")[-6000:])
        text, found = log.read_text("utf-8", errors="replace"), steps_of(log)
    _keep_verls(found, arguments, keep)
    if code or len(found) < arguments.warmups + arguments.steps:
        print(text[-6000:])
        last = text.strip().splitlines()[-1] if text.strip() else ""
        raise RuntimeError(f"verl ended with code {code} after {len(found)} steps: {last}")


def _keep_verls(found: Sequence[dict[str, float]], arguments: Any, keep: Callable[..., None]) -> None:
    """Keep the steps that verl's log tells of."""
    episodes = arguments.tasks * arguments.siblings
    steps = [
        {
            "seconds": step["timing_s/step"],
            "rollout_s": step.get("timing_s/gen", 0.0),
            "update_s": step["timing_s/step"] - step.get("timing_s/gen", 0.0),
            "turns": step.get("num_turns/mean", 0.0) * episodes,
            "response_tokens": step.get("response_length/mean", 0.0) * episodes,  # observations included
            "replayed": 0.0,
            "old_log_prob_s": step.get("timing_s/old_log_prob", 0.0),
            "update_actor_s": step.get("timing_s/update_actor", 0.0),
        }
        for step in found
    ]
    if found:
        peak = max(step.get("perf/max_memory_allocated_gb", 0.0) for step in found)
        keep(steps, trainer_peak_gib=peak, peak_gib=None, last_metrics=found[-1])


def verl_command(arguments: Any, folder: str) -> list[str]:
    """`spear verl` on the same tasks, its settings for one GPU made fast.

    That is bfloat16, CUDA graphs, a larger KV cache, as many workers for agents as by default, and no forward pass for
    the old log-probabilities.
    """
    import sys
    from importlib.util import find_spec
    from pathlib import Path

    text = (Path(__file__).parents[1] / "in_verl" / "one_gpu.txt").read_text("utf-8")
    theirs = dict(line.split("=", 1) for line in text.split())
    theirs |= {
        "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16",
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "False",
        "actor_rollout_ref.rollout.enforce_eager": "False",
        "actor_rollout_ref.rollout.agent.num_workers": str(min(8, arguments.tasks)),
        "algorithm.rollout_correction.bypass_mode": "True",
        "actor_rollout_ref.rollout.max_num_seqs": str(max(arguments.tasks * arguments.siblings, 128)),
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": "16000000000",
        "trainer.v1.trainer_mode": "sync",
    }
    if find_spec("flash_attn") is not None:
        del theirs["+actor_rollout_ref.model.override_config.attn_implementation"]
        theirs["actor_rollout_ref.model.use_remove_padding"] = "True"
    theirs |= dict(option.split("=", 1) for option in arguments.option)
    ours = {
        "task.env": "benchmarks.gpu.rl_step:coin_tasks",
        "task.options.turns": arguments.turns,
        "task.options.max_tasks": arguments.tasks * 4,
        "engine.model": str(Path(arguments.model).absolute()),
        "engine.vllm_memory": arguments.vllm_memory,
        "rollout.num_tasks": arguments.tasks,
        "rollout.group_size": arguments.siblings,
        "rollout.max_turns": arguments.turns,
        "rollout.max_new_tokens": arguments.new_tokens,
        "rollout.max_context": MAX_CONTEXT,
        "rollout.stop": f'["{STOP}"]',
        "rollout.layout": "chat",
        "algorithm.name": "grpo",
        "algorithm.invalid_penalty": 0,
        "optim.learning_rate": LEARNING_RATE,
        "sft.episodes": 0,
        "eval.tasks": 0,
        "eval.every": 0,
        "run.steps": arguments.warmups + arguments.steps,
        "run.checkpoint_every": 1_000_000,
        "run.dir": f"{folder}/run",
    }
    words = [f"{key}={value}" for key, value in ours.items()]
    return [sys.executable, "-m", "spear_rl.cli", "verl", *words, "--", *(f"{k}={v}" for k, v in theirs.items())]


def _shown(instructions: str, observation: Observation) -> str:
    """The text `growing_chat` shows."""
    choices = "Possible actions: " + "; ".join(observation.choices)
    shown = f"{observation.text}\n{choices}" if observation.choices else observation.text
    return f"{instructions}\n\n{shown}" if instructions else shown


def _without_padding(row: list[int], tokenizer: Any) -> list[int]:
    """What was sampled: up to the first end token, or to the padding behind a stop string."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    first = next((at for at, token in enumerate(row) if token in ends), len(row))
    return row[: first + 1] if first < len(row) and row[first] == tokenizer.eos_token_id else row[:first]


def summary(steps: list[dict[str, float]], arguments: Any) -> dict[str, Any]:
    measured = steps[arguments.warmups :]
    medians = {name: median([step[name] for step in measured]) for name in measured[0]}
    return medians | {"first_step_s": steps[0]["seconds"], "peak_gib": peak_gib(arguments.device), "steps": steps}


if __name__ == "__main__":
    main()
