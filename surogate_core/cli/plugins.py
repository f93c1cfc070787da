"""`surogate plugins`: what is installed, what it brings, and why something does not load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .console import output_console

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
    console = output_console()
    for row in rows:
        console.print(row.distribution, style="bold", end=" ")
        console.print(row.version, end="  ")
        console.print(row.status, style="green" if row.status == "loaded" else "bold red")
        if row.reason:
            console.print(f"    {row.reason}", style="red", soft_wrap=True)
        for hook in row.hooks:
            names = row.provides.get(hook, [])
            console.print(f"    {hook}: {', '.join(names)}" if names else f"    {hook}", soft_wrap=True)
