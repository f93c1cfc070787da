"""`surogate export`: write a model in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import ConfigError
from .options import model_path


def export(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, or: default.")],
    output: Annotated[Path, typer.Argument(help="The .gguf file or the folder to write.")],
    format: Annotated[
        Literal["gguf", "safetensors"] | None,
        typer.Option("--format", help="Checked against OUTPUT: gguf where it ends in .gguf, else safetensors."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="bf16, f16, f32; for gguf also q8_0, q6_k, q5_k, q4_k, q5_1, q5_0, q4_1, q4_0. Default: bf16; for gguf as "
            "it is stored."
        ),
    ] = None,
) -> None:
    """Export a model as a GGUF file or as Hugging Face safetensors, with its tokenizer and template."""
    is_file = output.suffix == ".gguf"
    if format is not None and is_file != (format == "gguf"):
        raise ConfigError(f"{output} does not fit --format {format}", "gguf is one .gguf file, safetensors a folder.")
    from ..export import export as export_model

    export_model(model_path(model), output, dtype)
    typer.echo(output)
