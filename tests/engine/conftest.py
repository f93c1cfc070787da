from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from surogate_core import engine

from .fakes import FakeDevice, FakeKernels, compiled, fake_device


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeKernels:
    """A library of fake kernels of the CPU, registered by its path."""
    path = compiled("fake_kernels.c", tmp_path_factory.mktemp("fake"))
    fake = FakeKernels(path)
    engine.load_library(path)
    return fake


@pytest.fixture(scope="session")
def _fake_device() -> FakeDevice:
    return fake_device()


@pytest.fixture
def device(_fake_device: FakeDevice) -> Iterator[FakeDevice]:
    """Backend "fake": two devices that are no devices. Afterwards nothing may have written past the end of memory."""
    yield _fake_device
    _fake_device.refuse(0)
    gc.collect()
    assert (_fake_device.damaged, _fake_device.failed) == (0, 0)
