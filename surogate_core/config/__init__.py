"""Configuration: one model of every key, a strict YAML reader, overrides, and the file of resolved values."""

from __future__ import annotations

from .dataset import DatasetConfig
from .resolve import Mode, dump_resolved, resolve, resolved_text
from .train import TrainConfig

__all__ = ["DatasetConfig", "Mode", "TrainConfig", "dump_resolved", "resolve", "resolved_text"]
