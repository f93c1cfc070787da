"""Checkpoints: everything a run needs to go on as if it had never stopped, in one folder that appears whole or not at all.

    step_00000050/
        state.safetensors   "master" and the optimizer's states, one tensor per trained parameter: "master/<name>", ...,
                            in the dtype that the run keeps it in
        checkpoint.json     step, position in the data, and what must not change when a run goes on

The folder is written under a temporary name, synced and renamed. Parameters are stored by name, not by place, so another
layout can load them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import TrainingError, WeightError
from ..files import sync_folder
from ..weights.files import read_json, write_json
from ..weights.safetensors_file import SafetensorsFile, write_file
from ..weights.tensor import LazyTensor
from .session import TrainSession

STATE_FILE, INFO_FILE = "state.safetensors", "checkpoint.json"
_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    @property
    def info(self) -> dict[str, Any]:
        """What checkpoint.json holds; read anew each time."""
        return read_json(self.path / INFO_FILE)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Whole checkpoints in a run's folder, oldest first; what a killed save left behind is not one."""
    found = []
    if folder.is_dir():
        for child in folder.iterdir():
            match = _NAME.fullmatch(child.name)
            if match and (child / INFO_FILE).is_file():
                found.append(Checkpoint(child, int(match[1])))
    return sorted(found, key=lambda c: c.step)


def save(folder: Path, step: int, session: TrainSession, info: Mapping[str, Any], keep: int | None) -> Checkpoint:
    """Writes a checkpoint and removes those beyond the ``keep`` newest. Checkpoints of later steps are of a course that the
    run has left, by going on from an earlier one: they go too. TrainingError when it cannot be written: nothing of it
    stays, and the checkpoints from before are untouched."""
    final = folder / f"step_{step:08d}"
    temporary = folder / f".{final.name}.tmp"
    _remove_leftovers(folder)
    try:
        temporary.mkdir(parents=True)
        write_file(temporary / STATE_FILE, _tensors(session))
        write_json(temporary / INFO_FILE, {**info, "step": step})
        for left in list_checkpoints(folder):
            if left.step >= step:
                _discard(left.path)
        os.rename(temporary, final)
        sync_folder(folder)
    except (OSError, WeightError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = list_checkpoints(folder)
        raise TrainingError(
            f"cannot write checkpoint {final}: {getattr(error, 'strerror', None) or error}",
            f"Free space on that disk; the newest checkpoint is {kept[-1].path if kept else 'none'}.",
        ) from error
    if keep is not None:
        for old in list_checkpoints(folder)[:-keep]:
            _discard(old.path)
    return Checkpoint(final, step)


def _tensors(session: TrainSession) -> Iterator[LazyTensor]:
    for state in session.states:
        for p in session.layout.parameters.values():
            yield LazyTensor(f"{state}/{p.name}", session.state_dtype(state, p), p.shape, partial(session.state, state, p))


def _discard(path: Path) -> None:
    """Removes a checkpoint such that a crash midway leaves none that looks whole."""
    gone = path.with_name(f".{path.name}.gone.tmp")
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    for child in folder.glob(".step_*.tmp"):
        shutil.rmtree(child, ignore_errors=True)


def load(checkpoint: Checkpoint, session: TrainSession) -> None:
    """Restores parameters and optimizer state. TrainingError when the checkpoint is of another run."""
    file = SafetensorsFile(checkpoint.path / STATE_FILE)
    wanted = {f"{state}/{name}" for state in session.states for name in session.layout.parameters}
    have = set(file.names())
    if wanted != have:
        odd = sorted(wanted ^ have)[0]
        where = "lacks" if odd in wanted else "also has"
        raise TrainingError(
            f"checkpoint {checkpoint.path} {where} {odd!r}: it was trained with other parameters or another optimizer",
            "Start a new run in another output_dir, or set resume_from_checkpoint: false.",
        )
    for state in session.states:
        for p in session.layout.parameters.values():
            tensor = file.get(f"{state}/{p.name}")
            if tensor.shape != p.shape:
                raise TrainingError(
                    f"checkpoint {checkpoint.path}: {p.name} has shape {tensor.shape}, this run trains {p.shape}",
                    "Resume with the settings of the run that wrote it (lora_rank, model).",
                )
            kept = session.state_dtype(state, p)
            if tensor.dtype != kept:
                raise TrainingError(
                    f"checkpoint {checkpoint.path} has {state}/{p.name} in {tensor.dtype}, this run keeps it in {kept}",
                    "Resume with the master_dtype and optimizer_state_dtype of the run that wrote it.",
                )
            session.set_state(state, p, tensor.data)
    session.refresh()
