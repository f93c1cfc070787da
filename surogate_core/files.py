"""Files that appear whole or not at all: a crash, or a full disk, leaves the old one or the new one, never a piece."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import SurogateError


@contextlib.contextmanager
def replacing(path: str | Path, kind: type[SurogateError]) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, and vanishes when the block raises.

    Written under a temporary name in the same folder, synced, renamed; the folder is synced too. An OSError becomes an
    error of ``kind``.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(descriptor)
        os.chmod(temporary, 0o644)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise kind(f"cannot write {path}: {error.strerror or error}; what was there before is untouched") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_text(path: str | Path, text: str, kind: type[SurogateError]) -> None:
    """Replaces ``path`` by UTF-8 text."""
    with replacing(path, kind) as file:
        file.write(text.encode())


def sync_folder(folder: Path) -> None:
    """Makes what was renamed in a folder survive a loss of power. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
