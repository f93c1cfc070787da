"""Training: the run from a resolved config to a folder with checkpoints, metrics and the result."""

ADAPTER_FOLDER, MODEL_FOLDER = "adapter", "model"
"""Of a run's folder: where its result is."""
