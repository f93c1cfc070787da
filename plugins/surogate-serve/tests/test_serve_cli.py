"""The verb's words, before any model is opened."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from surogate_core.errors import ConfigError

from surogate_serve.cli.bench_serve import bench_serve
from surogate_serve.cli.chat import chat
from surogate_serve.cli.parity import parity
from surogate_serve.cli.serve import (
    LOOPBACK,
    _bytes_of,
    _keys_of,
    adapters_of,
    backend_of,
    hosts_of,
    named_models,
    serve,
)


def test_models_and_their_names(tmp_path):
    odd = tmp_path / "a=b.gguf"
    odd.touch()
    assert named_models([str(tmp_path)]) == {None: tmp_path}
    assert named_models([f"x={tmp_path}"]) == {"x": tmp_path}
    assert named_models([str(odd)]) == {None: odd}
    assert named_models([f"x={tmp_path}", str(odd)]) == {"x": tmp_path, "a=b": odd}
    for bad in ([f"x={tmp_path}", f"x={odd}"], ["a b=/x"]):
        with pytest.raises(ConfigError):
            named_models(bad)


def test_adapters_go_to_their_models():
    assert adapters_of(["t=/a"], ["/m"]) == {None: {"t": "/a"}}
    assert adapters_of(["t=/a", "y:u=/b"], ["x=/m", "y=/n"]) == {"x": {"t": "/a"}, "y": {"u": "/b"}}
    for bad in ("t", "=x", "z:t=/a", "x=/a", "t="):
        with pytest.raises(ConfigError):
            adapters_of([bad], ["x=/m", "y=/n"])


def test_sizes_and_keys(tmp_path):
    assert [_bytes_of(text) for text in ("4096", "512M", "8g", "1.5GiB")] == [4096, 512 << 20, 8 << 30, 3 << 29]
    with pytest.raises(ConfigError):
        _bytes_of("much")
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    assert _keys_of(path) == ["one", "two"]
    path.write_text("\n")
    with pytest.raises(ConfigError):
        _keys_of(path)


class Backend:
    def __init__(self, unavailable=None):
        self.unavailable = lambda: unavailable


def test_every_verb_takes_the_gpu_where_there_is_one(monkeypatch):
    for verb in (serve, chat, parity, bench_serve):
        assert inspect.signature(verb).parameters["backend"].default == "auto"
    manager = SimpleNamespace(backends={"cpu": Backend(), "broken": Backend("no driver"), "gpu": Backend()})
    monkeypatch.setattr("surogate_core.plugins.manager.get_manager", lambda: manager)
    monkeypatch.setattr("surogate_core.train.machine.device_info", lambda name, device: None)
    assert backend_of("auto", 0) == "gpu" and backend_of("cpu", 0) == "cpu"
    assert backend_of("auto", 0, batch_invariant=True) == "cpu"
    with pytest.raises(ConfigError, match="no driver"):
        backend_of("broken", 0)
    with pytest.raises(ConfigError, match="one device"):
        backend_of("cpu", 1)
    del manager.backends["gpu"]
    assert backend_of("auto", 0) == "cpu"


def test_names_of_the_server():
    assert hosts_of((), "127.0.0.1", False) == LOOPBACK
    assert hosts_of((), "127.0.0.1", True) == hosts_of((), "0.0.0.0", False) == ()
    assert hosts_of(("me",), "0.0.0.0", True) == ("me", *LOOPBACK)
