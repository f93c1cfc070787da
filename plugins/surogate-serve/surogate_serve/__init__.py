"""Serving for Surogate: an HTTP face with the APIs of OpenAI and Anthropic before the core's native engine loop."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from surogate_core.plugins import hookimpl

_EXPORTS = {
    "LLM": ".llm", "ServedModel": ".models", "EngineOptions": ".engine", "Generation": ".types", "Sampling": ".types",
    "Refused": ".types",
}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    """What a program imports from here is loaded when it does: every command of `surogate` imports this module."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)


@hookimpl
def surogate_parsers(register):
    from .parsers import FORMATS

    for name, output_format in FORMATS.items():
        register(name, output_format)


@hookimpl
def surogate_cli_commands(register):
    from .cli.bench_serve import bench_serve
    from .cli.chat import chat
    from .cli.parity import parity
    from .cli.serve import serve

    register("parity", parity)
    register("serve", serve)
    register("chat", chat)
    register("bench.serve", bench_serve)
