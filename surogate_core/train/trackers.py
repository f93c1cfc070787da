"""Where metrics go: the run's own metrics.jsonl always, and what `report_to` names beside it."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..errors import TrainingError
from ..files import write_text


class JsonLines:
    """metrics.jsonl: one object a line, handed to the system after every step. A resumed run keeps what its checkpoint
    has seen and cuts off the rest. Raises TrainingError where the file cannot be written."""

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        kept = []
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) < first_step]
        write_text(path, "".join(line + "\n" for line in kept), TrainingError)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.path}: {error.strerror or error}", "Free space on that disk; the same command goes on."
            ) from error

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """The step of a line; infinity for one that a crash cut in half."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


class CsvTracker:
    """metrics.csv beside the run's other files: for spreadsheets. A metric that comes up later (an evaluation) gets a column
    of its own then, empty in the rows before. A resumed run keeps the rows before its own first."""

    def __init__(self, config: Any, output_dir: Path) -> None:
        self._path = output_dir / "metrics.csv"
        self._columns: list[str] = []
        self._file: TextIO | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": step, **metrics}
        if self._file is None or not row.keys() <= set(self._columns):
            self._open(row)
        csv.DictWriter(self._file, self._columns, restval="").writerow(row)
        self._file.flush()

    def _open(self, following: dict[str, float]) -> None:
        """Writes the file anew with columns for ``following`` and the rows before it."""
        columns, rows = [], []
        if self._path.exists() and following["step"] > 1:
            with self._path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if (row.get("step") or "").isdigit() and int(row["step"]) < following["step"]]
                columns = list(reader.fieldnames or [])
        self._columns = list(dict.fromkeys([*columns, *following]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, extrasaction="ignore", restval="")
        writer.writeheader()
        writer.writerows(rows)
        if self._file is not None:
            self._file.close()
        write_text(self._path, text.getvalue(), TrainingError)
        self._file = self._path.open("a", newline="", encoding="utf-8")

    def finish(self, status: str) -> None:
        if self._file is not None:
            self._file.close()


BUILTIN = {"csv": CsvTracker}
"""Trackers of the core, by name."""
