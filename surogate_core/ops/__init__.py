"""The core's op records. One file an op (with its gradient ops); each file lists its records in ``OPS``."""

from __future__ import annotations

from importlib import import_module

from .record import Attr, Op, Operand, Sample, Shape, TensorType, Tolerance, require

FILES = (
    "embedding", "rms_norm", "linear", "rope", "attention", "paged_attention", "glu", "elementwise", "dropout",
    "cross_entropy", "optimizer", "sampling",
)

ALL: dict[str, Op] = {op.name: op for file in FILES for op in import_module(f".{file}", __package__).OPS}
"""Every core op by name. Ops of plugins are in the registry `surogate_core.plugins` fills."""

__all__ = ["ALL", "Attr", "Op", "Operand", "Sample", "Shape", "TensorType", "Tolerance", "require"]
