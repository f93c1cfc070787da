"""kv_write and paged_attention: the key-value cache of decoding, in blocks that a table maps to positions."""

from __future__ import annotations

import numpy as np

from .attention import SCALE, SOFTCAP, WINDOW, check_heads, masked_logits, visible
from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require


def infer_kv_write(inputs, attrs):
    k, v, slots = inputs
    require(len(k.shape) == 3 and len(v.shape) == 3, "kv_write: k and v have three axes")
    require(k.shape[:2] == v.shape[:2], f"kv_write: k has rows and heads {k.shape[:2]}, v {v.shape[:2]}")
    require(slots.shape == k.shape[:1], f"kv_write: slots must have shape {k.shape[:1]}")
    # The caches' number of rows is the planner's to choose: an inout output takes the shape of the storage it names.
    return [TensorType(("S", *k.shape[1:]), k.dtype), TensorType(("S", *v.shape[1:]), v.dtype)]


def reference_kv_write(inputs, attrs, initial):
    caches = [np.array(initial["key_cache"]), np.array(initial["value_cache"])]
    for token, slot in enumerate(inputs["slots"]):
        if slot >= 0:
            caches[0][slot] = inputs["k"][token]
            caches[1][slot] = inputs["v"][token]
    return caches


def samples_kv_write(rng):
    cases = []
    shapes = ((1, 4, 1, 16, 16), (37, 64, 3, 64, 64), (5, 9, 2, 40, 24), (0, 8, 2, 8, 8))
    for tokens, rows, heads, head_dim, value_dim in shapes:
        slots = rng.permutation(rows)[:tokens].astype(np.int32)
        slots[2::7] = -1
        cases.append(Sample(
            {"k": rng.standard_normal((tokens, heads, head_dim)), "v": rng.standard_normal((tokens, heads, value_dim)),
             "slots": slots},
            {},
            (
                {},
                {"k": "bf16", "v": "bf16", "key_cache": "bf16", "value_cache": "bf16"},
                {"key_cache": "bf16", "value_cache": "bf16"},
                {"k": "bf16", "v": "bf16"},
            ),
            {"key_cache": rng.standard_normal((rows, heads, head_dim)),
             "value_cache": rng.standard_normal((rows, heads, value_dim))},
        ))
    return cases


KV_WRITE = Op(
    name="kv_write",
    doc="Writes row t of k and v into row slots[t] of the caches; a negative slot is skipped. Slots must be distinct.",
    inputs=(
        Operand("k", "[T, num_kv_heads, head_dim]"),
        Operand("v", "[T, num_kv_heads, value_dim]"),
        Operand("slots", "i32 [T], rows of the caches, or negative"),
    ),
    outputs=(
        Operand("key_cache", "[S, num_kv_heads, head_dim]", inout=True),
        Operand("value_cache", "[S, num_kv_heads, value_dim]", inout=True),
    ),
    infer=infer_kv_write,
    reference=reference_kv_write,
    samples=samples_kv_write,
    # Rows are copied: only the conversion to a narrower cache rounds.
    tolerance=Tolerance(relative={"f32": 1e-7, "bf16": 4e-3}),
    rows_apart=("k", "v"),
)


def infer_paged_attention(inputs, attrs):
    q, key_cache, value_cache, sequence_ids, positions, block_tables = inputs
    check_heads("paged_attention", q, key_cache, value_cache, attrs)
    require(sequence_ids.shape == q.shape[:1], f"paged_attention: sequence_ids must have shape {q.shape[:1]}")
    require(positions.shape == q.shape[:1], f"paged_attention: positions must have shape {q.shape[:1]}")
    require(len(block_tables.shape) == 2, "paged_attention: block_tables has two axes [B, MaxBlocks]")
    size = attrs.get("block_size", 1)
    require(size > 0, f"paged_attention: block_size must be positive, not {size}")
    return [TensorType((*q.shape[:2], value_cache.shape[2]), q.dtype)]


def reference_paged_attention(inputs, attrs, initial):
    q, key_cache, value_cache = inputs["q"], inputs["key_cache"], inputs["value_cache"]
    group = q.shape[1] // key_cache.shape[1]
    size = attrs["block_size"]
    o = np.zeros((*q.shape[:2], value_cache.shape[2]))
    for token, (sequence, position) in enumerate(zip(inputs["sequence_ids"], inputs["positions"], strict=True)):
        if sequence < 0:
            continue
        seen = np.arange(position + 1)
        rows = inputs["block_tables"][sequence, seen // size] * size + seen % size
        mask = visible(1, position + 1, int(position), 1, attrs["window"])
        for head in range(q.shape[1]):
            keys, values = key_cache[rows, head // group], value_cache[rows, head // group]
            logits = masked_logits(q[token, head][None], keys, mask, attrs["scale"], attrs["softcap"])
            weights = np.exp(logits - logits.max())
            o[token, head] = (weights @ values)[0] / weights.sum()
    return [o]


def _paged_sample(rng, runs, num_heads, num_kv_heads, head_dim, value_dim, block_size, attrs):
    """``runs``: (sequence, first position, tokens) in the order of the call; sequence -1 is padding."""
    longest = max((first + count for _, first, count in runs), default=1)
    max_blocks = -(-longest // block_size)
    sequences = max((sequence for sequence, _, _ in runs), default=0) + 1
    blocks = rng.permutation(sequences * max_blocks + 2)[: sequences * max_blocks]
    ids = [sequence for sequence, _, count in runs for _ in range(count)]
    positions = [first + i for _, first, count in runs for i in range(count)]
    rows = (sequences * max_blocks + 2) * block_size
    return Sample(
        {
            "q": rng.standard_normal((len(ids), num_heads, head_dim)),
            "key_cache": rng.standard_normal((rows, num_kv_heads, head_dim)),
            "value_cache": rng.standard_normal((rows, num_kv_heads, value_dim)),
            "sequence_ids": np.array(ids, dtype=np.int32),
            "positions": np.array(positions, dtype=np.int32),
            "block_tables": blocks.reshape(sequences, max_blocks).astype(np.int32),
        },
        {"scale": head_dim**-0.5, "window": 0, "softcap": 0.0, "block_size": block_size, **attrs},
        (
            {},
            {"q": "bf16", "key_cache": "bf16", "value_cache": "bf16", "o": "bf16"},
            {"key_cache": "bf16", "value_cache": "bf16"},
            {"q": "bf16", "o": "bf16"},
        ),
    )


def samples_paged_attention(rng):
    return [
        _paged_sample(rng, [(0, 0, 1)], 3, 1, 16, 16, 4, {}),
        _paged_sample(rng, [(1, 700, 1), (0, 3, 1), (-1, 0, 2), (2, 255, 1)], 9, 3, 64, 64, 16, {}),
        _paged_sample(rng, [(0, 0, 65), (1, 20, 7)], 6, 2, 64, 64, 16, {}),
        _paged_sample(rng, [(0, 300, 40), (1, 90, 1)], 4, 4, 80, 48, 32, {"window": 77}),
        _paged_sample(rng, [(1, 1100, 3), (0, 0, 130)], 4, 1, 128, 128, 16, {"softcap": 3.0}),
        _paged_sample(rng, [(0, 580, 1), (1, 10, 1)], 4, 1, 256, 256, 16, {"window": 512}),
        _paged_sample(rng, [(0, 35, 2)], 17, 1, 24, 40, 8, {}),
        _paged_sample(rng, [(0, 640, 32)], 9, 3, 64, 64, 16, {}),
        _paged_sample(rng, [(i, 7 * i + 3, 1) if i % 9 else (-1, 0, 1) for i in range(1, 40)], 8, 2, 64, 64, 16, {"lone": 1}),
        _paged_sample(rng, [(i, 5 * i, 1) if i % 9 else (-1, 0, 1) for i in range(1, 150)], 16, 4, 128, 128, 16, {"lone": 1}),
        _paged_sample(rng, [], 2, 1, 16, 16, 4, {}),
    ]


PAGED_ATTENTION = Op(
    name="paged_attention",
    doc="Causal attention of token t to cache positions 0..positions[t] of its sequence, whose keys and values are in "
    "cache row block_tables[sequence, p // block_size] * block_size + p % block_size (Kwon et al., 2023). The result "
    "for a token does not depend on the other tokens of the call. Rows with a negative sequence give 0.",
    inputs=(
        Operand("q", "[T, num_heads, head_dim]"),
        Operand("key_cache", "[S, num_kv_heads, head_dim]"),
        Operand("value_cache", "[S, num_kv_heads, value_dim]"),
        Operand("sequence_ids", "i32 [T], rows of block_tables, or negative"),
        Operand("positions", "i32 [T]"),
        Operand("block_tables", "i32 [B, MaxBlocks], cache blocks"),
    ),
    outputs=(Operand("o", "[T, num_heads, value_dim], q's dtype"),),
    attrs={
        "scale": SCALE,
        "window": WINDOW,
        "softcap": SOFTCAP,
        "block_size": Attr(int, None, "positions in one block of the cache"),
        "lone": Attr(int, 0, "1: every token is of another sequence, whose earlier rows nothing writes while the program runs"),
    },
    infer=infer_paged_attention,
    reference=reference_paged_attention,
    samples=samples_paged_attention,
    tolerance=Tolerance(relative={"f32": 4e-6, "bf16": 4e-3}, absolute=1e-6),
    rows_apart=("q",),
)

OPS = (KV_WRITE, PAGED_ATTENTION)
