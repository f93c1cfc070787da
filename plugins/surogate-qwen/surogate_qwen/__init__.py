"""The Qwen families of Surogate: Qwen 2, 2.5 and 3."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from .family import FAMILIES

    for family in FAMILIES:
        register(family.name, family)


@hookimpl
def surogate_chat_templates(register):
    from .templates import TEMPLATES

    for name, text in TEMPLATES.items():
        register(name, text)
