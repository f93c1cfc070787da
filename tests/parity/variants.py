"""Every variant that an installed family declares, as random checkpoints in files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surogate_core.dsl import Family
from surogate_core.export import export
from surogate_core.plugins import get_manager
from surogate_core.testing.parity import Parity, installed_family
from surogate_core.testing.tiny import write_byte_tokenizer

Case = tuple[str, str]
"""Names of a family and of one of its variants."""

NO_GGUF: dict[Case, str] = {
    ("ministral", "layer_types"): "architecture 'llama' cannot say which layers have a window",
    ("cwm", "windows"): "architecture 'llama' cannot say which layers have a window",
    ("smollm3", "nope_window"): "architecture 'smollm3' cannot say which layers have a window",
    ("qwen2", "windows_tied"): "sliding windows: GGUF files of architecture qwen2 have no place",
    ("qwen3", "windows_biases"): "sliding windows: GGUF files of architecture qwen3 have no place",
}
"""Variants that have no place in a GGUF file, of families that write them -> what the error says."""


def cases() -> list[Case]:
    return [(name, variant) for name, family in get_manager().families.items() for variant in family.tiny_configs()]


def gguf_cases() -> list[Case]:
    """Those that can be written to GGUF: all of a family that writes it, but for NO_GGUF."""
    families = get_manager().families
    writing = {name for name, family in families.items() if type(family).gguf_metadata is not Family.gguf_metadata}
    return [case for case in cases() if case[0] in writing and case not in NO_GGUF]


def checkpoint(case: Case, folder: Path, seed: int = 8) -> Parity:
    """A random checkpoint, and a tokenizer that has a byte for each of its first ids and one merge."""
    family = installed_family(case[0])
    parity = Parity.make(family, family.tiny_configs()[case[1]], folder, seed)
    write_byte_tokenizer(folder, num_bytes=parity.loaded.hyperparameters.vocab_size - 1, merges=[("t", "h")])
    return parity


@dataclass
class Exported:
    """A checkpoint, and the GGUF file that was made of it."""

    parity: Parity
    path: Path


def exported(case: Case, folder: Path, dtype: str = "f32") -> Exported:
    parity = checkpoint(case, folder / "-".join(case))
    path = folder / f"{'-'.join(case)}.gguf"
    export(parity.folder, path, dtype)
    return Exported(parity, path)
