"""Formats of answers, and the one pipeline that reads them all."""

from __future__ import annotations

from .choice import choose_format
from .formats import FORMATS
from .stream import OutputStream, Parser

__all__ = ["FORMATS", "OutputStream", "Parser", "choose_format"]
