"""`surogate bench`: how fast this machine is, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .group import PluginGroup
from .options import Overrides

if TYPE_CHECKING:
    from ..train.prepare import Prepared

bench = typer.Typer(cls=PluginGroup, help="Measure how fast this machine trains and serves.", no_args_is_help=True)

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset (the architecture of a public model, as installed families have them) with "
                   "random weights and random tokens, or the YAML file of a run."),
]
Full = Annotated[bool, typer.Option("--full", help="Presets: train every weight instead of an adapter.")]
Rank = Annotated[int | None, typer.Option("--lora-rank", min=1, help="Presets: rank of the adapter. Default: 16.")]
SequenceLength = Annotated[int | None, typer.Option("--sequence-len", min=2, help="Tokens of a sequence.")]
BatchSize = Annotated[int | None, typer.Option("--batch", min=1, help="Sequences of a micro-batch.")]
Accumulation = Annotated[int | None, typer.Option("--accumulation", min=1, help="Micro-batches of a step.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="The precision recipe.")]
Budget = Annotated[str | None, typer.Option("--memory-budget", help="What the run may take: 20GiB, or auto.")]
StateType = Annotated[str | None, typer.Option("--optimizer-state-dtype", help="fp32 or bf16.")]
MasterType = Annotated[str | None, typer.Option("--master-dtype", help="fp32 or bf16.")]
WeightType = Annotated[str, typer.Option("--weights", help="Presets: what the weights are stored in (bf16, q8_0, q4_k ...).")]
Documents = Annotated[int, typer.Option("--documents", min=1, help="Presets: documents packed into a sequence.")]
BackendName = Annotated[str | None, typer.Option("--backend", help="cpu, cuda; by default the GPU where there is one.")]


@bench.callback()
def bench_verbs() -> None:
    """Keeps `surogate bench train` two words: a Typer of one command would swallow the second."""


@bench.command()
def train(
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
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps before the measured ones.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps.")] = 10,
    overrides: Overrides = None,
) -> None:
    """Train some steps, and print one JSON object: tokens/s, share of the GEMM peak, memory, idle time."""
    from ..bench.train import bench_train

    prepared = plan(
        model, overrides or [], weights, documents,
        keys(full, lora_rank, sequence_len, batch, accumulation, recipe, memory_budget, optimizer_state_dtype, master_dtype,
             backend),
    )
    result = bench_train(model, prepared, warmup, steps)
    typer.echo(json.dumps(result, indent=2))


def keys(
    full: bool, lora_rank: int | None, sequence_len: int | None, batch: int | None, accumulation: int | None,
    recipe: str | None, memory_budget: str | None, optimizer_state_dtype: str | None, master_dtype: str | None,
    backend: str | None,
) -> dict[str, Any]:
    """The options as keys of a configuration; those that were not given are left out."""
    given = {
        "lora": False if full else None, "lora_rank": lora_rank, "sequence_len": sequence_len,
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "recipe": recipe,
        "memory_budget": memory_budget, "optimizer_state_dtype": optimizer_state_dtype, "master_dtype": master_dtype,
        "backend": backend,
    }
    return {key: value for key, value in given.items() if value is not None}


def plan(model: str, overrides: list[str], weights: str, documents: int, given: dict[str, Any]) -> Prepared:
    """The run that is measured: of a preset, or of a configuration file, where the options change its keys."""
    from ..bench.presets import presets
    from ..bench.workload import from_config, from_preset

    known = presets()
    if model in known:
        defaults = {"sequence_len": 2048, "lora_rank": 16}
        return from_preset(model, defaults | given, overrides, weights, documents)
    path = Path(model)
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{model} is neither a preset nor a .yaml file", f"Presets: {', '.join(known) or 'none'}.")
    changed = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]
    return from_config(path, [*changed, *overrides], "sft")
