"""`surogate merge`: fold an adapter into its base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import model_path


def merge(
    base: Annotated[
        str, typer.Option("--base-model", "--base", help="The model that the adapter was trained on, or: default.")
    ],
    adapter: Annotated[Path, typer.Option("--adapter", "--checkpoint-dir", help="The adapter's folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    dtype: Annotated[str, typer.Option(help="What the merged weights are stored in: bf16, f16 or f32.")] = "bf16",
) -> None:
    """Merge an adapter into its base, as Hugging Face safetensors. The sum is taken in fp32 and rounded once."""
    from ..train.export import merge as merge_adapter

    merge_adapter(model_path(base), adapter, output, dtype)
    typer.echo(output)
