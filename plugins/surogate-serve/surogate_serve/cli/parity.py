"""`surogate parity`: whether what was trained is what is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from surogate_core.cli.options import model_path
from surogate_core.errors import ConfigError

from .serve import backend_of

KV_MEMORY = 512 << 20
"""Bytes: a device must also hold the trainer's copy of the weights."""


def parity(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file, a run's folder, or: default.")],
    adapter: Annotated[Path | None, typer.Option(help="A LoRA adapter's folder, as PEFT has it.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="The GGUF to compare. Default: one is exported for the while.")] = None,
    no_gguf: Annotated[bool, typer.Option("--no-gguf", help="Trainer and server only.")] = False,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Of each answer.")] = 32,
    recipe: Annotated[str, typer.Option(help="The precision recipe.")] = "bf16",
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="With kernels that give a token the same bits in every batch.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one for each core.")] = None,
    backend: Annotated[str, typer.Option(help="What computes: cpu, cuda. auto: the GPU where there is one.")] = "auto",
    device: Annotated[int, typer.Option(min=0, help="Which device of the backend.")] = 0,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Exit with 1 where the server is further from the trainer than this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Compare trainer, server and GGUF on the same conversations: tokens and log-probabilities."""
    if gguf is not None and no_gguf:
        raise ConfigError("--gguf and --no-gguf exclude each other")
    from ..engine import EngineOptions
    from ..models import ModelPath
    from ..parity import compare

    place = ModelPath.of(model_path(model))
    if adapter is None and place.adapters:
        (adapter,) = place.adapters.values()
    options = EngineOptions(
        recipe=recipe, backend=backend_of(backend, device, batch_invariant), device=device, threads=threads,
        max_sequences=8, kv_memory=KV_MEMORY, batch_invariant=batch_invariant,
    )
    rows = compare(place.base, adapter, False if no_gguf else gguf or True, options, tokens)
    if as_json:
        typer.echo(json.dumps({"model": str(place.base), "adapter": None if adapter is None else str(adapter), "recipe": recipe,
                               "batch_invariant": batch_invariant, "rows": [row.figures() for row in rows]}))
    else:
        typer.echo(f"{'beside the trainer':<20}{'tokens':>8}{'differ':>8}{'mean':>12}{'largest':>12}{'prompts differ':>16}")
        for row in rows:
            typer.echo(f"{row.name:<20}{row.tokens:>8}{row.differ:>8}{row.mean:>12.2e}{row.largest:>12.2e}"
                       f"{row.prompts_differ:>16}")
    if tolerance is not None and any(row.largest > tolerance for row in rows if row.name.startswith("server")):
        raise typer.Exit(1)
