"""The plugin is found by its entry point and registers its families."""

from __future__ import annotations

from surogate_core.plugins import PluginManager
from surogate_qwen.family import FAMILIES


def test_the_plugin_is_found_and_registers():
    manager = PluginManager()
    report = manager.require("surogate-qwen")
    assert report.provides.get("surogate_families", []) == [family.name for family in FAMILIES]
    assert all(manager.families.source(family.name) == f"surogate-qwen {report.version}" for family in FAMILIES)
