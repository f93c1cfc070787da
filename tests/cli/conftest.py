from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surogate_core.cli.app import app


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs the command with these words; the result has `exit_code`, `stdout`, `stderr`, `output`."""
    return lambda *words, input=None: CliRunner().invoke(app, [str(word) for word in words], input=input)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    for name in ("m.gguf", "a.jsonl"):
        (tmp_path / name).touch()
    file = tmp_path / "run.yaml"
    file.write_text("model: m.gguf\ndatasets: a.jsonl\nmicro_batch_size: 3\n")
    return file


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """Puts a module in place of one that does the work of a verb; gives the list of the calls it will get."""

    def put(module: str, **functions: Callable[..., Any]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []
        fake = types.ModuleType(f"surogate_core.{module}")

        def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                calls.append((name, arguments, named))
                return function(*arguments, **named)

            return call

        for name, function in functions.items():
            setattr(fake, name, function if isinstance(function, type) else recorded(name, function))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        return calls

    return put
