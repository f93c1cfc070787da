"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import tell

if TYPE_CHECKING:
    from ..config import Mode, TrainConfig

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key: learning_rate=1e-3, datasets.0.path=a.jsonl."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan the run, print the plan with its peak memory, and stop.")]
Pretraining = Annotated[bool, typer.Option("--pt", help="Read the file as `surogate pt` does.")]


def model_path(name: str) -> Path:
    """The path a verb was given for a model, or that of one which `surogate fetch-model` fetches, such as `default`."""
    from ..config.paths import named_model

    path = Path(name).expanduser()
    return path if path.exists() else named_model(name, "command line", "model") or path


def read_config(path: Path, overrides: list[str] | None, mode: Mode) -> TrainConfig:
    """The resolved configuration; what was read under another name is told on standard error."""
    from ..config import resolve

    return resolve(path, overrides or (), mode=mode, note=tell)
