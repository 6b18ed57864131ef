"""CPU time of rendering prompts: per training step of two presets, and per prompt of long episodes with SmolLM2's
tokenizer. The digest covers every prompt's token ids, so two versions of the renderer can be compared.

python -m benchmarks.rendering_speed
"""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from spear_rl.app.config import load
from spear_rl.app.train import train_from
from spear_rl.engines.models.load import model_in_folder
from spear_rl.engines.models.smollm2 import smollm2
from spear_rl.envs import ENVIRONMENTS
from spear_rl.rollout import LAYOUTS, ChatRenderer, collect_groups
from spear_rl.train.callbacks import Event
from spear_rl.types import Completion


class TimedRenderer:
    """While entered, adds up the CPU time of ChatRenderer's methods and hashes what they return."""

    METHODS = ("prompt", "extended", "answer", "parse")

    def __enter__(self) -> TimedRenderer:
        self.seconds, self.num_prompts, self._hash = 0.0, 0, hashlib.sha256()
        self._plain = {name: getattr(ChatRenderer, name) for name in self.METHODS}
        for name, method in self._plain.items():
            setattr(ChatRenderer, name, self._timed(name, method))
        return self

    def __exit__(self, *_: object) -> None:
        for name, method in self._plain.items():
            setattr(ChatRenderer, name, method)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:12]

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.thread_time()
            result = method(*arguments)
            self.seconds += time.thread_time() - start
            self.num_prompts += name in ("prompt", "extended")
            self._hash.update(repr(result).encode())
            return result

        return timed


def measure_preset(name: str, *, steps: int, episodes: int) -> None:
    """The share of rendering in the steps of a short run, without its cold start."""
    marks: list[tuple[float, float]] = []
    with TimedRenderer() as renderer, tempfile.TemporaryDirectory() as folder:

        def mark(event: Event) -> None:
            if event.kind == "step":
                marks.append((time.process_time(), renderer.seconds))

        settings = [f"run.dir={folder}/run", f"run.steps={steps}", "run.threads=1"]
        settings += [f"sft.episodes={episodes}", "eval.tasks=0"]
        train_from(load(name, settings), [mark])
    (begin, rendered_before), (end, rendered) = marks[0], marks[-1]
    step_ms, render_ms = (1000 * span / (steps - 1) for span in (end - begin, rendered - rendered_before))
    share = 100 * render_ms / step_ms
    print(f"{name}: {render_ms:.1f} ms of {step_ms:.0f} ms per step ({share:.1f} %), digest {renderer.digest}")


class RandomPlayer:
    """Takes one of a few actions at random, each after a thought of 40 words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._rng = tokenizer, random.Random(0)

    def generate(self, prompts: Sequence[list[int]]) -> list[Completion]:
        return [self._completion() for _ in prompts]

    def _completion(self) -> Completion:
        thought = " ".join(self._rng.choice(["shelf", "mug", "desk", "then", "look", "maybe"]) for _ in range(40))
        action = self._rng.choice(["look", "go to shelf 1", "inventory"])
        ids = self._tokenizer.encode(f"<think>{thought}</think><action>{action}</action>", add_special_tokens=False)
        return Completion(ids, [0.0] * len(ids))


def measure_long_episodes() -> None:
    """Household episodes of 30 turns with SmolLM2's tokenizer; no model is run."""
    _, tokenizer = smollm2(model_in_folder)
    tasks = ENVIRONMENTS["household"]("train", level="hard")[:16]
    for name in ("chat", "turns", "log"):
        with TimedRenderer() as renderer:
            collect_groups(
                tasks,
                group_size=4,
                generator=RandomPlayer(tokenizer),
                renderer=ChatRenderer(tokenizer),
                max_turns=30,
                step=0,
                layout=LAYOUTS[name],
            )
        each = 1e6 * renderer.seconds / renderer.num_prompts
        print(f"30 turns, layout {name}: {each:.0f} us per prompt, {renderer.num_prompts} prompts, {renderer.digest}")


if __name__ == "__main__":
    measure_preset("lookup", steps=10, episodes=320)
    measure_preset("quickstart", steps=5, episodes=500)
    measure_long_episodes()
