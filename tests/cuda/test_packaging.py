"""What `pip install` brings: CUDA libraries with the extra `cuda`, CUDA headers at build time where nvcc is found."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest

from surogate_core.engine import cuda

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEADERS = PROJECT["tool"]["surogate"]["cuda-headers"]


@pytest.fixture
def backend():
    pytest.importorskip("scikit_build_core")
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "cmake" / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_extra_has_the_versions_that_the_headers_have():
    extra = PROJECT["project"]["optional-dependencies"]["cuda"]
    brought = {requirement.split("==")[0] for requirement in extra}
    assert brought == {wheel.distribution for wheel in (cuda.CUBLAS, cuda.CUDNN, cuda.NVRTC)}
    assert set(HEADERS) - set(extra) == {"nvidia-cudnn-frontend==1.24.1"}, "the frontend is headers only"


def test_headers_are_asked_for_where_nvcc_is(backend, monkeypatch):
    monkeypatch.setattr(backend, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    for ask in (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable):
        assert set(HEADERS) <= set(ask(None))
        assert not set(HEADERS) & set(ask({"cmake.define.SUROGATE_CUDA": "OFF"}))
    monkeypatch.setattr(backend, "find_nvcc", lambda: None)
    assert not set(HEADERS) & set(backend.get_requires_for_build_wheel(None))


def test_nvcc_is_found_where_the_environment_names_it(backend, monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    for name in ("CUDACXX", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert backend.find_nvcc() == str(nvcc)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert backend.find_nvcc() == str(nvcc)
    monkeypatch.setenv("CUDACXX", "/else/nvcc")
    assert backend.find_nvcc() == "/else/nvcc"
