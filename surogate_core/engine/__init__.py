"""The native engine's Python face: libraries of kernels, single ops, and sessions that run programs.

Everything that the native side refuses is an :class:`EngineError`; besides its message and hint it carries ``op`` (str
or None), ``instruction`` (index into the program, or None) and ``operands`` (a line each: name, dtype, shape).
"""

from __future__ import annotations

from ..errors import EngineError
from .library import cpu_features, kernels, libraries, load, load_backend, load_library, register_library
from .ops import run_op
from .session import Memory, Queue, Session, default_threads, device_info, plan
from .tuning import Tuning, with_choices

__all__ = [
    "EngineError",
    "Memory",
    "Queue",
    "Session",
    "Tuning",
    "cpu_features",
    "default_threads",
    "device_info",
    "kernels",
    "libraries",
    "load",
    "load_backend",
    "load_library",
    "plan",
    "register_library",
    "run_op",
    "with_choices",
]
