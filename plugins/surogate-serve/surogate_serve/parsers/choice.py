"""Which format a model's answers have."""

from __future__ import annotations

from collections.abc import Mapping

from surogate_core.plugins import OutputFormat

from .formats import PLAIN


def choose_format(template: str | None, formats: Mapping[str, OutputFormat]) -> OutputFormat:
    """The format that is surest of the chat template's text; `PLAIN` where none knows it. On a tie the first name of
    the alphabet, so that what a model is read with does not depend on the order of plugins."""
    scores = {name: item.detect(template) for name, item in sorted(formats.items())} if template else {}
    best = max(scores, key=scores.__getitem__, default="")
    return formats[best] if scores.get(best, 0) > 0 else PLAIN
