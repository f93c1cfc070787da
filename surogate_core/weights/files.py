"""Reading files by mapping them, and replacing files so that a crash leaves the old one or the new one, never a piece."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import WeightError


def map_file(path: Path) -> np.ndarray:
    """The file's bytes as a read-only uint8 array backed by the file itself; raises WeightError when there are none."""
    try:
        if path.stat().st_size == 0:
            raise WeightError(f"{path} is empty; copy or download it again")
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises WeightError naming the file (and the line) otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightError(f"cannot read {path}: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise WeightError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file whole?") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise WeightError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the block ends, and vanishes when the block raises.

    Written under a temporary name in the same folder, synced, renamed; the folder is synced too.
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
        _sync_folder(path.parent)
    except OSError as error:
        raise WeightError(
            f"cannot write {path}: {error.strerror or error}; what was there before is untouched"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_json(path: Path, value: Any) -> None:
    """Replaces ``path`` by the value as indented JSON."""
    with replacing(path) as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    """The array's bytes, little endian and row-major."""
    file.write(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b"")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
