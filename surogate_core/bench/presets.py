"""Architectures of public models, as their config.json has them: what `surogate bench` and `surogate profile` know by name.
The families that are installed bring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..plugins import get_manager


def presets() -> dict[str, Mapping[str, Any]]:
    """Name -> config.json mapping. ConfigError where two families have presets of one name."""
    found: dict[str, Mapping[str, Any]] = {}
    owners: dict[str, str] = {}
    for family in get_manager().families.values():
        for name, config in family.presets().items():
            if name in owners:
                raise ConfigError(f"the families {owners[name]} and {family.name} both have a preset called {name!r}",
                                  "Uninstall the plugin of one of them.")
            found[name], owners[name] = config, family.name
    return found


def architecture(name: str) -> Mapping[str, Any]:
    """The config.json of a preset. ConfigError for another name."""
    known = presets()
    if name not in known:
        names = ", ".join(known) or "none"
        raise ConfigError(f"no preset is called {name!r}", f"Known: {names}; or give a configuration file.")
    return known[name]
