"""The Llama family of Surogate: Llama 2 and 3.x, SmolLM2 and Mistral."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from .family import FAMILIES

    for family in FAMILIES:
        register(family.name, family)
