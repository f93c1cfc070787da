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
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder or the .gguf file to write.")],
    dtype: Annotated[
        str, typer.Option(help="Of the merged weights: bf16, f16, f32; in a GGUF file also q8_0, q6_k ... q4_0.")
    ] = "bf16",
) -> None:
    """Merge an adapter into its base. The sum is taken in fp32 and rounded once; every pair must fit exactly once."""
    from ..export import merge as merge_adapter

    report = merge_adapter(model_path(base), adapter, output, dtype)
    share = report.changed / report.total
    typer.echo(f"{output}: {report.num_pairs} adapter pairs merged, {share:.1%} of the adapted weights changed")
