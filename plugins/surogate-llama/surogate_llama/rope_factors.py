"""Llama 3's rotary scaling in GGUF files: one divisor per frequency, from the parameters and back to them."""

from __future__ import annotations

from typing import Any

import numpy as np

from surogate_core.dsl import RopeSpec
from surogate_core.dsl.rope import inverse_frequencies

# Llama 3.1 and 3.3 scale by 8, 3.2 by 32; they share everything else.
_KNOWN_FACTORS = (8.0, 32.0)
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def frequency_factors(spec: RopeSpec) -> np.ndarray:
    """float32 [R/2]: what each plain frequency is divided by."""
    plain = inverse_frequencies(RopeSpec(spec.head_dim, spec.base, spec.rotated))[0]
    return (plain / inverse_frequencies(spec)[0]).astype(np.float32)


def llama3_of_factors(spec: RopeSpec) -> dict[str, Any] | None:
    """The rope_scaling of a released Llama 3 that has the factors of ``spec``; None when none has."""
    given = np.asarray(spec.scaling["factors"], np.float32)
    for factor in _KNOWN_FACTORS:
        scaling = {**_LLAMA3, "factor": factor}
        if np.allclose(frequency_factors(RopeSpec(spec.head_dim, spec.base, spec.rotated, scaling)), given, rtol=1e-4, atol=0):
            return scaling
    return None
