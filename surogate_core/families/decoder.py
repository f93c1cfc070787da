"""The hyperparameters that all decoders with grouped-query attention, rotary positions and a gated MLP have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..dsl import Hyperparameters, RopeSpec


@dataclass(frozen=True)
class DecoderHyperparameters(Hyperparameters):
    """rope_dims: how many dimensions of a head are rotated. rope_scaling: empty for plain rotary, see `RopeSpec`. init_std:
    of random weights."""

    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope_dims: int = 0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    init_std: float = 0.02

    @property
    def rope(self) -> RopeSpec:
        return RopeSpec(self.head_dim, self.rope_base, self.rope_dims, self.rope_scaling, self.max_positions)
