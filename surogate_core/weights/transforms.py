"""What may lie between a file's tensors and a model's parameters: transforms that run both ways.

A transform turns a list of file tensors into a list of parameters (``load``) and back (``export``). Rows of a block format
move whole, so what permutes, splits or stacks rows works on quantised weights without decoding them; what would cut
through a block, or change values, refuses them or decodes, as each says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import WeightError
from .formats import data_shape, format_of
from .tensor import StoredTensor, from_f32

TensorType = tuple[str, tuple[int, ...]]  # format's name, logical shape


class Transform(Protocol):
    """``num_files`` file tensors become ``num_params`` parameters; ``export`` undoes ``load`` exactly."""

    @property
    def num_files(self) -> int: ...

    @property
    def num_params(self) -> int: ...

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]: ...

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]: ...

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        """Formats and shapes of what ``export`` will give, known before any data is read."""
        ...


class _OneToOne:
    num_files = 1
    num_params = 1

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        return types


@dataclass(frozen=True)
class Identity(_OneToOne):
    """The file's tensor is the parameter."""

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return tensors

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return tensors


@dataclass(frozen=True)
class PermuteRope(_OneToOne):
    """Rows of a query or key projection: interleaved pairs (2i, 2i + 1) in the file, halves (i, i + D/2) in the parameter.

    llama.cpp stores the q and k projections (weights and biases) of its ``llama`` architecture in interleaved order.
    """

    num_heads: int
    head_dim: int

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [self._reorder(tensor, (self.head_dim // 2, 2)) for tensor in tensors]

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [self._reorder(tensor, (2, self.head_dim // 2)) for tensor in tensors]

    def _reorder(self, tensor: StoredTensor, pair: tuple[int, int]) -> StoredTensor:
        if tensor.shape[0] != self.num_heads * self.head_dim:
            raise WeightError(
                f"tensor {tensor.name!r} has {tensor.shape[0]} rows, but {self.num_heads} heads of {self.head_dim} need "
                f"{self.num_heads * self.head_dim}; the head counts in the file do not belong to these weights"
            )
        if len(tensor.shape) == 1 and format_of(tensor.dtype).is_block:
            raise WeightError(
                f"tensor {tensor.name!r}: a vector in {tensor.dtype} cannot be reordered; store it as f32"
            )
        rest = tensor.data.shape[1:]
        rows = tensor.data.reshape(self.num_heads, *pair, *rest).swapaxes(1, 2)
        return StoredTensor(tensor.name, tensor.dtype, tensor.shape, rows.reshape(tensor.data.shape))


@dataclass(frozen=True)
class AddOne(_OneToOne):
    """The file stores 1 + w, the parameter is w (norms with ``unit_offset`` in GGUF files). Decodes to f32."""

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [from_f32(tensor.name, tensor.to_f32() - np.float32(1)) for tensor in tensors]

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [from_f32(tensor.name, tensor.to_f32() + np.float32(1)) for tensor in tensors]

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        return [("f32", shape) for _, shape in types]


@dataclass(frozen=True)
class Transpose(_OneToOne):
    """The file stores the transpose of a matrix. Blocks lie along rows, so a block format is refused."""

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [self._transposed(tensor) for tensor in tensors]

    export = load

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        return [(dtype, shape[::-1]) for dtype, shape in types]

    def _transposed(self, tensor: StoredTensor) -> StoredTensor:
        if format_of(tensor.dtype).is_block or len(tensor.shape) != 2:
            raise WeightError(
                f"tensor {tensor.name!r} ({tensor.dtype}, {list(tensor.shape)}) cannot be transposed: only plain matrices can"
            )
        return StoredTensor(tensor.name, tensor.dtype, tensor.shape[::-1], np.ascontiguousarray(tensor.data.T))


@dataclass(frozen=True)
class Split:
    """One tensor in the file, several parameters: cut along ``axis`` into pieces of ``sizes`` (a fused qkv, gate_up)."""

    axis: int
    sizes: tuple[int, ...]
    num_files = 1

    @property
    def num_params(self) -> int:
        return len(self.sizes)

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return _cut(tensors[0], self.axis, self.sizes)

    def load_one(self, tensors: list[StoredTensor], index: int) -> StoredTensor:
        """One of what `load` gives, without making the others: there may be many, of something large."""
        return _cut(tensors[0], self.axis, self.sizes, (index,))[0]

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [_joined(tensors, self.axis, self.sizes)]

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        return [_joined_type(types, self.axis)]


@dataclass(frozen=True)
class Fuse:
    """Several tensors in the file, one parameter: joined along ``axis``, of ``sizes`` each. The inverse of Split."""

    axis: int
    sizes: tuple[int, ...]
    num_params = 1

    @property
    def num_files(self) -> int:
        return len(self.sizes)

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return [_joined(tensors, self.axis, self.sizes)]

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        return _cut(tensors[0], self.axis, self.sizes)

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        dtype, shape = types[0]
        return [(dtype, (*shape[: self.axis], size, *shape[self.axis + 1 :])) for size in self.sizes]


@dataclass(frozen=True)
class Stack:
    """``count`` tensors in the file (an index in their name), one parameter with a new first axis (stacked experts)."""

    count: int
    num_params = 1

    @property
    def num_files(self) -> int:
        return self.count

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        first = tensors[0]
        for other in tensors[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise WeightError(
                    f"tensors {first.name!r} ({first.dtype} {list(first.shape)}) and {other.name!r} ({other.dtype} "
                    f"{list(other.shape)}) cannot be stacked: they differ"
                )
        data = np.stack([tensor.data for tensor in tensors])
        return [StoredTensor(first.name, first.dtype, (self.count, *first.shape), data)]

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        tensor = tensors[0]
        if tensor.shape[0] != self.count:
            raise WeightError(
                f"parameter {tensor.name!r} has {tensor.shape[0]} slices, but {self.count} are to be written"
            )
        return [StoredTensor(tensor.name, tensor.dtype, tensor.shape[1:], piece) for piece in tensor.data]

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        dtype, shape = types[0]
        return [(dtype, shape[1:])] * self.count


@dataclass(frozen=True, init=False)
class Chain:
    """Transforms one after another, first the one next to the file."""

    steps: tuple[Transform, ...]

    def __init__(self, *steps: Transform) -> None:
        object.__setattr__(self, "steps", steps)

    @property
    def num_files(self) -> int:
        return self.steps[0].num_files

    @property
    def num_params(self) -> int:
        return self.steps[-1].num_params

    def load(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        for step in self.steps:
            tensors = step.load(tensors)
        return tensors

    def export(self, tensors: list[StoredTensor]) -> list[StoredTensor]:
        for step in reversed(self.steps):
            tensors = step.export(tensors)
        return tensors

    def export_types(self, types: list[TensorType]) -> list[TensorType]:
        for step in reversed(self.steps):
            types = step.export_types(types)
        return types


def _data_sizes(tensor: StoredTensor, axis: int, sizes: Sequence[int]) -> list[int]:
    """Sizes along ``axis`` of the carrying array: bytes along the last axis of a block format."""
    form = format_of(tensor.dtype)
    if not form.is_block or axis != len(tensor.shape) - 1:
        return list(sizes)
    if any(size % form.block for size in sizes):
        raise WeightError(
            f"tensor {tensor.name!r}: pieces of {list(sizes)} columns would cut through {tensor.dtype} blocks of {form.block}"
        )
    return [size // form.block * form.block_bytes for size in sizes]


def _cut(
    tensor: StoredTensor, axis: int, sizes: Sequence[int], wanted: Sequence[int] | None = None
) -> list[StoredTensor]:
    """``wanted``: which of the pieces; None: all."""
    if axis >= len(tensor.shape) or tensor.shape[axis] != sum(sizes):
        raise WeightError(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} cannot be cut into {list(sizes)} along axis {axis}"
        )
    bounds = np.cumsum(_data_sizes(tensor, axis, sizes))[:-1]
    pieces = np.split(tensor.data, bounds, axis=axis)
    shapes = [(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]) for size in sizes]
    return [StoredTensor(tensor.name, tensor.dtype, shapes[i], np.ascontiguousarray(pieces[i]))
            for i in (range(len(sizes)) if wanted is None else wanted)]


def _joined(tensors: list[StoredTensor], axis: int, sizes: Sequence[int]) -> StoredTensor:
    for tensor, size in zip(tensors, sizes, strict=True):
        if axis >= len(tensor.shape) or tensor.shape[axis] != size:
            raise WeightError(
                f"tensor {tensor.name!r} of shape {list(tensor.shape)} must have {size} along axis {axis}"
            )
        _data_sizes(tensor, axis, [size])
    dtype, shape = _joined_type([(tensor.dtype, tensor.shape) for tensor in tensors], axis)
    data = np.concatenate([tensor.data for tensor in tensors], axis=axis)
    return StoredTensor(tensors[0].name, dtype, shape, data.reshape(data_shape(dtype, shape)))


def _joined_type(types: list[TensorType], axis: int) -> TensorType:
    dtype, shape = types[0]
    rest = (*shape[:axis], *shape[axis + 1 :])
    for other, other_shape in types[1:]:
        if other != dtype or (*other_shape[:axis], *other_shape[axis + 1 :]) != rest:
            raise WeightError(
                f"tensors to be joined along axis {axis} differ: {dtype} {list(shape)} and {other} {list(other_shape)}; "
                "convert them to one format first"
            )
    return dtype, (*shape[:axis], sum(each[axis] for _, each in types), *shape[axis + 1 :])
