"""`surogate doctor` on machines with a GPU, of which only the answers are needed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from surogate_core import engine
from surogate_core.bench import kernels
from surogate_core.cli import doctor
from surogate_core.cli.app import app
from surogate_core.engine import cuda
from surogate_core.plugins import get_manager

H200 = cuda.Device(0, "NVIDIA H200", 90, 141 << 30)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one H200 that nothing is wrong with."""
    assert "cuda" in get_manager().backends  # registered with the real functions, before these are replaced
    monkeypatch.setattr(cuda, "find_driver", lambda: cuda.Driver(13000, (H200,)))
    monkeypatch.setattr(cuda, "kernel_module", lambda: "580.159.04")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cuda, "without_cudnn", lambda: None)
    monkeypatch.setattr(cuda, "library_versions", lambda: {"cuBLASLt": "13.1.0", "cuDNN": "9.19.0"})
    monkeypatch.setattr(engine, "load_backend", lambda name: None)
    info = {"free_bytes": 100 << 30, "total_bytes": 141 << 30, "versions": "driver CUDA 13.0, runtime 13.0"}
    monkeypatch.setattr(engine, "device_info", lambda name: info)
    monkeypatch.setattr(kernels, "chosen_kernels", lambda backend: {"attention": ["cudnn", "cuda"], "rms_norm": ["cuda"]})


def shown() -> str:
    return CliRunner().invoke(app, ["doctor"]).stdout


def test_device_driver_libraries_and_kernels(gpu):
    text = shown()
    for line in (
        "ok gpu driver: CUDA 13.0, kernel module 580.159.04\n",
        "ok gpu 0: NVIDIA H200, compute capability 9.0, 141.0 GiB\n",
        "ok gpu memory: 100.0 GiB of 141.0 GiB unused\n",
        "ok cuda: driver CUDA 13.0, runtime 13.0; cuBLASLt 13.1.0, cuDNN 9.19.0\n",
        "ok cuda kernels of attention: cudnn, cuda\n",
    ):
        assert line in text


def test_a_fast_path_that_is_off_says_why(gpu, monkeypatch):
    monkeypatch.setattr(cuda, "without_cudnn", lambda: "libcudnn.so.9 cannot be opened")
    assert "-- cuDNN: off: libcudnn.so.9 cannot be opened; attention runs on kernels of our own\n" in shown()


def test_without_a_family_all_kernels_are_listed(gpu, monkeypatch):
    monkeypatch.setattr(kernels, "chosen_kernels", lambda backend: {})
    rows = [{"backend": "cuda", "op": "fill", "name": "cuda"}, {"backend": "cpu", "op": "fill", "name": "avx2"}]
    monkeypatch.setattr(engine, "kernels", lambda: rows)
    assert [(f.subject, f.found) for f in doctor._gpu_kernels()] == [("cuda kernels of fill", "cuda")]


def test_a_device_that_cannot_be_used(gpu, monkeypatch):
    monkeypatch.setattr(cuda, "unavailable", lambda: "libcublasLt.so.13 cannot be opened")
    text = shown()
    assert "-- cuda: libcublasLt.so.13 cannot be opened; programs run on the CPU\n" in text
    assert "gpu 0: NVIDIA H200" in text and "cuda kernels of" not in text


def test_no_driver(monkeypatch):
    monkeypatch.setattr(cuda, "find_driver", lambda: cuda.Driver(problem="no driver"))
    assert "-- gpu: no driver: programs run on the CPU\n" in shown()
