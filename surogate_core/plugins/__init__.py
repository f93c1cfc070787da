"""Plugins: hook specifications, discovery, and the registries of everything that is one of several."""

from __future__ import annotations

from ..errors import PluginError
from .hookspecs import Register, hookimpl
from .manager import PluginManager, PluginReport, get_manager
from .records import (
    Backend,
    CallProgress,
    CallReader,
    CallSyntax,
    Marker,
    OutputFormat,
    OutputState,
    Strategy,
    Tracker,
    TrackerFactory,
)
from .registry import Registry

__all__ = [
    "Backend",
    "CallProgress",
    "CallReader",
    "CallSyntax",
    "Marker",
    "OutputFormat",
    "OutputState",
    "PluginError",
    "PluginManager",
    "PluginReport",
    "Register",
    "Registry",
    "Strategy",
    "Tracker",
    "TrackerFactory",
    "get_manager",
    "hookimpl",
]
