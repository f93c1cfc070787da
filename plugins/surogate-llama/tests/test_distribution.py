"""The plugin is found by its entry point and registers its families."""

from __future__ import annotations

from surogate_core.plugins import PluginManager


def test_the_plugin_is_found_and_registers():
    manager = PluginManager()
    report = manager.require("surogate-llama")
    assert report.provides["surogate_families"] >= ["cwm", "granite", "iquestcoder", "llama", "minicpm", "ministral", "mistral", "smollm3"]
    assert manager.families.source("llama") == f"surogate-llama {report.version}"
