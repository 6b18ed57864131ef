"""The number of CPU threads for torch: set, recorded by the run, or the fastest in a short measurement."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from spear_rl.app.config import Config
from spear_rl.io.record import recorded_threads

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SECONDS = 0.6
"""To measure each number of threads."""
_SLICE = 0.05
"""Seconds measured in a row, so that what else the machine does meets all numbers alike."""
_ROWS, _TOKENS = 4, 64
_CLOSE = 1.1
"""Fewer threads are taken if they are at most this many times slower than the fastest."""


def use_threads(config: Config, model: Any, device: torch.device, folder: Path | None) -> None:
    """Set torch's threads to run.threads, or where that is 0 to what the run was begun with, or to the fastest now.

    A number in OMP_NUM_THREADS or MKL_NUM_THREADS is left as it is. Results depend on the number in their last bits,
    so a resume or an evaluation of a run does not measure again.

    Args:
        folder: checkpoint or model of a run, if the policy comes from one.
    """
    number, most = config.run.threads, torch.get_num_threads()
    if not number and not any(map(os.environ.get, _VARIABLES)):
        homes = [] if folder is None else [folder.absolute().parent, folder.absolute().parent.parent]
        number = next(filter(None, map(recorded_threads, homes)), 0)
        if not number and device.type == "cpu" and most > 1 and isinstance(model, torch.nn.Module):
            number = fastest_threads(model, most)
    if number:
        torch.set_num_threads(number)


def fastest_threads(model: Any, most: int) -> int:
    """`most`, a half, a quarter, ... or 1: which number of threads does forward passes of the model fastest."""
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.long)
    candidates = [number for k in range(most.bit_length()) if (number := most >> k)]
    passes, spent = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0.0)
    was_training = model.training
    model.eval()  # no dropout: no random number is drawn
    with torch.inference_mode():
        while min(spent[number] for number in candidates) < _SECONDS:
            for number in candidates:
                torch.set_num_threads(number)
                torch.ones(256, 256) @ torch.ones(256, 256)  # starts the threads
                begin = time.perf_counter()
                while (now := time.perf_counter()) - begin < _SLICE:
                    model(input_ids=ids)
                    passes[number] += 1
                spent[number] += now - begin
            best = min(spent[number] / passes[number] for number in candidates)
            if min(spent.values()) > _SECONDS / 2:
                candidates = [number for number in candidates if spent[number] / passes[number] < 2 * best]
    model.train(was_training)
    return min(number for number in candidates if spent[number] / passes[number] <= _CLOSE * best)
