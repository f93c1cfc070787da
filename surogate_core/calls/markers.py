"""Markers of formats that announce their calls."""

from __future__ import annotations

from ..plugins import Marker


def call_markers(begin: str, end: str) -> tuple[Marker, ...]:
    """Calls between two markers; an end without a beginning is dropped."""
    return (
        Marker(("start", "content", "called"), begin, "call"),
        Marker(("call", "called"), end, "called"),
        Marker(("start", "content"), end, "content"),
    )
