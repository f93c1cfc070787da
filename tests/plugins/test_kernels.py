"""Kernel libraries on their way from a plugin to the engine; here written with ctypes, bound by no binding library."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.errors import PluginError
from surogate_core.plugins import PluginManager, hookimpl

MAX_RANK = 6
OK = 0
KEEP: list[object] = []  # what the engine points to must outlive the process's use of it


class Tensor(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_RANK),
        ("strides", ctypes.c_int64 * MAX_RANK),
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("host", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("op", ctypes.c_char_p),
        ("num_inputs", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
        ("num_attrs", ctypes.c_int32),
        ("inputs", ctypes.POINTER(ctypes.POINTER(Tensor))),
        ("outputs", ctypes.POINTER(ctypes.POINTER(Tensor))),
    ]


CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(Call))


class Kernel(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("op", ctypes.c_char_p),
        ("backend", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("traits", ctypes.c_uint32),
        ("in_place_input", ctypes.c_int32),
        ("supports", CALLBACK),
        ("workspace", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("run", CALLBACK),
    ]


class Library(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("abi_major", ctypes.c_uint32),
        ("abi_minor", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_char_p),
        ("num_kernels", ctypes.c_int32),
        ("kernels", ctypes.POINTER(ctypes.POINTER(Kernel))),
    ]


def double_it(call) -> int:
    x, y = call.contents.inputs[0].contents, call.contents.outputs[0].contents
    count = x.shape[0]
    source, target = (ctypes.cast(t.data, ctypes.POINTER(ctypes.c_float)) for t in (x, y))
    for i in range(count):
        target[i] = 2.0 * source[i]
    return OK


def library_capsule(abi_major: int = 1) -> object:
    """A kernel of the core's op `scale`, on a backend nobody else uses: kernels stay for the whole process."""
    kernel = Kernel(
        struct_size=ctypes.sizeof(Kernel), op=b"scale", backend=b"acme", name=b"ctypes", traits=1,
        supports=CALLBACK(lambda call: 1), run=CALLBACK(double_it),
    )
    table = (ctypes.POINTER(Kernel) * 1)(ctypes.pointer(kernel))
    library = Library(ctypes.sizeof(Library), abi_major, 0, b"acme_ctypes", b"1.0", 1, table)
    KEEP.extend((kernel, table, library))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(library), b"surogate.kernel_library_v1", None)


class Plugin:
    def __init__(self, library: object) -> None:
        self.library = library

    @hookimpl
    def surogate_kernel_libraries(self, register):
        register("ctypes", self.library)


def manager_with(library: object) -> PluginManager:
    manager = PluginManager(group="no-such-group")
    manager.register(Plugin(library), "acme-kernels", "4.2")
    return manager


def test_a_plugins_kernel_runs():
    manager = manager_with(library_capsule())
    manager.load_kernels()
    manager.load_kernels()
    x = np.arange(5, dtype=np.float32)
    y = np.empty_like(x)
    engine.run_op("scale", [x], [y], {"factor": 2.0}, backend="acme")
    np.testing.assert_array_equal(y, 2 * x)
    assert [row["origin"] for row in engine.libraries() if row["name"] == "acme_ctypes"] == ["acme-kernels 4.2"]


def test_another_abi_is_refused_with_both_numbers_and_fails_the_plugin():
    manager = manager_with(library_capsule(abi_major=99))
    manager.load_kernels()
    report = manager.report()[-1]
    assert report.status == "failed" and "99" in report.reason and "1" in report.reason
    assert "ctypes" not in manager.kernel_libraries


def test_a_refused_library_is_fatal_where_the_config_names_its_plugin():
    manager = manager_with(library_capsule(abi_major=99))
    manager.load(allow=["acme-kernels"])
    with pytest.raises(PluginError, match="acme-kernels 4.2 does not load: .*99"):
        manager.load_kernels()


def test_a_file_that_is_no_kernel_library(tmp_path):
    path = tmp_path / "libacme.so"
    path.write_bytes(b"not a library")
    manager = manager_with(path)
    manager.load_kernels()
    report = manager.report()[-1]
    assert report.status == "failed" and "libacme.so" in report.reason
