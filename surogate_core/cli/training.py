"""What `surogate sft` and `surogate pt` do; they differ in how the data is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .console import output_console
from .options import read_config

if TYPE_CHECKING:
    from ..config import Mode


def train(path: Path, overrides: list[str] | None, dry_run: bool, mode: Mode) -> None:
    """Trains, or with `dry_run` prints the plan. Exit code 130 where Ctrl-C stopped the run."""
    config = read_config(path, overrides, mode)
    if dry_run:
        from ..train.run import explain

        typer.echo(explain(config, mode, dry_run=True))
        return
    from ..train.run import run_training

    result = run_training(config, mode, output_console())
    if result.status == "interrupted":
        raise typer.Exit(130)
