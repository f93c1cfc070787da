"""FLOPs that a model needs for a token, whatever a program does to get there.

One convention: k * N + 6 * L * d * T, where k is 6 when every matrix is trained and 4 when only adapters are (a frozen
matrix needs no gradient of its own), N the weights that multiply a token (the head among them, the embedding table not), L
the attention layers, d heads x head size and T the length of a document. Causal attention is counted once, what is
recomputed never, and adapters are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..dsl import trace
from ..model import LoadedModel

PRODUCTS = frozenset({"linear", "linear_cross_entropy"})
"""Ops that multiply with a weight, their input 1."""


@dataclass(frozen=True)
class ModelCost:
    """matrix_weights: N. attention: (d, window) of every layer; window 0 for none."""

    matrix_weights: int
    attention: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: LoadedModel, max_positions: int) -> ModelCost:
        graph = trace(model.dsl(), "loss", max_positions)
        weights, layers = 0, []
        for region in (graph.prologue, *(graph.regions[name] for name in graph.layers), graph.epilogue):
            for node in region.forward:
                if node.op in PRODUCTS:
                    weights += math.prod(node.inputs[1].shape)
                elif node.op == "attention":
                    layers.append((math.prod(node.inputs[0].shape[1:]), int(node.attrs.get("window", 0))))
        return cls(weights, tuple(layers))

    def flops(self, full: bool, lengths: Iterable[int]) -> float:
        """Model FLOPs of training on documents of these lengths."""
        documents = list(lengths)
        products = (6 if full else 4) * self.matrix_weights * sum(documents)
        return products + sum(12.0 * d * sum(_pairs(n, window) for n in documents) for d, window in self.attention)


def _pairs(length: int, window: int) -> float:
    """Keys that the queries of a causal document see, in the convention's rounding: half of all."""
    if not window or window >= length:
        return length * length / 2
    return window * length - window * window / 2
