"""Serving for Surogate: an HTTP face with the APIs of OpenAI and Anthropic before the core's native engine loop."""

from __future__ import annotations

from surogate_core.plugins import hookimpl


@hookimpl
def surogate_parsers(register):
    from .parsers import FORMATS

    for name, output_format in FORMATS.items():
        register(name, output_format)


@hookimpl
def surogate_cli_commands(register):
    from .cli.serve import serve

    register("serve", serve)
