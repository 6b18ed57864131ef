"""Attention over rows without padding, its GPU kernels, and the check against the model's own attention."""
