from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import surogate_core
from surogate_core import engine


class FakeKernels:
    """The compiled fake_kernels.c: its path, its functions, and capsules made of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.library.fake_table.restype = ctypes.c_void_p

    def table(self, which: int) -> object:
        return capsule(self.library.fake_table(which), b"surogate.kernel_library_v1")

    def function(self, name: str) -> object:
        address = ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
        return capsule(address, b"surogate.kernel_library_fn_v1")

    def live_states(self) -> int:
        return self.library.fake_live_states()


_names: list[bytes] = []  # a capsule does not copy its name


def capsule(address: int, name: bytes) -> object:
    _names.append(name)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, name, None)


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeKernels:
    """A library of fake kernels, built as a plugin's would be and registered by its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to build the fake kernel library with")
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).with_name("fake_kernels.c")
    include = f"-I{surogate_core.include_dir()}"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", include, str(source), "-o", str(path)], check=True)
    fake = FakeKernels(path)
    engine.load_library(path)
    return fake
