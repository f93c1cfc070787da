"""What the CUDA backend needs of a machine: a driver, a device, and the libraries that come as wheels.

Nothing here creates a CUDA context: the driver is asked through ctypes, and libraries are only opened. Where something is
missing the reason says what to do; programs then run on the CPU.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
NEEDED_DRIVER = 13000
"""CUDA 13.0, which drivers from 580 on speak."""
NEEDED_ARCHITECTURE = 80
LIBRARY = Path(__file__).resolve().parent.parent / "lib" / "libsurogate_cuda.so"
CUDNN_LIBRARY = LIBRARY.with_name("libsurogate_cudnn.so")
INSTALL = "pip install 'surogate-core[cuda]'"

_NO_DEVICE, _MISMATCH = 100, 803
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Wheel:
    """A shared library and the distribution that brings it."""

    distribution: str
    library: str


CUBLAS = Wheel("nvidia-cublas", "libcublasLt.so.13")
CUDNN = Wheel("nvidia-cudnn-cu13", "libcudnn.so.9")
NVRTC = Wheel("nvidia-cuda-nvrtc", "libnvrtc.so.13")
"""cuDNN compiles its attention with it, and finds it by name."""


@dataclass(frozen=True)
class Device:
    """What the driver says of one device. architecture: ten times the compute capability, 90 for 9.0."""

    index: int
    name: str
    architecture: int
    total_bytes: int


@dataclass(frozen=True)
class Driver:
    """version: the newest CUDA that the driver speaks, 13000 for 13.0 (0 where there is no driver). problem: why no device
    can be used, or None."""

    version: int = 0
    devices: tuple[Device, ...] = ()
    problem: str | None = None


def spoken(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def find_driver() -> Driver:
    """Asks the driver for its version and its devices. Initialises the driver, and opens no device."""
    try:
        cuda = _open_driver()
    except OSError:
        return Driver(problem=f"no driver ({DRIVER} cannot be opened): install NVIDIA's driver, 580 or later")
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)):
        return Driver(problem="the NVIDIA driver does not tell its version: reinstall it")
    if version.value < NEEDED_DRIVER:
        return Driver(version.value, problem=(
            f"the NVIDIA driver speaks CUDA {spoken(version.value)}, these kernels need {spoken(NEEDED_DRIVER)}: "
            "update the driver to 580 or later"
        ))
    result = cuda.cuInit(0)
    if result == _NO_DEVICE:
        return Driver(version.value, problem=_NOTHING_SEEN)
    if result:
        todo = "reboot, so that the driver's two halves match" if result == _MISMATCH else "see what nvidia-smi says"
        return Driver(version.value, problem=f"the NVIDIA driver does not start: {_message(cuda, result)}: {todo}")
    devices = tuple(_devices(cuda))
    if not devices:
        return Driver(version.value, problem=_NOTHING_SEEN)
    problem = None
    if all(device.architecture < NEEDED_ARCHITECTURE for device in devices):
        best = max(devices, key=lambda device: device.architecture)
        problem = (f"{best.name} has compute capability {best.architecture / 10:.1f}; the kernels need "
                   f"{NEEDED_ARCHITECTURE / 10:.1f} or later")
    return Driver(version.value, devices, problem)


_NOTHING_SEEN = "the driver shows no device: see what nvidia-smi lists, and whether CUDA_VISIBLE_DEVICES hides it"


def _open_driver() -> Any:
    return ctypes.CDLL(DRIVER)


def _devices(cuda: Any) -> list[Device]:
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name, total = ctypes.create_string_buffer(128), ctypes.c_size_t()
        results = (
            cuda.cuDeviceGet(ctypes.byref(handle), index),
            cuda.cuDeviceGetName(name, len(name), handle),
            cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle),
            cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, handle),
            cuda.cuDeviceTotalMem_v2(ctypes.byref(total), handle),
        )
        if not any(results):
            found.append(Device(index, name.value.decode(), 10 * major.value + minor.value, total.value))
    return found


def _message(cuda: Any, result: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorString(result, ctypes.byref(text)) or text.value is None:
        return f"error {result}"
    return f"{text.value.decode()} (error {result})"


def kernel_module() -> str | None:
    """The version of the driver's kernel module, "580.159.04"; None where it does not say."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _KERNEL_MODULE.read_text(encoding="ascii"))
    except OSError:
        return None
    return None if found is None else found[0]


def not_built() -> str | None:
    """Why this installation has no CUDA kernels, or None."""
    if LIBRARY.exists():
        return None
    return (f"this installation was built without CUDA ({LIBRARY.name} is not in {LIBRARY.parent}): install it where nvcc 13 "
            "is found, or from a wheel that has it")


def unavailable() -> str | None:
    """Why programs cannot run on a CUDA device of this machine, with what to do; None where they can. The driver comes
    first, then this installation, then the wheels."""
    return find_driver().problem or not_built() or preload()


@cache
def preload() -> str | None:
    """Opens cuBLASLt, and cuDNN where it is there, of their wheels, so that the kernels find them by name. Returns why
    cuBLASLt cannot be opened, or None. Without cuDNN attention runs on kernels of our own: see :func:`without_cudnn`."""
    problem = _open(CUBLAS)
    if problem is None:
        without_cudnn()
    return problem


@cache
def without_cudnn() -> str | None:
    """Why attention does not run through cuDNN, or None."""
    if not CUDNN_LIBRARY.exists():
        return f"this installation was built without it ({CUDNN_LIBRARY.name} is not in {CUDNN_LIBRARY.parent})"
    problem = _open(CUDNN)
    if problem is None:
        _open(NVRTC)  # cuDNN plans no attention without it; our library then refuses to load, and says so
    return problem


def find(wheel: Wheel) -> Path | None:
    """The library's file as its distribution lists it, or None where that isn't installed."""
    try:
        listed = files(wheel.distribution) or ()
    except PackageNotFoundError:
        return None
    paths = (Path(str(f.locate())) for f in listed if f.name == wheel.library)
    return next((path.resolve() for path in paths if path.exists()), None)


def _open(wheel: Wheel) -> str | None:
    """Opens a library for everybody in this process. Returns None, or why not."""
    path = find(wheel)
    try:
        ctypes.CDLL(str(path or wheel.library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if path is None:
            return f"{wheel.library} cannot be opened, as {wheel.distribution} is not installed: {INSTALL}"
        return f"{wheel.library} cannot be opened: {error}: {INSTALL}"
    return None


def library_versions() -> dict[str, str]:
    """Versions of the libraries that this process can use, by name; those that cannot be opened are left out."""
    versions = {}
    if preload() is None:
        number = _number(CUBLAS, "cublasLtGetVersion")
        versions["cuBLASLt"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    if without_cudnn() is None:
        number = _number(CUDNN, "cudnnGetVersion")
        versions["cuDNN"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return versions


def _number(wheel: Wheel, function: str) -> int:
    ask = getattr(ctypes.CDLL(str(find(wheel) or wheel.library)), function)
    ask.restype = ctypes.c_size_t
    return int(ask())
