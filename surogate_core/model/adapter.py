"""A LoRA adapter as programs apply it without training it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..passes import LoraSpec
from ..passes.lora import adapter_names
from ..weights.peft_adapter import Adapter, read_adapter
from .loaded import LoadedModel


@dataclass
class AppliedAdapter:
    """``spec`` is what the `lora` pass is given; ``arrays`` maps its parameters to float32 values.

    A layer body is kept once, so all layers of a role share one rank: smaller pairs are padded with zeros, layers without a
    pair are all zeros, and each pair's own scale is folded into its B.
    """

    spec: LoraSpec
    arrays: dict[str, np.ndarray]

    @classmethod
    def open(cls, folder: str | Path, model: LoadedModel) -> AppliedAdapter:
        """Reads a PEFT adapter's folder. WeightError when it does not belong to this model."""
        return cls.of(read_adapter(folder, model.family.hf_names(model.hyperparameters), model.family.hf_prefixes), model)

    @classmethod
    def of(cls, adapter: Adapter, model: LoadedModel) -> AppliedAdapter:
        declared = dict(model.dsl().parameters())
        roles = frozenset(declared[name].role for name in adapter.pairs)
        rank = max(pair.rank for pair in adapter.pairs.values())
        arrays: dict[str, np.ndarray] = {}
        for name, parameter in declared.items():
            if parameter.role not in roles or not name.startswith("layers."):
                continue
            a = np.zeros((rank, parameter.shape[1]), np.float32)
            b = np.zeros((parameter.shape[0], rank), np.float32)
            pair = adapter.pairs.get(name)
            if pair is not None:
                a[:pair.rank] = pair.a
                b[:, :pair.rank] = pair.b * np.float32(pair.scale)
            arrays.update(zip(adapter_names(name), (a, b)))
        return cls(LoraSpec(rank, float(rank), roles), arrays)
