"""scikit-build-core's build backend, which also asks for the CUDA headers where there is a compiler to use them.

The headers come in wheels of the libraries themselves, some 800 MB, so a machine without nvcc is spared them. What is
asked for stands in pyproject.toml, under [tool.surogate].
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *cuda_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *cuda_requirements(config_settings)]


def cuda_requirements(config_settings: dict[str, Any] | None) -> list[str]:
    """The distributions that bring CUDA headers; none without nvcc, or where the build was told SUROGATE_CUDA=OFF."""
    if (config_settings or {}).get("cmake.define.SUROGATE_CUDA") == "OFF" or find_nvcc() is None:
        return []
    with (Path(__file__).resolve().parent.parent / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["surogate"]["cuda-headers"]


def find_nvcc() -> str | None:
    """Where cmake/SurogateCuda.cmake looks for it too."""
    folders = [f"{os.environ['CUDA_PATH']}/bin"] if os.environ.get("CUDA_PATH") else []
    folders += [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return os.environ.get("CUDACXX") or shutil.which("nvcc", path=os.pathsep.join(folders))


if __name__ == "__main__":  # python cmake/build_backend.py: the requirements, a line each, for an installer to read
    print("\n".join(cuda_requirements(None)))
