"""`surogate data`: look at the data as training sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import output_console
from .options import ConfigFile, Overrides, Pretraining, read_config

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import DatasetConfig, Mode, TrainConfig
    from ..plugins.manager import PluginManager

data = typer.Typer(help="Look at the data as training sees it.", no_args_is_help=True)


@data.callback()
def data_verbs() -> None:
    """Keeps `surogate data inspect` two words: a Typer of one command would swallow the second."""


@data.command()
def inspect(
    config: ConfigFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=0, help="How many rows of each data set to show.")] = 3,
    pretraining: Pretraining = False,
) -> None:
    """Show rows with the tokens that carry loss marked, and count the rest: supervision, lengths, bad rows."""
    from ..plugins.manager import get_manager

    mode = "pt" if pretraining else "sft"
    resolved = read_config(config, overrides, mode)
    manager = get_manager()
    manager.load(resolved.plugins)
    formats = dict(manager.dataset_formats.items())
    tokenizer, encoder = _encoder(resolved, mode, manager)
    console = output_console()
    for dataset in (*resolved.datasets, *resolved.validation_datasets):
        _inspect(console, dataset, resolved, formats, tokenizer, encoder, rows)


def _encoder(config: TrainConfig, mode: Mode, manager: PluginManager) -> tuple[Any, Any]:
    """The tokenizer, and what turns rows into tokens and masks, as a run has them."""
    from ..model.loaded import open_tokenizer
    from ..train.prepare import choose_template, encoder_for

    tokenizer = open_tokenizer(config.tokenizer or config.model)
    choose_template(config, mode, tokenizer, manager)
    return tokenizer, encoder_for(config, mode, tokenizer)


@dataclass
class _Collected:
    """Takes bad rows as `surogate_core.data.sources.BadRows` does, and keeps them all."""

    errors: list[Any] = field(default_factory=list)

    def add(self, error: Any) -> None:
        self.errors.append(error)


@dataclass
class _Counts:
    """What a data set is made of. `lengths`: tokens of each row that could be read."""

    unsupervised: int = 0
    supervised_tokens: int = 0
    lengths: list[int] = field(default_factory=list)


def _inspect(
    console: Console,
    dataset: DatasetConfig,
    config: TrainConfig,
    formats: dict[str, Any],
    tokenizer: Any,
    encoder: Any,
    shown: int,
) -> None:
    from ..data import encode_rows, print_mask

    console.print(f"{dataset.path} (type {dataset.type})", style="bold")
    bad_rows = _Collected()
    counts = _Counts()
    for row, encoded in encode_rows(dataset, encoder, formats, bad_rows, config.seed):
        if len(counts.lengths) < shown:
            console.print(f"-- {row.where}", style="cyan")
            print_mask(console, encoded, tokenizer)
        counts.lengths.append(len(encoded.ids))
        counts.supervised_tokens += encoded.num_supervised
        counts.unsupervised += encoded.num_supervised == 0
    for error in bad_rows.errors[:shown]:
        console.print(error.message, style="red")
    for line in _summary(counts, len(bad_rows.errors), config.sequence_len):
        console.print(line)


def _summary(counts: _Counts, bad: int, sequence_len: int) -> list[str]:
    lengths = sorted(counts.lengths)
    lines = [f"{len(lengths) + bad} rows read, {bad} bad, {counts.unsupervised} without a token that carries loss"]
    if lengths:
        total = sum(lengths)
        too_long = sum(length > sequence_len for length in lengths)
        lines += [
            f"{total} tokens, {counts.supervised_tokens} of them carry loss ({counts.supervised_tokens / total:.1%})",
            f"tokens in a row: {lengths[0]} to {lengths[-1]}, median {lengths[len(lengths) // 2]}; "
            f"{too_long} rows exceed sequence_len {sequence_len}",
        ]
    return lines
