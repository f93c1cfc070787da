"""rope_kv_write: `rope` of queries and keys, where wanted of their heads' `rms_norm`, and `kv_write`, as one op."""

from __future__ import annotations

import numpy as np

from .paged_attention import KV_WRITE
from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require
from .rms_norm import RMS_NORM, UNIT_OFFSET
from .rope import ROPE


def infer_rope_kv_write(inputs, attrs):
    q, k, v, positions, table, slots, q_weight, k_weight = inputs
    (rotated,) = ROPE.infer([q, positions, table], attrs)
    (keys,) = ROPE.infer([k, positions, table], attrs)
    require(q.dtype == k.dtype == v.dtype, f"rope_kv_write: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}")
    require((q_weight is None) == (k_weight is None), "rope_kv_write: q_weight and k_weight come together")
    for x, weight in ((q, q_weight), (k, k_weight)):
        if weight is not None:
            RMS_NORM.infer([x, weight], {})
    return [rotated, *KV_WRITE.infer([TensorType(keys.shape, keys.dtype), v, slots], {})]


def reference_rope_kv_write(inputs, attrs, initial):
    def rotated(x, weight):
        if weight is not None:
            x = RMS_NORM.reference({"x": x, "weight": weight}, attrs, {})[0]
        return ROPE.reference({**inputs, "x": x}, {**attrs, "inverse": 0}, {})[0]

    q, k = (rotated(inputs[name], inputs[f"{name}_weight"]) for name in ("q", "k"))
    return [q, *KV_WRITE.reference({**inputs, "k": k}, {}, initial)]


SHAPES = (
    (1, 32, 8, 64, 64, 32, 0), (1, 1, 1, 2, 1, 1, 1), (7, 9, 3, 64, 64, 32, 1), (33, 4, 2, 80, 48, 16, 0),
    (130, 9, 3, 128, 128, 64, 0), (5, 3, 1, 82, 33, 11, 1), (0, 2, 1, 16, 16, 8, 0), (9, 2, 2, 37, 37, 9, 0),
    (19, 6, 2, 256, 24, 128, 1),
)
"""Tokens, heads of q and of k and v, their dims and those of v, pairs that turn, and whether they are interleaved."""
MORE = ((3, 2, 1, 640, 640, 320, 0), (6, 3, 1, 96, 96, 48, 0), (4, 5, 5, 48, 256, 8, 1))
"""Wider heads, and heads whose lanes on a device are no power of two."""


MANY = ((513, 5, 2, 24, 40, 8, 0), (512, 3, 1, 16, 8, 8, 1))
"""More tokens than a device's kernel for few of them takes, and heads that its other one does not take by the same number."""


def samples_rope_kv_write(rng):
    plain = [_sample(rng, shape, False, i) for i, shape in enumerate((*SHAPES, *MANY))]
    normed = [*((min(shape[0], 30), *shape[1:]) for shape in (*SHAPES, *MORE)), *MANY]
    return [*plain, *(_sample(rng, shape, True, i) for i, shape in enumerate(normed))]


def _sample(rng, shape: tuple[int, ...], normed: bool, index: int) -> Sample:
    tokens, heads, kv_heads, dim, value_dim, half, interleaved = shape
    rows = 3 * tokens + 4
    angles = rng.uniform(-4.0, 4.0, (50, half))
    slots = rng.permutation(rows)[:tokens].astype(np.int32)
    slots[2::5] = -1
    narrow = {"key_cache": "bf16", "value_cache": "bf16"}
    half_precision = {"q": "bf16", "k": "bf16", "v": "bf16", "rotated": "bf16"}
    inputs = {
        "q": rng.standard_normal((tokens, heads, dim)), "k": rng.standard_normal((tokens, kv_heads, dim)),
        "v": rng.standard_normal((tokens, kv_heads, value_dim)), "positions": rng.integers(0, 50, tokens),
        "table": 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=-1), "slots": slots,
    }
    attrs = {"interleaved": interleaved}
    weights = [{}, {}, {}, {}]
    if normed:
        inputs |= {"q": 3.0 * inputs["q"], "q_weight": rng.standard_normal(dim), "k_weight": rng.standard_normal(dim)}
        attrs |= {"eps": 1e-5 if index % 3 else 0.25, "unit_offset": float(index % 2)}
        weights = [{}, {"q_weight": "bf16", "k_weight": "bf16"}, {}, {"q_weight": "f16", "k_weight": "f32"}]
    dtypes = ({}, {**half_precision, **narrow}, narrow, half_precision)
    return Sample(
        inputs, attrs, [{**each, **more} for each, more in zip(dtypes, weights, strict=True)],
        {"key_cache": rng.standard_normal((rows, kv_heads, dim)),
         "value_cache": rng.standard_normal((rows, kv_heads, value_dim))},
    )


ROPE_KV_WRITE = Op(
    name="rope_kv_write",
    doc="rotated = rope(q), and row t of rope(k) and of v goes to row slots[t] of the caches; a negative slot is "
    "skipped. Slots must be distinct. With weights it is `rms_norm` of each head of q and k that is rotated, not rounded "
    "in between.",
    inputs=(
        Operand("q", "[T, num_heads, head_dim]"),
        Operand("k", "[T, num_kv_heads, head_dim], in q's dtype"),
        Operand("v", "[T, num_kv_heads, value_dim], in q's dtype"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2], as `rope` takes it"),
        Operand("slots", "i32 [T], rows of the caches, or negative"),
        Operand("q_weight", "[head_dim], of the norm of q's heads", optional=True),
        Operand("k_weight", "[head_dim], of the norm of k's heads; there is none of them or both", optional=True),
    ),
    outputs=(
        Operand("rotated", "[T, num_heads, head_dim], in q's dtype"),
        Operand("key_cache", "[S, num_kv_heads, head_dim]", inout=True),
        Operand("value_cache", "[S, num_kv_heads, value_dim]", inout=True),
    ),
    attrs={
        "interleaved": Attr(int, 0, "1 pairs neighbours instead of halves"),
        "eps": RMS_NORM.attrs["eps"],
        "unit_offset": UNIT_OFFSET,
    },
    infer=infer_rope_kv_write,
    reference=reference_rope_kv_write,
    samples=samples_rope_kv_write,
    tolerance=Tolerance(),
    in_place=0,
    rows_apart=("q", "k", "v", "rotated"),
)

OPS = (ROPE_KV_WRITE,)
