"""The plugin registers its families, and each finds the architectures it says it reads."""

from __future__ import annotations

from surogate_core.plugins import PluginManager


def test_the_plugin_is_found_and_registers():
    manager = PluginManager()
    report = manager.require("surogate-llama")
    assert report.provides["surogate_families"] == ["llama"]
    assert manager.families.source("llama") == f"surogate-llama {report.version}"
