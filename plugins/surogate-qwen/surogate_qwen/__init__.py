"""The Qwen families of Surogate: Qwen 2, 2.5 and 3."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from .family import FAMILIES

    for family in FAMILIES:
        register(family.name, family)
