"""Rotary position embedding: the table of (cos, sin) that op `rope` reads, for every published kind of scaling.

Frequencies follow Su et al. 2021 (arXiv:2104.09864): inv_freq[i] = base^(-2i/R) for the R rotated dimensions. The scaled
kinds are "linear" (positions / factor), "llama3" (Llama 3.1's smooth interpolation between wavelengths) and "yarn" (Peng
et al. 2023, arXiv:2309.00071, with its attention factor). "proportional" turns only the pairs of the highest frequencies, a
share "partial_rotary_factor" of all, and leaves the rest as they are: frequencies and pairs are those of the whole head.
"longrope" (Ding et al. 2024, arXiv:2402.13753) divides each by a given number, and has two sets of them: which one holds
depends on the longest text that the table is for, so a program made for long contexts reads short texts with it as well.
"factors" divides each frequency by a given number, which is how GGUF files carry what they have no name for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional", "factors")


@dataclass(frozen=True)
class RopeSpec:
    """head_dim: width of a head; rotated: how many of its dimensions turn (partial rotary); base: rope_theta;
    scaling: the model's rope_scaling mapping with "rope_type", empty for plain rotary; max_position: the model's
    max_position_embeddings, used by kinds that need the original context length and do not name it.
    growth, growth_step: what is rotated at position p is also multiplied by 1 + growth * ln(1 + floor(p / growth_step)); 0: it
    is not. Queries of models for long contexts are, so that attention does not flatten."""

    head_dim: int
    base: float = 10000.0
    rotated: int | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    max_position: int | None = None
    growth: float = 0.0
    growth_step: int = 0

    @property
    def dims(self) -> int:
        return self.rotated or self.head_dim

    @property
    def kind(self) -> str:
        return self.scaling.get("rope_type", self.scaling.get("type", "default")) or "default"


def inverse_frequencies(spec: RopeSpec, num_positions: int = 0) -> tuple[np.ndarray, float]:
    """float64 [R/2] angles per position, and the factor that cos and sin are multiplied by. num_positions: the longest text,
    0 for one within the original context. ValueError: unknown kind or a missing setting."""
    dims, scaling = spec.dims, spec.scaling
    plain = spec.base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if spec.kind == "default":
        return plain, 1.0
    if spec.kind not in KINDS:
        raise ValueError(f"rope_type {spec.kind!r} is not known; known are {', '.join(KINDS)}")
    if spec.kind == "factors":
        return plain / np.asarray(scaling["factors"], np.float64), float(scaling.get("attention_factor") or 1.0)
    if spec.kind == "proportional":
        turned = int(_setting(scaling, "partial_rotary_factor", spec.kind) * dims // 2)
        return np.where(np.arange(dims // 2) < turned, plain / float(scaling.get("factor") or 1.0), 0.0), 1.0
    if spec.kind == "longrope":
        return _longrope(spec, plain, num_positions)
    factor = _setting(scaling, "factor", spec.kind)
    if spec.kind == "linear":
        return plain / factor, 1.0
    if spec.kind == "llama3":
        return _llama3(plain, factor, scaling), 1.0
    return _yarn(spec, plain, factor)


def _setting(scaling: Mapping[str, Any], name: str, kind: str) -> float:
    if scaling.get(name) is None:
        raise ValueError(f"rope_scaling of type {kind!r} needs {name!r}; it has {sorted(scaling)}")
    return float(scaling[name])


def _llama3(plain: np.ndarray, factor: float, scaling: Mapping[str, Any]) -> np.ndarray:
    low = _setting(scaling, "low_freq_factor", "llama3")
    high = _setting(scaling, "high_freq_factor", "llama3")
    original = _setting(scaling, "original_max_position_embeddings", "llama3")
    wavelength = 2 * math.pi / plain
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    blended = (1 - smooth) * plain / factor + smooth * plain
    return np.where(wavelength > original / low, plain / factor, np.where(wavelength < original / high, plain, blended))


def _longrope(spec: RopeSpec, plain: np.ndarray, num_positions: int) -> tuple[np.ndarray, float]:
    scaling = spec.scaling
    original = _setting(scaling, "original_max_position_embeddings", "longrope")
    sets = {}
    for name in ("short_factor", "long_factor"):
        sets[name] = np.asarray(scaling.get(name) or (), np.float64)
        if sets[name].shape != plain.shape:
            raise ValueError(f"rope_scaling of type 'longrope' needs {name!r}, a number for each of {len(plain)} frequencies")
    factor = float(scaling.get("factor") or (spec.max_position or original) / original)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / sets["long_factor" if num_positions > original else "short_factor"], float(magnitude)


def _yarn(spec: RopeSpec, plain: np.ndarray, factor: float) -> tuple[np.ndarray, float]:
    scaling, dims = spec.scaling, spec.dims
    original = scaling.get("original_max_position_embeddings") or spec.max_position
    if not original:
        raise ValueError("rope_scaling of type 'yarn' needs 'original_max_position_embeddings'")
    beta_fast, beta_slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)

    def dim_of(rotations: float) -> float:
        """The (fractional) pair that makes this many rotations over the original context."""
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.base))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)


def rope_table(spec: RopeSpec, num_positions: int) -> np.ndarray:
    """float32 [num_positions, R/2, 2] of (cos, sin), attention factor folded in.

    Angles are float32 products of a float32 position and a float32 frequency, as every training stack forms them: at
    long positions the rounding of the angle is part of the model.
    """
    frequencies, factor = inverse_frequencies(spec, num_positions)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * frequencies.astype(np.float32)[None, :]
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32) * np.float32(factor)
    if spec.growth:
        if spec.dims != spec.head_dim:
            raise ValueError("what grows with its position is rotated in all dimensions of a head")
        table *= (1 + np.float32(spec.growth) * np.log1p(positions // spec.growth_step))[:, None, None]
    return table
