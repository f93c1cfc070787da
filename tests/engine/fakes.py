"""What stands in for a plugin's kernels and for a device: C files of this folder, compiled and registered, once a process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

import surogate_core
from surogate_core import engine
from surogate_core.engine.library import native


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


def shipped(name: str) -> Path:
    """A library that ships with the engine."""
    return Path(native().engine_directory()) / name


class FakeDevice:
    """The compiled fake_device.c: what it counted, and its switches."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.cpu = ctypes.create_string_buffer(str(shipped("libsurogate_cpu.so")).encode())
        ctypes.c_void_p.in_dll(self.library, "fake_cpu_library").value = ctypes.addressof(self.cpu)
        address = ctypes.cast(self.library.fake_device, ctypes.c_void_p).value
        engine.register_library(capsule(address, b"surogate.kernel_library_fn_v1"), "fake_device.c")

    def __getattr__(self, name: str) -> int:
        return ctypes.c_long.in_dll(self.library, f"fake_{name}").value

    def refuse(self, which: int) -> None:
        """The kernel that refuses to be put on a stream, counted from 1; 0: none."""
        ctypes.c_long.in_dll(self.library, "fake_refuse_run").value = which


def compiled(source: str, folder: Path) -> Path:
    """A library built from a C file of this folder, as a plugin's would be."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc or gcc) to build {source} with")
    path = folder / f"lib{Path(source).stem}.so"
    include = f"-I{surogate_core.include_dir()}"
    file = Path(__file__).with_name(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", include, str(file), "-o", str(path)], check=True)
    return path


@cache
def fake_device() -> FakeDevice:
    """Backend "fake", which a process can register once."""
    return FakeDevice(compiled("fake_device.c", Path(tempfile.mkdtemp(prefix="fake_device"))))
