from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from surogate_core.config import Mode, TrainConfig, resolve

MINIMAL = "model: m.gguf\ndatasets: a.jsonl\n"


@dataclass
class Workshop:
    """A folder with a model, two data sets and a configuration file."""

    folder: Path
    notes: list[str] = field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "run.yaml"

    def read(
        self, text: str, *overrides: str, mode: Mode = "sft", environ: dict[str, str] | None = None
    ) -> TrainConfig:
        self.notes.clear()
        self.file.write_text(text, encoding="utf-8")
        return resolve(self.file, overrides, mode=mode, note=self.notes.append, environ=environ or {})

    def with_lines(self, *lines: str, **arguments: object) -> TrainConfig:
        """The minimal configuration and these lines, the first of which is line 3."""
        return self.read(MINIMAL + "\n".join(lines) + "\n", **arguments)


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    for name in ("m.gguf", "a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    return Workshop(tmp_path)


@pytest.fixture
def with_lines(workshop: Workshop) -> Callable[..., TrainConfig]:
    return workshop.with_lines
