"""The Llama family of Surogate: Llama and the published families whose layers are its own, but for a switch."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from .families import FAMILIES

    for family in FAMILIES:
        register(family.name, family)


@hookimpl
def surogate_parsers(register):
    from .formats import LLAMA3_JSON

    register(LLAMA3_JSON.name, LLAMA3_JSON)
