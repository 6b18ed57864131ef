"""The training step, the loop around it, checkpoints, evaluation and logging."""
