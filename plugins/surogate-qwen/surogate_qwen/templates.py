"""The chat templates of Qwen, by the names that configurations and servers use."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"

TEMPLATES = {name: (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in ("qwen2.5", "qwen3")}
