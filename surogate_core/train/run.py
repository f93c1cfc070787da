"""`surogate sft` and `surogate pt`: one run, from the config to the result in ``output_dir``.

    config.yaml          every effective value
    program.bin          on a GPU: the program with the algorithms that were chosen for it, which resuming takes again
    metrics.jsonl        one line a step
    step_XXXXXXXX/       checkpoints
    loss.png
    adapter/             LoRA: the adapter as PEFT reads it, or
    model/               full training: a Hugging Face folder
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..config import Mode, TrainConfig, dump_resolved
from ..engine import with_choices
from ..errors import ConfigError, TrainingError
from ..files import replacing
from ..program import Program
from ..program.format import from_bytes
from . import checkpoint as checkpoints
from .explain import describe
from .prepare import Prepared, check_disk, prepare
from .report import Progress, banner, plot_losses, slow_products
from .result import save_result
from .session import TrainSession
from .trainer import METRICS_FILE, RunResult, Trainer

CONFIG_FILE = "config.yaml"
PROGRAM_FILE = "program.bin"


def run_training(config: TrainConfig, mode: Mode, console: Any) -> RunResult:
    """Trains. What was trained is written at the end, and after Ctrl-C too; RunResult.status says which it was."""
    prepared = prepare(config, mode)
    check_disk(prepared)
    folder = Path(config.output_dir)
    found = _checkpoint_to_resume(config, folder)
    if found is not None:
        prepared.weights.choices = _program_of(folder)
    session = TrainSession.of(prepared)
    trainer = Trainer(prepared, session, Progress(prepared, console))
    if found is not None:
        trainer.resume(found)
    dump_resolved(config, folder / CONFIG_FILE)
    if prepared.config.backend != "cpu":
        with replacing(folder / PROGRAM_FILE, TrainingError) as file:
            file.write(with_choices(prepared.plan.program, session.session).to_bytes())
    console.print(banner(prepared, session, trainer.step))
    for line in slow_products(prepared.plan.program, session.session):
        console.print(line, style="yellow")
    for loader in (prepared.loader, *prepared.evaluations.values()):
        for warning in loader.dataset.warnings:
            console.print(warning, style="yellow")
    longest, known = max(map(int, prepared.loader.dataset.lengths)), prepared.model.hyperparameters.max_positions
    if longest > known:
        console.print(f"documents of up to {longest:,} tokens; the model was made for {known:,} positions", style="yellow")
    result = trainer.run()
    written = save_result(prepared, session, folder)
    history = _whole_history(folder)
    if history:
        plot_losses(history, folder, config.run_name)
    for name, loss in result.evaluation.items():
        console.print(f"{name}: loss {loss:.4f}")
    console.print(f"{result.status} after step {result.steps}; written to {written}")
    return result


def _program_of(folder: Path) -> Program | None:
    """What a run on a device left of its program; None where it left nothing, or nothing that can be read."""
    try:
        return from_bytes((folder / PROGRAM_FILE).read_bytes())
    except (OSError, ValueError):
        return None


def _checkpoint_to_resume(config: TrainConfig, folder: Path) -> checkpoints.Checkpoint | None:
    choice = config.resume_from_checkpoint
    if choice is False:
        if checkpoints.list_checkpoints(folder):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run, and resume_from_checkpoint is false",
                "Choose another output_dir, or remove that folder.",
            )
        return None
    if choice == "auto":
        found = checkpoints.list_checkpoints(folder)
        return found[-1] if found else None
    path = Path(str(choice))
    for candidate in checkpoints.list_checkpoints(path.parent):
        if candidate.path == path:
            return candidate
    raise TrainingError(f"{path} is not a checkpoint", f"A checkpoint is a folder step_XXXXXXXX with {checkpoints.INFO_FILE}.")


def _whole_history(folder: Path) -> list[dict[str, Any]]:
    """Records of all processes that worked on this run."""
    with (folder / METRICS_FILE).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def explain(config: TrainConfig, mode: Mode, dry_run: bool) -> str:
    """The plan of a run: passes, memory by part, kernels, and every fast path with why it is on or off."""
    prepared: Prepared = prepare(config, mode)
    return describe(prepared, verbose=not dry_run)
