"""The algorithm's state in a file beside the framework's checkpoint."""

import logging
import random
from pathlib import Path

import torch

from spear_rl.algorithms import Algorithm
from spear_rl.train.stored_state import restoring, stored_state

FILE = "spear.pt"  # replay buffer, baseline and random states; schedules follow from the step


def save(folder: Path, algorithm: Algorithm, rng: random.Random, *, key: str = "algorithm") -> None:
    """Write the state into the folder of a checkpoint; `key` is the algorithm's in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({key: algorithm.state_dict(), "rng": rng.getstate()}, folder / FILE)


def restore(folder: Path, algorithm: Algorithm, rng: random.Random, *, key: str = "algorithm") -> None:
    """Load the state; a checkpoint without it comes from a run without self-imitation."""
    if not (folder / FILE).exists():
        logging.getLogger(__name__).warning("%r has no %s: the replay buffer starts empty", str(folder), FILE)
        return
    state = stored_state(folder / FILE)
    with restoring(folder / FILE):
        algorithm.load_state_dict(state[key])
        rng.setstate(state["rng"])
