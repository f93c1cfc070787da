"""The plugin is found by its entry point and registers its families, and the formats of their answers."""

from __future__ import annotations

from surogate_core.plugins import PluginManager
from surogate_gemma.calls.formats import FORMATS
from surogate_gemma.families import FAMILIES


def test_the_plugin_is_found_and_registers():
    manager = PluginManager()
    report = manager.require("surogate-gemma")
    assert report.provides.get("surogate_families", []) == [family.name for family in FAMILIES]
    assert all(manager.families.source(family.name) == f"surogate-gemma {report.version}" for family in FAMILIES)
    assert report.provides.get("surogate_parsers", []) == [each.name for each in FORMATS]
