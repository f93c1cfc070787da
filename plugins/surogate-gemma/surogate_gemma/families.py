"""Every family of this plugin: a module of families adds its own here."""

from __future__ import annotations

from surogate_core.dsl import Family

from . import embedding, gemma, gemma4

FAMILIES: tuple[Family, ...] = (*gemma.FAMILIES, *gemma4.FAMILIES, *embedding.FAMILIES)
