"""Training: the run from a resolved config to a folder with checkpoints, metrics and the result."""
