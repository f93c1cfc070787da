"""dropout by a counter-based generator: the mask is a function of seed, stream and index, and is never stored."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, require

_MASK = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, stream_id: int, seed: np.ndarray, last_word: int = 0) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    counter: unsigned integers [n]; the four counter words are (low, high, stream_id, last_word). seed: two 32-bit
    words, the key. Returns uint32 [n, 4].
    """
    counter = np.asarray(counter, np.uint64)
    words = [counter & _MASK, counter >> np.uint64(32), np.full_like(counter, stream_id & 0xFFFFFFFF),
             np.full_like(counter, last_word & 0xFFFFFFFF)]
    key0, key1 = (np.uint64(int(word) & 0xFFFFFFFF) for word in seed)
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(second >> np.uint64(32)) ^ words[1] ^ key0, second & _MASK,
                 (first >> np.uint64(32)) ^ words[3] ^ key1, first & _MASK]
        key0 = np.uint64((int(key0) + 0x9E3779B9) & 0xFFFFFFFF)
        key1 = np.uint64((int(key1) + 0xBB67AE85) & 0xFFFFFFFF)
    return np.stack(words, axis=-1).astype(np.uint32)


def infer_dropout(inputs, attrs):
    x, seed = inputs
    require(seed.shape == (2,), f"dropout: seed must have shape (2,), not {seed.shape}")
    require(0.0 <= attrs.get("p", 0.0) < 1.0, f"dropout: p must be in [0, 1), not {attrs.get('p')}")
    return [TensorType(x.shape, x.dtype)]


def reference_dropout(inputs, attrs, initial):
    x, p = inputs["x"], attrs["p"]
    words = philox(np.arange((x.size + 3) // 4), attrs["stream_id"], inputs["seed"]).reshape(-1)[: x.size]
    keep = (words >= np.uint64(np.floor(p * 2.0**32))).reshape(x.shape)
    return [np.where(keep, x / (1.0 - p), 0.0)]


def vjp_dropout(b, node, grads):
    seed = node.inputs[1]
    return b.op("dropout", grads[0], seed, p=node.attrs["p"], stream_id=node.attrs["stream_id"]), None


DROPOUT = Op(
    name="dropout",
    doc="y = x / (1 - p) where the random word of the element's index is at least p * 2^32, else 0. Word i of the "
    "stream is word i % 4 of Philox4x32-10 at counter (i / 4, stream_id) keyed by the seed.",
    inputs=(Operand("x", "[...]"), Operand("seed", "i32 [2]")),
    outputs=(Operand("y", "[...], in x's dtype"),),
    attrs={
        "p": Attr(float, None, "probability that an element is dropped, in [0, 1)"),
        "stream_id": Attr(int, 0, "tells the dropouts of one step apart"),
    },
    infer=infer_dropout,
    reference=reference_dropout,
    vjp=vjp_dropout,
    samples=lambda rng: [
        Sample(
            {"x": rng.standard_normal(shape), "seed": rng.integers(-(2**31), 2**31, 2)},
            {"p": p, "stream_id": stream_id},
            ({}, {"x": "bf16", "y": "bf16"}),
        )
        for shape, p, stream_id in (
            ((1,), 0.5, 0), ((7, 33), 0.1, 3), ((0, 8), 0.1, 0), ((130, 576), 0.05, 2**31 - 1), ((3, 5), 0.0, 1),
            ((300, 257), 0.9, 77),
        )
    ],
    in_place=0,
    differentiable=("x",),
)

OPS = (DROPOUT,)
