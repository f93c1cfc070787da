"""The plugin is found by its entry point and registers its families."""

from __future__ import annotations

from surogate_core.plugins import PluginManager
from surogate_llama.families import FAMILIES


def test_the_plugin_is_found_and_registers():
    manager = PluginManager()
    report = manager.require("surogate-llama")
    assert set(report.provides["surogate_families"]) == {family.name for family in FAMILIES}
    assert manager.families.source("llama") == f"surogate-llama {report.version}"
