"""Covariance clipping (arXiv 2505.22617), by its own name; the code is in `losses`."""

from spear_rl.functional.losses import CovarianceClip, high_covariance_penalty, keep_low_covariance, token_covariance

__all__ = ["CovarianceClip", "high_covariance_penalty", "keep_low_covariance", "token_covariance"]
