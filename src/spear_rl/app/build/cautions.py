"""Warnings about a run that will not learn: from its settings before it starts, and from its first steps."""

import math
from collections.abc import Sequence
from pathlib import Path

from spear_rl.app.config import Config
from spear_rl.engines.models.tiny import FROM_SCRATCH, TINY_VISION
from spear_rl.train.callbacks import Callback, Event
from spear_rl.train.checkpoint import MANIFEST

LEAST_RATE, LEAST_SFT_RATE, LEAST_UPDATES = 1e-4, 1e-3, 100
"""Below these, random weights do not learn to act within a run; rates for pre-trained models are far lower."""
STEPS = 5
"""Steps without any reward after which a run warns."""


def cautions(config: Config, *, with_rl: bool = True) -> list[str]:
    """One sentence for each setting that has no effect or cannot work with a model from scratch; RL's if it follows."""
    model, optim, sft = config.engine.model, config.optim, config.sft
    useless = _without_effect(config) if with_rl else []
    if model not in FROM_SCRATCH:
        return useless
    updates = math.ceil(sft.episodes / sft.batch_size) * sft.epochs
    faults = []
    if with_rl and 0 < optim.learning_rate < LEAST_RATE:
        faults.append(f"optim.learning_rate={optim.learning_rate:g} is too small for it: set about 1e-3")
    if sft.episodes and sft.learning_rate < LEAST_SFT_RATE:
        faults.append(f"sft.learning_rate={sft.learning_rate:g} is too small for it: set about 4e-3")
    if 0 < updates < LEAST_UPDATES:
        few = f"sft.episodes={sft.episodes} makes {updates} update{'s' * (updates != 1)}, too few for it"
        faults.append(f"{few}: set sft.episodes=2000 and sft.batch_size=4")
    if not sft.episodes:
        faults.append("without a cold start it says nothing that an environment understands: set sft.episodes=2000")
    begins = f"warning: engine.model={model} begins with random weights, and"
    preset = "sokoban-vision-tiny" if model == TINY_VISION else "tiny"
    return [*useless, *(f"{begins} {fault}, or begin with the preset {preset}" for fault in faults)]


def _without_effect(config: Config) -> list[str]:
    """One sentence for each switch that another setting leaves nothing to do."""
    rollout, faults = config.rollout, []
    if config.algorithm.imitation.join_lost and not rollout.return_share:
        rarely = "a task with a stored win is rarely played again while tasks do not return"
        faults.append(f"algorithm.imitation.join_lost=true: {rarely}: set rollout.return_share, e.g. to 0.25")
    if rollout.restart_share and rollout.num_tasks == 1:
        always = "one group of a step always begins at the start"
        faults.append(f"rollout.restart_share={rollout.restart_share:g}: {always}: set rollout.num_tasks to 2 or more")
    return [f"warning: {fault}" for fault in faults]


def cold_start(config: Config) -> str:
    """How a run with sft.episodes=0 can get a cold start, as part of an advice."""
    is_trained = (Path(config.engine.model) / MANIFEST).is_file()  # a checkpoint, or what `spear sft` wrote
    return "an engine.model of a longer cold start" if is_trained else "a cold start (sft.episodes)"


def longer_cold_start(config: Config) -> str:
    """How a run can get more demonstrations, as part of an advice."""
    own = config.sft.episodes
    return f"raise sft.episodes (it is {own})" if own else f"begin with {cold_start(config)}"


class RewardWatch:
    """A callback that warns once if the first steps brought no success and rewards that are all the same."""

    def __init__(self, config: Config, callbacks: Sequence[Callback]) -> None:
        self._callbacks, self._num_steps, self._num_episodes, self._reward = callbacks, 0, 0.0, math.nan
        self._advice = "make its tasks easier, or its expert better"
        if not config.sft.episodes:
            self._advice = f"begin with {cold_start(config)} on an expert's episodes, or with easier tasks"

    def __call__(self, event: Event) -> None:
        if event.kind != "step" or self._num_steps >= STEPS or not event.metrics:
            return
        reward = event.metrics["rollout/reward"]
        is_same = math.isnan(self._reward) or math.isclose(reward, self._reward, rel_tol=1e-9, abs_tol=1e-12)
        if event.metrics["rollout/success"] > 0 or not is_same:
            self._num_steps = STEPS  # there is something to learn from
            return
        self._num_steps, self._reward = self._num_steps + 1, reward
        self._num_episodes += event.metrics["rollout/episodes"]
        if self._num_steps == STEPS:
            seen = f"the first {STEPS} steps ({self._num_episodes:.0f} episodes) saw no success and one reward for all"
            text = f"warning: {seen}, so there is nothing to learn from yet: {self._advice}"
            for callback in self._callbacks:
                callback(Event("note", event.step, text=text))
