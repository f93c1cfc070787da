"""A run in a process of its own, to be stopped: worker.py CONFIG [milliseconds a step takes longer [moment to die at]]."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from surogate_core.cli.app import app
from surogate_core.train import checkpoint as checkpoints
from surogate_core.train.trainer import Trainer


def slow_down(seconds: float) -> None:
    whole_step = Trainer._one_step

    def slower(self):
        time.sleep(seconds)
        return whole_step(self)

    Trainer._one_step = slower


def die_at(moment: str) -> None:
    """Kills this process during its second save: with half a file written, before the rename, or while removing."""
    calls = {"save": 0}
    save, write_file, rename, rmtree = checkpoints.save, checkpoints.write_file, os.rename, shutil.rmtree

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args, **named):
        calls["save"] += 1
        return save(*args, **named)

    def half_a_file(path, tensors):
        if calls["save"] == 2:
            Path(path).write_bytes(b"half")
            die()
        write_file(path, tensors)

    def no_rename(old, new):
        if calls["save"] == 2:
            die()
        rename(old, new)

    def half_removed(path, **named):
        if calls["save"] == 2:
            (Path(path) / "state.safetensors").unlink()
            die()
        rmtree(path, **named)

    checkpoints.save = counted  # the trainer looks it up in the module
    if moment == "state":
        checkpoints.write_file = half_a_file
    elif moment == "rename":
        os.rename = no_rename
    else:
        shutil.rmtree = half_removed


if __name__ == "__main__":
    slow_down(float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0)
    if len(sys.argv) > 3:
        die_at(sys.argv[3])
    app(["sft", sys.argv[1]])
