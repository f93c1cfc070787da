from __future__ import annotations

from ..train.conftest import root, shared

__all__ = ["root", "shared"]
