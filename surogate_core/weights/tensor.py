"""Tensors on their way between files and programs: those that lie in memory or in a mapped file, and those still to be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import WeightError
from .formats import byte_count, data_shape, element_count, format_of
from .quants import dequantize, quantize


@dataclass(frozen=True)
class StoredTensor:
    """A named tensor and the array that carries it.

    ``dtype``: a format's name (``f32``, ``bf16``, ``q4_1`` ...). ``shape``: the logical shape, row-major, ``[out, in]`` for
    a matrix. ``data``: an array of that shape, or uint8 ``[..., row bytes]`` for a block format, or uint16 for ``bf16``. An
    array from a mapped file is read-only and costs no memory until it is read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def __post_init__(self) -> None:
        expected, numpy = data_shape(self.dtype, self.shape), format_of(self.dtype).numpy
        if self.data.shape != expected or self.data.dtype != numpy:
            raise WeightError(
                f"tensor {self.name!r}: {self.dtype} of shape {list(self.shape)} is carried by {numpy} {list(expected)}, "
                f"but the array given is {self.data.dtype} {list(self.data.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return byte_count(self.dtype, self.shape)

    @property
    def size(self) -> int:
        return element_count(self.shape)

    def read(self) -> np.ndarray:
        """The array that carries the tensor."""
        return self.data

    def to_f32(self) -> np.ndarray:
        """The values, float32 of the logical shape (a copy, except for an f32 tensor)."""
        return dequantize(self.data, self.dtype)

    def renamed(self, name: str) -> StoredTensor:
        return StoredTensor(name, self.dtype, self.shape, self.data)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is read, so that writing a model holds one of its tensors in memory at a time."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return byte_count(self.dtype, self.shape)

    @property
    def size(self) -> int:
        return element_count(self.shape)

    def read(self) -> np.ndarray:
        """Makes the array that carries the tensor; raises WeightError when it is not what was announced."""
        return StoredTensor(self.name, self.dtype, self.shape, self.make()).data


AnyTensor = StoredTensor | LazyTensor


def from_f32(name: str, values: np.ndarray, dtype: str = "f32") -> StoredTensor:
    """float32 values -> a tensor stored in ``dtype``."""
    return StoredTensor(name, dtype, tuple(values.shape), quantize(values, dtype))


def realized(tensor: AnyTensor) -> StoredTensor:
    """The tensor with its array made."""
    return (
        tensor
        if isinstance(tensor, StoredTensor)
        else StoredTensor(tensor.name, tensor.dtype, tensor.shape, tensor.read())
    )


def converted(tensor: AnyTensor, dtype: str) -> AnyTensor:
    """The same values stored in another format, converted when read (through float32, rounded once)."""
    if tensor.dtype == dtype:
        return tensor
    byte_count(dtype, tensor.shape)  # a shape that the format cannot hold is refused here, not halfway through a file
    return LazyTensor(
        tensor.name, dtype, tensor.shape, lambda: quantize(dequantize(tensor.read(), tensor.dtype), dtype)
    )
