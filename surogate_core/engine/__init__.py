"""The native engine's Python face: libraries of kernels, single ops, and sessions that run programs.

Everything that the native side refuses is an :class:`EngineError`; besides its message and hint it carries ``op`` (str or
None), ``instruction`` (index into the program, or None) and ``operands`` (a line each: name, dtype, shape).
"""

from __future__ import annotations

from ..errors import EngineError
from .library import cpu_features, kernels, libraries, load, register_library
from .ops import run_op


__all__ = [
    "EngineError",
    "cpu_features",
    "kernels",
    "libraries",
    "load",
    "register_library",
    "run_op",
]
