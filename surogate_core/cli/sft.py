"""`surogate sft`: fine-tune on conversations, instructions or text."""

from __future__ import annotations

from .options import ConfigFile, DryRun, Overrides
from .training import train


def sft(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Fine-tune a model on conversations, instructions or text."""
    train(config, overrides, dry_run, "sft")
