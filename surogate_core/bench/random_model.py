"""A model of random weights that is at hand in seconds, whatever its size.

Every tensor is a piece, beginning where its name says, of one block in which some millions of random normal numbers go
round. So 16 GB of weights cost a block; random bits all the same, because matrix units draw less power, and run faster, on
zeros.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..dsl.module import Parameter
from ..model import LoadedModel
from ..weights.formats import data_shape, format_of
from ..weights.quants import quantize
from ..weights.tensor import StoredTensor

NUMBERS = (1 << 22) - 96
"""Random numbers that are drawn. Not a multiple of a row, so that rows differ."""
BLOCK = 1 << 26
"""Elements of the block, at most: larger tensors are copies of it end to end, smaller ones are views."""


class RandomWeights:
    """Stands for a store and its name map: `load` gives any parameter that the model declares, in ``dtype``; vectors and
    parameters without a spread in fp32."""

    def __init__(self, parameters: Mapping[str, Parameter], dtype: str, seed: int) -> None:
        self.parameters, self.dtype, self.seed = parameters, dtype, seed
        largest = max(math.prod(p.shape) for p in parameters.values())
        self.block_size = min(BLOCK, 2 << largest.bit_length())
        self._blocks: dict[float, np.ndarray] = {}

    def load(self, store: Any, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Parameter ``name``. KeyError for one that the model does not declare."""
        spread = self.parameters[name].init_std
        if not spread or len(shape) < 2:
            return StoredTensor(name, "f32", shape, np.full(shape, 1.0 if spread is None else 0.0, np.float32))
        block, form = self._block(spread), format_of(self.dtype)
        unit = form.block_bytes if form.is_block else 1
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        wanted = data_shape(self.dtype, shape)
        count = math.prod(wanted)
        room = len(block) - count if count <= len(block) else len(block) // 2
        start = int.from_bytes(digest[:8], "little") % (room // unit + 1) * unit
        return StoredTensor(name, self.dtype, shape, _tiled(block, start, count).reshape(wanted))

    def _block(self, spread: float) -> np.ndarray:
        if spread not in self._blocks:
            generator = np.random.Generator(np.random.SFC64([self.seed, 7]))
            form = format_of(self.dtype)
            count = min(NUMBERS, self.block_size) // form.block * form.block
            numbers = quantize(generator.standard_normal(count, np.float32) * np.float32(spread), self.dtype)
            self._blocks[spread] = _tiled(numbers, 0, math.prod(data_shape(self.dtype, (self.block_size,))))
        return self._blocks[spread]


def _tiled(block: np.ndarray, start: int, count: int) -> np.ndarray:
    """``count`` elements of the endless repetition of ``block`` from ``start`` on; a view where one block has them all."""
    if start + count <= len(block):
        return block[start:start + count]
    result = np.empty(count, block.dtype)
    at = 0
    while at < count:
        piece = block[start:start + count - at]
        result[at:at + len(piece)] = piece
        at, start = at + len(piece), 0
    return result


def random_model(config: Mapping[str, Any], families: Iterable[Any], dtype: str = "bf16", seed: int = 0) -> LoadedModel:
    """A model of this config.json whose checkpoint is random. WeightError where no installed family reads it."""
    model = LoadedModel.from_architecture(config, families)
    weights = RandomWeights(dict(model.dsl().parameters()), dtype, seed)
    return LoadedModel(model.family, model.hyperparameters, weights, weights)
