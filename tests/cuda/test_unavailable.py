"""Machines that cannot run CUDA programs, each with its reason: a stand-in for the driver tells one of them at a time."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from surogate_core import engine
from surogate_core.engine import cuda
from surogate_core.errors import ConfigError, EngineError
from surogate_core.plugins import get_manager

from ..train import runs


class Driver:
    """What ctypes would give for libcuda.so.1. devices: (name, major, minor) each."""

    def __init__(self, version: int = 13000, init: int = 0, devices: tuple = (("NVIDIA H200", 9, 0),)) -> None:
        self.version, self.init, self.devices = version, init, devices

    def cuDriverGetVersion(self, version) -> int:
        version._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuGetErrorString(self, result: int, text) -> int:
        text._obj.value = b"what went wrong"
        return 0

    def cuDeviceGetCount(self, count) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, handle, index: int) -> int:
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size: int, handle) -> int:
        name.value = self.devices[handle.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, handle) -> int:
        value._obj.value = self.devices[handle.value][{75: 1, 76: 2}[attribute]]
        return 0

    def cuDeviceTotalMem_v2(self, total, handle) -> int:
        total._obj.value = 141 << 30
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets up a machine with a driver (or an error that opening it gives); the kernels are built and the wheels are there."""
    (tmp_path / "libsurogate_cuda.so").touch()
    monkeypatch.setattr(cuda, "LIBRARY", tmp_path / "libsurogate_cuda.so")
    monkeypatch.setattr(cuda, "preload", lambda: None)

    def put(driver: Driver | OSError) -> None:
        def opened() -> Driver:
            if isinstance(driver, OSError):
                raise driver
            return driver

        monkeypatch.setattr(cuda, "_open_driver", opened)

    return put


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (OSError("no such file"), "no driver .*: install NVIDIA's driver, 580 or later"),
        (Driver(version=12040), r"speaks CUDA 12\.4, these kernels need 13\.0: update the driver"),
        (Driver(init=100), "shows no device: .* CUDA_VISIBLE_DEVICES"),
        (Driver(devices=()), "shows no device"),
        (Driver(init=803), r"what went wrong \(error 803\): reboot"),
        (Driver(init=999), r"what went wrong \(error 999\): see what nvidia-smi says"),
        (Driver(devices=(("Tesla T4", 7, 5),)), r"Tesla T4 has compute capability 7\.5; the kernels need 8\.0"),
    ],
)
def test_each_reason_says_what_to_do(machine, driver, reason):
    machine(driver)
    assert re.search(reason, cuda.unavailable())
    assert get_manager().backends["cuda"].unavailable() == cuda.unavailable()


def test_a_machine_that_can(machine):
    machine(Driver(version=13010, devices=(("NVIDIA H200", 9, 0), ("NVIDIA RTX", 12, 0))))
    assert cuda.unavailable() is None
    found = cuda.find_driver()
    assert cuda.spoken(found.version) == "13.1"
    assert [(d.index, d.name, d.architecture, d.total_bytes >> 30) for d in found.devices] == [
        (0, "NVIDIA H200", 90, 141), (1, "NVIDIA RTX", 120, 141)]


def test_an_installation_without_kernels_or_wheels(machine, monkeypatch):
    machine(Driver())
    monkeypatch.setattr(cuda, "preload", lambda: "libcublasLt.so.13 cannot be opened")
    assert cuda.unavailable() == "libcublasLt.so.13 cannot be opened"
    monkeypatch.setattr(cuda, "LIBRARY", Path("/nowhere/libsurogate_cuda.so"))
    assert "built without CUDA (libsurogate_cuda.so is not in /nowhere)" in cuda.unavailable()


def test_a_missing_wheel_names_what_installs_it(tmp_path):
    absent = cuda.Wheel("nvidia-no-such-thing", "libnothing.so.13")
    assert cuda._open(absent) == (
        f"libnothing.so.13 cannot be opened, as nvidia-no-such-thing is not installed: {cuda.INSTALL}")


def test_a_damaged_library_is_a_reason_too(tmp_path, monkeypatch):
    broken = tmp_path / "libcublasLt.so.13"
    broken.write_text("not a library")
    monkeypatch.setattr(cuda, "find", lambda wheel: broken)
    assert str(broken) in cuda._open(cuda.CUBLAS)


def test_the_module_that_the_kernel_runs(monkeypatch, tmp_path):
    file = tmp_path / "version"
    monkeypatch.setattr(cuda, "_KERNEL_MODULE", file)
    assert cuda.kernel_module() is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12\n")
    assert cuda.kernel_module() == "580.159.04"


def test_a_driver_that_does_not_answer(machine):
    machine(SimpleNamespace(cuDriverGetVersion=lambda version: 1))
    assert "does not tell its version" in cuda.unavailable()


def test_whoever_asks_for_the_device_gets_the_reason(machine, root):
    """The engine's functions, and a run that is configured for it, before anything is read or allocated."""
    machine(OSError("no such file"))
    engine.load_backend.cache_clear()
    for ask in (lambda: engine.load_backend("cuda"), lambda: engine.device_info("cuda"), lambda: engine.Memory("cuda", 64)):
        with pytest.raises(EngineError, match="backend 'cuda' cannot be used here: no driver"):
            ask()
    with pytest.raises(ConfigError, match="backend 'cuda' cannot be used here: no driver"):
        runs.run(runs.config(root, backend="cuda", model=str(root / "nothing")))
    assert runs.run(runs.config(root, backend="auto", max_steps=1)).status == "completed"
