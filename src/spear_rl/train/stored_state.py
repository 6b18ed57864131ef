"""Reads a trainer's state from a file: tensors, numbers, strings and lists of them. Nothing in it is executed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spear_rl.errors import CheckpointError


def stored_state(path: Path) -> dict[str, Any]:
    """What `torch.save` wrote; CheckpointError if it is damaged or holds more than plain values."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zip or tensors
        raise CheckpointError(
            f"{path} is not loaded: it is damaged or holds more than plain values, which could run code "
            f"({type(error).__name__}); take another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds no state of a trainer; take another checkpoint")
    return state


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn an error in the block, caused by the content of a state file, into one that names the file."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} does not fit this run ({type(error).__name__}: {error}); take another checkpoint"
        ) from error
