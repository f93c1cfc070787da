"""`surogate explain`: what a run would do, without doing it."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import ConfigFile, Overrides, Pretraining, read_config


def explain(
    config: ConfigFile,
    overrides: Overrides = None,
    pretraining: Pretraining = False,
    program: Annotated[
        bool, typer.Option("--program", help="Print the program itself instead, in its lossless text form.")
    ] = False,
) -> None:
    """Show the plan of a run: passes, memory by part, and every fast path with why it is on or off."""
    mode = "pt" if pretraining else "sft"
    resolved = read_config(config, overrides, mode)
    if program:
        from ..train.prepare import prepare

        typer.echo(prepare(resolved, mode).plan.program.text())
        return
    from ..train.run import explain as explain_run

    typer.echo(explain_run(resolved, mode, dry_run=False))
