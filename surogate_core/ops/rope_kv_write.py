"""rope_kv_write: `rope` of queries and keys, and `kv_write`, as one op."""

from __future__ import annotations

import numpy as np

from .paged_attention import KV_WRITE
from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require
from .rope import ROPE


def infer_rope_kv_write(inputs, attrs):
    q, k, v, positions, table, slots = inputs
    (rotated,) = ROPE.infer([q, positions, table], attrs)
    (keys,) = ROPE.infer([k, positions, table], attrs)
    require(q.dtype == k.dtype == v.dtype, f"rope_kv_write: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}")
    return [rotated, *KV_WRITE.infer([TensorType(keys.shape, keys.dtype), v, slots], {})]


def reference_rope_kv_write(inputs, attrs, initial):
    attrs = {**attrs, "inverse": 0}
    q, k = (ROPE.reference({**inputs, "x": inputs[name]}, attrs, {})[0] for name in ("q", "k"))
    return [q, *KV_WRITE.reference({**inputs, "k": k}, {}, initial)]


def samples_rope_kv_write(rng):
    cases = []
    for tokens, heads, kv_heads, dim, value_dim, half, interleaved in (
        (1, 32, 8, 64, 64, 32, 0), (1, 1, 1, 2, 1, 1, 1), (7, 9, 3, 64, 64, 32, 1), (33, 4, 2, 80, 48, 16, 0),
        (130, 9, 3, 128, 128, 64, 0), (5, 3, 1, 82, 33, 11, 1), (0, 2, 1, 16, 16, 8, 0), (9, 2, 2, 37, 37, 9, 0),
        (19, 6, 2, 256, 24, 128, 1),
    ):
        rows = 3 * tokens + 4
        angles = rng.uniform(-4.0, 4.0, (50, half))
        slots = rng.permutation(rows)[:tokens].astype(np.int32)
        slots[2::5] = -1
        narrow = {"key_cache": "bf16", "value_cache": "bf16"}
        half_precision = {"q": "bf16", "k": "bf16", "v": "bf16", "rotated": "bf16"}
        cases.append(Sample(
            {"q": rng.standard_normal((tokens, heads, dim)), "k": rng.standard_normal((tokens, kv_heads, dim)),
             "v": rng.standard_normal((tokens, kv_heads, value_dim)), "positions": rng.integers(0, 50, tokens),
             "table": 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=-1), "slots": slots},
            {"interleaved": interleaved},
            ({}, {**half_precision, **narrow}, narrow, half_precision),
            {"key_cache": rng.standard_normal((rows, kv_heads, dim)),
             "value_cache": rng.standard_normal((rows, kv_heads, value_dim))},
        ))
    return cases


ROPE_KV_WRITE = Op(
    name="rope_kv_write",
    doc="rotated = rope(q), and row t of rope(k) and of v goes to row slots[t] of the caches; a negative slot is skipped. Slots "
    "must be distinct.",
    inputs=(
        Operand("q", "[T, num_heads, head_dim]"),
        Operand("k", "[T, num_kv_heads, head_dim], in q's dtype"),
        Operand("v", "[T, num_kv_heads, value_dim], in q's dtype"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2], as `rope` takes it"),
        Operand("slots", "i32 [T], rows of the caches, or negative"),
    ),
    outputs=(
        Operand("rotated", "[T, num_heads, head_dim], in q's dtype"),
        Operand("key_cache", "[S, num_kv_heads, head_dim]", inout=True),
        Operand("value_cache", "[S, num_kv_heads, value_dim]", inout=True),
    ),
    attrs={"interleaved": Attr(int, 0, "1 pairs neighbours instead of halves")},
    infer=infer_rope_kv_write,
    reference=reference_rope_kv_write,
    samples=samples_rope_kv_write,
    tolerance=Tolerance(),
    in_place=0,
    rows_apart=("q", "k", "v", "rotated"),
)

OPS = (ROPE_KV_WRITE,)
