"""Finding oneDNN, which the CPU backend opens at run time for plain matrix products.

The distribution onednn-cpu-gomp puts libdnnl.so.3 into the environment's lib folder, where the loader doesn't look.
Opened here by its path, it is found by its name afterwards. Without it the backend's own kernels run.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

DISTRIBUTION = "onednn-cpu-gomp"
LIBRARY = "libdnnl.so.3"


def find() -> Path | None:
    """The library's file as its distribution lists it, or None where that isn't installed."""
    try:
        listed = files(DISTRIBUTION) or ()
    except PackageNotFoundError:
        return None
    paths = (Path(str(f.locate())) for f in listed if f.name == LIBRARY)
    return next((path.resolve() for path in paths if path.exists()), None)


@cache
def preload() -> str | None:
    """Opens the library, once. Returns None when the backend can find it, else why not (for `surogate doctor`)."""
    path = find()
    try:
        ctypes.CDLL(str(path) if path is not None else LIBRARY)
    except OSError as error:
        hint = "" if path is not None else f"; {DISTRIBUTION} is not installed"
        return f"oneDNN cannot be opened: {error}{hint}"
    return None
