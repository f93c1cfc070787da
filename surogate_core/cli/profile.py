"""`surogate profile`: where the time of a training step goes, kernel by kernel."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from .bench import (
    Accumulation, BackendName, BatchSize, Budget, Documents, Full, MasterType, Model, Rank, RecipeName, SequenceLength,
    StateType, WeightType, keys, plan,
)
from .options import Overrides


def profile(
    model: Model,
    full: Full = False,
    lora_rank: Rank = None,
    sequence_len: SequenceLength = None,
    batch: BatchSize = None,
    accumulation: Accumulation = None,
    recipe: RecipeName = None,
    memory_budget: Budget = None,
    optimizer_state_dtype: StateType = None,
    master_dtype: MasterType = None,
    weights: WeightType = "bf16",
    documents: Documents = 1,
    backend: BackendName = None,
    shapes: Annotated[bool, typer.Option("--shapes", help="Tell calls of one kernel apart by their operands.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    overrides: Overrides = None,
) -> None:
    """Show each kernel of a training step: time, GB/s, TFLOP/s, and how near it is to what the machine can do."""
    from ..bench.ceilings import measure_ceilings
    from ..bench.kernels import profile_step, table
    from ..bench.workload import open_workload

    prepared = plan(
        model, overrides or [], weights, documents,
        keys(full, lora_rank, sequence_len, batch, accumulation, recipe, memory_budget, optimizer_state_dtype, master_dtype,
             backend),
    )
    ceilings = measure_ceilings(prepared.config.backend, prepared.threads, prepared.config.device)
    workload = open_workload(model, prepared)
    rows = profile_step(workload, ceilings, shapes)
    if as_json:
        total = sum(row.seconds for entry in rows.values() for row in entry)
        entries = {entry: [row.figures(total) for row in kinds] for entry, kinds in rows.items()}
        typer.echo(json.dumps({"ceilings": asdict(ceilings), "entries": entries}, indent=2))
        return
    typer.echo(table(rows, ceilings))
