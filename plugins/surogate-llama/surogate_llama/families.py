"""All families of the plugin."""

from __future__ import annotations

from .family import published
from .mistral3 import Mistral3Family
from .switches import PUBLISHED

FAMILIES = (*(published(name) for name in PUBLISHED), Mistral3Family())
