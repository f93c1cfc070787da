"""The `surogate` command: its verbs and global options."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .data import data
from .doctor import doctor
from .explain import explain
from .export import export
from .fetch_model import fetch_default_model, fetch_model
from .generate import generate
from .group import SurogateGroup
from .merge import merge
from .plugins import plugins
from .profile import profile
from .pt import pt
from .sft import sft

app = typer.Typer(
    name="surogate",
    cls=SurogateGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train large language models and serve them, on one native engine.",
)
for verb in (sft, pt, merge, export, generate, explain, profile, plugins, doctor):
    app.command()(verb)
app.command("fetch-model")(fetch_model)
app.command("fetch-default-model")(fetch_default_model)
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"surogate {__version__}")
        raise typer.Exit


@app.callback()
def surogate(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Global options. What they do is done in `SurogateGroup` and `_print_version`."""
