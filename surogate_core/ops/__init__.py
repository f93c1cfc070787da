"""The core's op records. One file an op (with its gradient ops); each file lists its records in ``OPS``."""

from __future__ import annotations

from importlib import import_module

from .record import Attr, Op, Operand, PerLayer, Sample, Shape, TensorType, Tolerance, require

FILES = (
    "embedding", "rms_norm", "linear", "low_rank_grad", "rope", "attention", "paged_attention", "glu", "elementwise",
    "dropout", "cross_entropy", "optimizer", "sampling", "dequantize", "feed_tokens", "sample", "token_logprobs",
    "banked_lora", "rope_kv_write", "rms_norm_linear", "norm_rope",
)

ALL: dict[str, Op] = {op.name: op for file in FILES for op in import_module(f".{file}", __package__).OPS}
"""Every core op by name."""


def get(name: str) -> Op:
    """The record of a core or plugin op. PluginError naming the nearest ops where there is none."""
    if name in ALL:
        return ALL[name]
    from ..plugins import get_manager

    return get_manager().ops[name]


def registered() -> dict[str, Op]:
    """Core and plugin ops together, by name."""
    from ..plugins import get_manager

    return dict(get_manager().ops.items())


__all__ = [
    "ALL", "Attr", "Op", "Operand", "PerLayer", "Sample", "Shape", "TensorType", "Tolerance", "get", "registered",
    "require",
]
