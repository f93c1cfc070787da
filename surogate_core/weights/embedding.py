"""How a model's final hidden states become the vector of a text: what a checkpoint says of it, in one form for all files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ..errors import WeightError
from .tensor import StoredTensor

Pooling = Literal["mean", "last", "cls"]


@dataclass(frozen=True)
class Dense:
    """A linear layer behind the pooling: weight [out, in], bias [out] or None."""

    weight: StoredTensor
    bias: StoredTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape


@dataclass(frozen=True)
class Embedding:
    """pooling: of the final hidden states; "cls" is the first one's. dense: layers behind it, in order, with nothing between
    them. normalized: a vector has length 1. sizes: what it may be cut to (before it is normalised), whole included; () for
    any. prompts: what comes before a text, by the task that it is embedded for. default_prompt: the one that is meant where
    none is named. max_tokens: of a text; None for the model's context.
    """

    pooling: Pooling = "mean"
    dense: tuple[Dense, ...] = ()
    normalized: bool = True
    sizes: tuple[int, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None

    def checked(self, hidden_size: int, where: str) -> Embedding:
        """The same; WeightError where the layers do not fit one another or the model."""
        width = hidden_size
        for number, layer in enumerate(self.dense, 1):
            if len(layer.shape) != 2 or layer.shape[1] != width:
                raise WeightError(
                    f"{where}: dense layer {number} has shape {list(layer.shape)}, but {width} values come in"
                )
            if layer.bias is not None and layer.bias.shape != layer.shape[:1]:
                raise WeightError(f"{where}: dense layer {number} has a bias of shape {list(layer.bias.shape)}")
            width = layer.shape[0]
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise WeightError(f"{where}: there is no prompt {self.default_prompt!r}, which is to be the default")
        return self

    def with_sizes(self, sizes: Sequence[int], hidden_size: int) -> Embedding:
        """With those of ``sizes`` that are smaller than the whole, and the whole."""
        width = self.width(hidden_size)
        return replace(self, sizes=(width, *sorted({size for size in sizes if size < width}, reverse=True)))

    def width(self, hidden_size: int) -> int:
        """Values of a whole vector."""
        return self.dense[-1].shape[0] if self.dense else hidden_size

    def finished(self, pooled: np.ndarray) -> np.ndarray:
        """float32 [n, hidden] -> float32 [n, width] through the dense layers, neither cut nor normalised. Row by row, so
        that a text's bits do not depend on what else is embedded."""
        if self._linear is None:
            return pooled
        weight, bias = self._linear
        return np.stack([weight @ row + bias for row in pooled])

    @cached_property
    def _linear(self) -> tuple[np.ndarray, np.ndarray] | None:
        """All layers as one, float32 weight [width, hidden] and bias [width]: a few texts need no more than that, and it is
        done on the host in full precision whatever the model computes in."""
        if not self.dense:
            return None
        weight = np.eye(self.dense[0].shape[1])
        bias = np.zeros(self.dense[0].shape[1])
        for layer in self.dense:
            matrix = layer.weight.to_f32().astype(np.float64)
            weight, bias = matrix @ weight, matrix @ bias
            if layer.bias is not None:
                bias = bias + layer.bias.to_f32()
        return weight.astype(np.float32), bias.astype(np.float32)


def shaped(vectors: np.ndarray, size: int | None, normalize: bool) -> np.ndarray:
    """float32 [n, width] cut to the first ``size`` values, then to length 1 where that is wanted."""
    vectors = vectors if size is None else vectors[:, :size]
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return np.ascontiguousarray(vectors, np.float32)
