"""The Gemma families of Surogate."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_families(register):
    from . import families

    for family in families.FAMILIES:
        register(family.name, family)


@hookimpl
def surogate_chat_templates(register):
    from .templates import TEMPLATES

    for name, text in TEMPLATES.items():
        register(name, text)


@hookimpl
def surogate_parsers(register):
    from .calls.formats import FORMATS

    for output_format in FORMATS:
        register(output_format.name, output_format)


@hookimpl
def surogate_models(register):
    from .packaged import MODELS

    for model in MODELS:
        register(model.name, model)
