"""How a model family is written: modules that compose ops on symbolic tensors, traced once into a graph."""

from .attention import Attention
from .family import Family, Hyperparameters
from .mlp import GatedMLP
from .model import Model, trace
from .module import Module, Stack
from .layers import Embedding, LMHead, Linear, RMSNorm, Scalar
from .rope import RopeSpec, rope_table
from .tensor import Context, Tensor

__all__ = [
    "Attention", "Context", "Embedding", "Family", "GatedMLP", "Hyperparameters", "LMHead", "Linear", "Model", "Module",
    "RMSNorm", "RopeSpec", "Scalar", "Stack", "Tensor", "rope_table", "trace",
]
