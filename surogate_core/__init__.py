"""Surogate: train large language models and serve them, on one native engine, from one definition of each model."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

__all__ = ["__version__", "include_dir"]


def include_dir() -> Path:
    """The folder to compile a kernel plugin against: it holds ``surogate/abi.h``, the public C ABI."""
    return Path(__file__).resolve().parent / "include"
