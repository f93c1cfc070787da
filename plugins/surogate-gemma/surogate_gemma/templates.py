"""The chat templates of Gemma, by the names that configurations and servers use."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"


def _read(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def _with_calls(name: str, quote: str) -> str:
    """A template that writes calls in Gemma's notation, whose texts stand between two ``quote``."""
    return f"{{%- set quote = '{quote}' -%}}\n{_read('calls')}{_read(name)}"


TEMPLATES = {
    "gemma": _read("gemma"),
    "functiongemma": _with_calls("functiongemma", "<escape>"),
    "gemma4": _with_calls("gemma4", '<|"|>'),
}
