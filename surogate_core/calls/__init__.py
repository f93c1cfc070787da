"""What syntaxes of calls are made of: plugins that register formats of answers (`surogate_parsers`) read and write with these.

A syntax (`surogate_core.plugins.CallSyntax`) that many models share is whole here, `JsonCall`; of others their parts."""

from __future__ import annotations

from .json_call import JsonCall
from .json_text import JsonValue, is_json_number, properties_of
from .markers import call_markers
from .steps import Steps, overlap

__all__ = ["JsonCall", "JsonValue", "Steps", "call_markers", "is_json_number", "overlap", "properties_of"]
