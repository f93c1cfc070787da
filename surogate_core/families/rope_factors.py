"""Rotary scaling that GGUF files carry as one divisor per frequency, from its parameters and, for Llama 3, back to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dsl.rope import RopeSpec, inverse_frequencies

# Llama 3.1 and 3.3 scale by 8, 3.2 by 32; they share everything else.
_KNOWN_FACTORS = (8.0, 32.0)
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE_TENSORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def needs_factors(spec: RopeSpec) -> bool:
    """Whether GGUF has no name for the scaling that llama.cpp would honour: Llama 3's, and yarn with other settings than
    the usual, which llama.cpp takes from its command line and not from the file."""
    if spec.kind in ("llama3", "factors"):
        return True
    beta_fast, beta_slow = spec.scaling.get("beta_fast") or 32, spec.scaling.get("beta_slow") or 1
    return spec.kind == "yarn" and (beta_fast != 32 or beta_slow != 1 or not spec.scaling.get("truncate", True))


def rope_factor_tensors(spec: RopeSpec) -> dict[str, np.ndarray]:
    """The tensors of a GGUF file that say what its metadata cannot: none for most models."""
    if spec.kind == "longrope":
        return {name: np.asarray(spec.scaling[key], np.float32) for key, name in LONGROPE_TENSORS.items()}
    return {"rope_freqs.weight": frequency_factors(spec)} if needs_factors(spec) else {}


def frequency_factors(spec: RopeSpec) -> np.ndarray:
    """float32 [R/2]: what each plain frequency is divided by."""
    plain = inverse_frequencies(RopeSpec(spec.head_dim, spec.base, spec.rotated))[0]
    return (plain / inverse_frequencies(spec)[0]).astype(np.float32)


def llama3_of_factors(spec: RopeSpec) -> dict[str, Any] | None:
    """The rope_scaling of a released Llama 3 that has the factors of ``spec``; None when none has."""
    if spec.scaling.get("attention_factor", 1.0) != 1.0:
        return None
    given = np.asarray(spec.scaling["factors"], np.float32)
    for factor in _KNOWN_FACTORS:
        scaling = {**_LLAMA3, "factor": factor}
        if np.allclose(frequency_factors(RopeSpec(spec.head_dim, spec.base, spec.rotated, scaling)), given, rtol=1e-4, atol=0):
            return scaling
    return None
