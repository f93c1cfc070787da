"""`surogate bench serve`: a server under load, over HTTP."""

from __future__ import annotations

from .load import Load, Result, run_load

__all__ = ["Load", "Result", "run_load"]
