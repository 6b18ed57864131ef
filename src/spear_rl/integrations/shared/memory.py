"""What an algorithm remembers, beside the checkpoint of a framework that trains for it."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import torch

from spear_rl.algorithms import Algorithm
from spear_rl.train.stored_state import restoring, stored_state

FILE = "spear.pt"
"""Buffer, baseline and random states; the schedules follow from the step."""


def save(folder: Path, algorithm: Algorithm, rng: random.Random) -> None:
    """Write it into the folder of a checkpoint, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"algorithm": algorithm.state_dict(), "rng": rng.getstate()}, folder / FILE)


def restore(folder: Path, algorithm: Algorithm, rng: random.Random) -> None:
    """Take it up again; a checkpoint without it is one of a run without self-imitation."""
    if not (folder / FILE).exists():
        logging.getLogger(__name__).warning("%r has no %s: the replay buffer starts empty", str(folder), FILE)
        return
    state = stored_state(folder / FILE)
    with restoring(folder / FILE):
        algorithm.load_state_dict(state["algorithm"])
        rng.setstate(state["rng"])
