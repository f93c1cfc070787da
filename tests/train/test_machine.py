"""Which backend a run takes, and what it says of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from surogate_core import engine
from surogate_core.errors import ConfigError, EngineError
from surogate_core.train.machine import choose_backend, describe_machine
from surogate_core.train.prepare import prepare

from . import runs

H200 = {"name": "NVIDIA H200", "versions": "driver CUDA 13.0, runtime 13.0", "architecture": 90, "free_bytes": 130 << 30,
        "total_bytes": 139 << 30}


def manager(reason: str | None):
    """Whose machine cannot use its GPU for ``reason``."""
    return SimpleNamespace(backends={
        "cpu": SimpleNamespace(unavailable=lambda: None), "cuda": SimpleNamespace(unavailable=lambda: reason),
    })


@pytest.fixture
def gpu(monkeypatch):
    """One H200, as the engine would describe it."""
    def device_info(backend, device):
        if device:
            raise EngineError(f"there is no device {device} of backend 'cuda'", "it has 1 device, counted from 0")
        return H200

    monkeypatch.setattr(engine, "device_info", device_info)


def test_auto_takes_the_gpu_where_there_is_one(root, gpu):
    config, why = choose_backend(runs.config(root, backend="auto"), manager(None))
    assert (config.backend, why) == ("cuda", "")
    assert "cuda device 0, NVIDIA H200; driver CUDA 13.0" in describe_machine(config, 2, why)
    assert "one by one" in describe_machine(config.model_copy(update={"cuda_graphs": False}), 2, why)


def test_auto_runs_on_the_cpu_elsewhere_and_says_why(root):
    config, why = choose_backend(runs.config(root, backend="auto"), manager("no driver: install it"))
    assert config.backend == "cpu"
    assert describe_machine(config, 2, why) == "cpu, 2 threads; cuda cannot be used: no driver: install it"


def test_a_backend_that_was_asked_for_is_not_replaced(root):
    with pytest.raises(ConfigError, match="'cuda' cannot be used here: no driver"):
        choose_backend(runs.config(root, backend="cuda"), manager("no driver"))


def test_a_device_that_is_not_there(root, gpu):
    with pytest.raises(ConfigError, match="device 1 .*there is no device 1"):
        choose_backend(runs.config(root, backend="cuda", device=1), manager(None))
    with pytest.raises(ConfigError, match="one device .*no driver"):
        choose_backend(runs.config(root, backend="auto", device=1), manager("no driver"))


def test_a_device_that_is_too_old(root, monkeypatch):
    monkeypatch.setattr(engine, "device_info", lambda backend, device: {**H200, "name": "Tesla T4", "architecture": 75})
    with pytest.raises(ConfigError, match="Tesla T4, has compute capability 7.5; the kernels need 8.0"):
        choose_backend(runs.config(root, backend="cuda"), manager(None))


def test_the_order_of_additions_is_free_only_where_asked(root):
    def orders(**changes):
        program = prepare(runs.config(root, **changes), "sft").plan.program
        return {dict(i.attrs).get("deterministic", 1) for i in program.instructions if i.op == "attention_grad"}

    assert orders() == {1} and orders(deterministic=False) == {0}
