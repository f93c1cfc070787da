"""The families of Qwen's dense models."""

from __future__ import annotations

from surogate_core.dsl import Family

FAMILIES: tuple[Family, ...] = ()
