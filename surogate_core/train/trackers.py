"""Where metrics go: the run's own metrics.jsonl always, and what `report_to` names beside it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """metrics.jsonl: one object a line, on disk after every step. A resumed run cuts off what its checkpoint precedes."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = []
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) < first_step]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(line + "\n" for line in kept)
        self._file.flush()

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a crash cut in half."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


class CsvTracker:
    """metrics.csv beside the run's other files: for spreadsheets. Columns are those of the first step."""

    def __init__(self, config: Any, output_dir: Path) -> None:
        self._file = (output_dir / "metrics.csv").open("w", newline="", encoding="utf-8")
        self._writer: csv.DictWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), extrasaction="ignore", restval="")
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    def finish(self, status: str) -> None:
        self._file.close()


BUILTIN = {"csv": CsvTracker}
"""Trackers of the core, by name."""
