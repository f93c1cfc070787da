"""`surogate plugins`: what is installed, what it brings, and why something does not load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..plugins.manager import PluginReport


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, with the whole traceback of what failed.")] = False,
) -> None:
    """List plugins: distribution, version, hooks, what each brings, and why one failed to load."""
    from ..plugins.manager import get_manager

    rows = get_manager().report()
    if as_json:
        typer.echo(json.dumps([vars(row) for row in rows], indent=2))
        return
    _print_table(rows)


def _print_table(rows: list[PluginReport]) -> None:
    """One block a plugin: a table would cut off the names that the list is read for."""
    for row in rows:
        typer.secho(f"{row.distribution} {row.version}", bold=True, nl=False)
        typer.secho(f"  {row.status}", fg="green" if row.status == "loaded" else "red")
        if row.reason:
            typer.secho(f"    {row.reason}", fg="red")
        for hook in row.hooks:
            names = row.provides.get(hook, [])
            typer.echo(f"    {hook}: {', '.join(names)}" if names else f"    {hook}")
