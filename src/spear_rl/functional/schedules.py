"""Coefficients that change over training, by their own name; the code is in `losses`."""

from spear_rl.functional.losses import Constant, Cosine, Schedule, as_schedule, constant, cosine

__all__ = ["Constant", "Cosine", "Schedule", "as_schedule", "constant", "cosine"]
