from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import runs


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("train")
    runs.write_model(root / "model")
    runs.write_rows(root / "chat.jsonl", runs.chats(24))
    return root


@pytest.fixture
def root(shared: Path, tmp_path: Path) -> Path:
    """A folder with a tiny model and 24 chats, to train in."""
    shutil.copytree(shared / "model", tmp_path / "model")
    shutil.copy(shared / "chat.jsonl", tmp_path / "chat.jsonl")
    return tmp_path
