"""The kernels that tests run: those of the CPU that this processor has, and those of CUDA where a device can be used.

Tests of CUDA carry the marker `cuda`; without a device they are not selected (see tests/conftest.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from surogate_core import engine
from surogate_core.engine import cuda
from surogate_core.plugins import get_manager

FEATURES = {
    "avx2": "avx2", "avx512": "avx512f", "avx512bf16": "avx512bf16", "avx512_bf16": "avx512bf16", "amx": "amxbf16",
}
"""What the CPU kernels whose names begin so ask of the processor."""


@cache
def kernels() -> list[dict[str, Any]]:
    """Every kernel of the backends that this machine has, as `engine.kernels` describes them; taken once, as other tests of
    this process may bring kernels of their own later."""
    get_manager().load_kernels()
    if cuda.unavailable() is None:
        engine.load_backend("cuda")
    return [kernel for kernel in engine.kernels() if kernel["backend"] in ("cpu", "cuda")]


def names(op: str, backend: str = "cpu") -> list[str]:
    """The kernels of an op."""
    return [kernel["name"] for kernel in kernels() if (kernel["op"], kernel["backend"]) == (op, backend)]


def runs_here(name: str) -> bool:
    """Whether this processor has the instructions that a CPU kernel of this name is written in."""
    needed = [feature for prefix, feature in FEATURES.items() if name.startswith(prefix)]
    return all(engine.cpu_features()[feature] for feature in needed)


def usable(op: str, among: tuple[str, ...] = ("avx2", "avx512", "avx512bf16")) -> list[str]:
    """The CPU kernels of an op, of the names in ``among``, that this processor runs."""
    return [name for name in among if name in names(op) and runs_here(name)]


def choices(op: str, among: tuple[str, ...] = ("avx2", "avx512", "avx512bf16")) -> list[Any]:
    """For `pytest.mark.parametrize`: keywords of `engine.run_op` that choose each usable CPU kernel of an op, and each of
    CUDA. Where no device can be used one choice stands for them all."""
    found = [pytest.param({"backend": "cpu", "kernel": name}, id=name) for name in usable(op, among)]
    for name in names(op, "cuda") or [None]:
        found.append(pytest.param({"backend": "cuda", "kernel": name}, id=f"cuda-{name}", marks=pytest.mark.cuda))
    return found


def backends() -> list[Any]:
    """For `pytest.mark.parametrize`: keywords of `engine.run_op` that leave the choice to the registry of each backend."""
    cuda_choice = {"backend": "cuda", "kernel": None}
    return [
        pytest.param({"backend": "cpu", "kernel": None}, id="cpu"),
        pytest.param(cuda_choice, id="cuda", marks=pytest.mark.cuda),
    ]
