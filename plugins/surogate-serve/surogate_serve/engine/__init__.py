"""A model behind the native loop: what is planned, how large, and who waits for which answer."""

from __future__ import annotations

from .options import EngineOptions

__all__ = ["EngineOptions"]
