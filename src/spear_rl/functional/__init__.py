"""Pure functions on tensors. Imports torch and nothing else of this package."""

from spear_rl.functional.advantages import discounted_returns, gigpo, group_relative, leave_one_out, recalibrate
from spear_rl.functional.covariance import high_covariance_penalty, keep_low_covariance, token_covariance
from spear_rl.functional.inputs import (
    LossFn,
    LossInputs,
    LossOutput,
    Reduce,
    fixed_length_mean,
    sequence_mean,
    token_mean,
)
from spear_rl.functional.losses import clipped_surrogate, reference_kl
from spear_rl.functional.schedules import Constant, Cosine, Schedule, as_schedule, constant, cosine

__all__ = [
    "Constant",
    "Cosine",
    "LossFn",
    "LossInputs",
    "LossOutput",
    "Reduce",
    "Schedule",
    "as_schedule",
    "clipped_surrogate",
    "constant",
    "cosine",
    "discounted_returns",
    "fixed_length_mean",
    "gigpo",
    "group_relative",
    "high_covariance_penalty",
    "keep_low_covariance",
    "leave_one_out",
    "recalibrate",
    "reference_kl",
    "sequence_mean",
    "token_covariance",
    "token_mean",
]
