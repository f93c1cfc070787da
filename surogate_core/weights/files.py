"""Reading files by mapping them, and what whole arrays and JSON objects are written with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import WeightError
from ..files import write_text


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


def write_json(path: Path, value: Any) -> None:
    """Replaces ``path`` by the value as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", WeightError)


def write_array(file: BinaryIO, array: np.ndarray) -> None:
    """The array's bytes, little endian and row-major."""
    file.write(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else b"")
