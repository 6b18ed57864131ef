"""How many tokens the layouts of a turn's prompt cost: in generation, and in an update. No model runs.

    python benchmarks/prompt_tokens.py alfworld-smollm2 [--tasks 4] [--episodes 8] [SETTING ...]

Expert episodes of a preset's tasks, as a policy would see and write them. A prompt's new tokens are those that the
conversation's KV cache does not hold yet; distinct tokens are those that an update feeds, in one micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean

import torch

from spear_rl.app.build.rollout import layout_of, tasks_of
from spear_rl.app.config import load
from spear_rl.engines.models.load import model_by_name
from spear_rl.engines.packed.layout import packed_inputs, row_order
from spear_rl.rollout.collect import demonstration
from spear_rl.rollout.rendering.layouts import LAYOUTS
from spear_rl.rollout.rendering.renderer import ChatRenderer
from spear_rl.train.step import rows
from spear_rl.types import Trajectory


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("preset")
    asked.add_argument("--tasks", type=int, default=4)
    asked.add_argument("--episodes", type=int, default=8, help="of each task")
    asked.add_argument("settings", nargs="*")
    given = asked.parse_args()
    config = load(given.preset, given.settings)
    tasks = tasks_of(config, "train", count=given.tasks)

    def texts() -> list[str]:
        words = [(task.instructions, task.make_env().reset().text) for task in tasks]
        return [text for pair in words for text in pair]

    tokenizer = model_by_name(config.engine.model, texts=texts, seed=0)[1]
    renderer = ChatRenderer(tokenizer)
    print("| layout | turns per episode | prompt | new per turn | rows trained | their tokens | distinct per turn |")
    print("|---|---|---|---|---|---|---|")
    for name in LAYOUTS:
        lay_out = layout_of(load(given.preset, [*given.settings, f"rollout.layout={name}"]))
        played = [
            demonstration(task, renderer=renderer, layout=lay_out, tagged=True, seed=seed)
            for task in tasks
            for seed in range(given.episodes)
        ]
        turns = [turn for episode in played for turn in episode.turns]
        prompt, new = fmean(len(turn.prompt_ids) for turn in turns), fmean(map(num_new, played)) * len(played)
        trained = [row.ids for episode in played for row in rows(episode, [0.0] * len(episode.turns))]
        lengths = torch.tensor([len(ids) for ids in trained])
        print(
            f"| {name} | {len(turns) / len(played):.1f} | {prompt:.0f} | {new / len(turns):.0f} | {len(trained)} "
            f"| {float(lengths.float().mean()):.0f} | {num_distinct(trained, lengths) / len(turns):.0f} |",
            flush=True,
        )


def num_new(episode: Trajectory) -> int:
    """Prompt tokens of an episode that do not repeat the conversation so far."""
    total, known = 0, list[int]()
    for turn in episode.turns:
        same = next((n for n, (a, b) in enumerate(zip(known, turn.prompt_ids, strict=False)) if a != b), None)
        total += len(turn.prompt_ids) - (min(len(known), len(turn.prompt_ids)) if same is None else same)
        known = [*turn.prompt_ids, *turn.completion.token_ids]
    return total


def num_distinct(trained: Sequence[Sequence[int]], lengths: torch.Tensor) -> int:
    """Tokens that rows feed when what they share at their beginning is computed once."""
    width = int(lengths.max())
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in trained])
    order, shared = row_order(ids, lengths, share=True)
    inputs, _ = packed_inputs(ids[order], lengths[order], shared, torch.device("cpu"))
    return int(inputs["input_ids"].numel())


if __name__ == "__main__":
    main()
