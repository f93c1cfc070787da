"""The native engine's Python face: libraries of kernels, single ops, and sessions that run programs.

Everything that the native side refuses is an :class:`EngineError`; besides its message and hint it carries ``op`` (str
or None), ``instruction`` (index into the program, or None) and ``operands`` (a line each: name, dtype, shape).
"""

from __future__ import annotations

from ..errors import EngineError
from .library import cpu_features, kernels, libraries, load, load_library, register_library
from .ops import run_op
from .session import Session, default_threads, plan

__all__ = [
    "EngineError",
    "Session",
    "cpu_features",
    "default_threads",
    "kernels",
    "libraries",
    "load",
    "load_library",
    "plan",
    "register_library",
    "run_op",
]
