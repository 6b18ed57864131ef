"""Sampling: padded batches, continuous batching, the key-value cache."""
