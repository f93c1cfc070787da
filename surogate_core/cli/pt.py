"""`surogate pt`: pre-train on text, from scratch or onwards from a model."""

from __future__ import annotations

from .options import ConfigFile, DryRun, Overrides
from .training import train


def pt(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Pre-train on plain text, from scratch or onwards from a model."""
    train(config, overrides, dry_run, "pt")
