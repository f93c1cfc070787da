"""The native module, and the kernel libraries that are loaded into it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import EngineError
from . import cuda, onednn


@cache
def native() -> ModuleType:
    """The native module, without any kernel library. Raises :class:`EngineError` if it isn't built or doesn't load."""
    try:
        from .. import _native
    except ImportError as error:
        raise EngineError(
            f"the native engine cannot be loaded: {error}",
            "in a working copy, build it with `make native`; otherwise reinstall surogate-core",
        ) from error
    _native.set_error_type(EngineError)
    return _native


@cache
def load() -> ModuleType:
    """Loads the engine and the CPU backend, once; later calls return the same module.

    A CPU that cannot run it is no error here: :func:`libraries` keeps the reason, and only an op that needs it fails.
    """
    module = native()
    onednn.preload()
    try:
        module.load_kernel_library(str(Path(module.engine_directory()) / "libsurogate_cpu.so"))
    except EngineError:
        pass  # the reason is kept by the registry
    return module


@cache
def load_backend(name: str) -> None:
    """Loads the kernel libraries of a backend that ships with the engine, once. Raises :class:`EngineError` with the reason
    where this machine cannot use it; plugins' backends are registered by their plugins."""
    module = load()
    if name != "cuda":
        return
    reason = cuda.unavailable()
    if reason is not None:
        raise EngineError(f"backend 'cuda' cannot be used here: {reason}")
    module.load_kernel_library(str(cuda.LIBRARY))
    if cuda.CUDNN_LIBRARY.exists():
        try:
            module.load_kernel_library(str(cuda.CUDNN_LIBRARY))
        except EngineError:
            pass  # a faster kernel less; the reason is kept by the registry, for `surogate doctor` and `explain`


def backend_module(name: str) -> ModuleType:
    """The native module, with the kernels of backend ``name`` loaded. Raises :class:`EngineError`."""
    load_backend(name)
    return load()


def register_library(capsule: object, origin: str) -> None:
    """Registers the kernels of a plugin.

    `capsule`: a PyCapsule named ``surogate.kernel_library_v1`` that holds a ``const sg_kernel_library *``, or one named
    ``surogate.kernel_library_fn_v1`` that holds an ``sg_kernel_library_fn``. `origin`: who brings it, for listings and
    errors. The same table again changes nothing. Raises :class:`EngineError` for another ABI version, naming both
    numbers, and for a kernel that is incomplete or whose name is taken.
    """
    load().register_library(capsule, origin)


def load_library(path: str | Path) -> None:
    """Opens a kernel library, a file that exports ``sg_kernel_library_v1``. Raises :class:`EngineError`."""
    load().load_kernel_library(str(path))


def kernels() -> list[dict[str, Any]]:
    """Every kernel: op, backend, name, library, deterministic, capturable, in_place_input (index or None)."""
    return load().kernels()


def libraries() -> list[dict[str, Any]]:
    """Every kernel library met so far: name, version, origin, abi, num_kernels, failure (why not loaded, or None)."""
    return load().libraries()


def cpu_features() -> dict[str, bool]:
    """The instruction sets of this processor that a kernel may ask for, by the compiler's names."""
    return native().cpu_features()
