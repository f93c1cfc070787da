"""A checkpoint opened through its family, and the programs that are planned from it."""

from .adapter import AppliedAdapter
from .binding import FrozenWeights, initial_values
from .loaded import LoadedModel
from .programs import TooLarge, TrainPlan, cached_program, evaluation_bytes, loss_program, training_program

__all__ = [
    "AppliedAdapter", "FrozenWeights", "LoadedModel", "TooLarge", "TrainPlan", "cached_program", "evaluation_bytes",
    "initial_values", "loss_program", "training_program",
]
