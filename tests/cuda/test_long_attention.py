"""The gradient of attention over one long document: heads in shares, gradients that lie apart, against our own kernel."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine

pytestmark = pytest.mark.cuda

TOKENS, HEADS, KV_HEADS, DIM = 8192, 32, 8, 128
ROW = (HEADS + 2 * KV_HEADS) * DIM + 48
"""q, k and v, and what adapters have beside them."""


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def columns(rows: np.ndarray, first: int, heads: int) -> np.ndarray:
    """A view [TOKENS, heads, DIM] of columns of rows that are wider."""
    return np.lib.stride_tricks.as_strided(
        rows[:, first * DIM:], (TOKENS, heads, DIM), (rows.strides[0], 2 * DIM, 2), writeable=True
    )


def test_gradients_that_lie_apart():
    engine.load_backend("cuda")
    generator = np.random.Generator(np.random.SFC64(3))
    joined = bf16(generator.standard_normal((TOKENS, ROW), np.float32))
    q, k, v = columns(joined, 0, HEADS), columns(joined, HEADS, KV_HEADS), columns(joined, HEADS + KV_HEADS, KV_HEADS)
    do = bf16(generator.standard_normal((TOKENS, HEADS, DIM), np.float32))
    starts = np.array([0, TOKENS], np.int32)
    attrs = {"scale": DIM**-0.5, "causal": 1, "window": 0, "softcap": 0.0, "max_length": TOKENS}

    def operand(array):
        return array, "bf16", array.shape

    o, lse = np.zeros_like(do), np.zeros((TOKENS, HEADS), np.float32)
    engine.run_op("attention", [*map(operand, (q, k, v)), starts], [operand(o), lse], attrs, "cuda")

    def gradients(kernel):
        out = np.zeros((TOKENS, ROW), np.uint16)
        parts = [columns(out, 0, HEADS), columns(out, HEADS, KV_HEADS), columns(out, HEADS + KV_HEADS, KV_HEADS)]
        engine.run_op("attention_grad", [*map(operand, (do, q, k, v, o)), lse, starts], list(map(operand, parts)),
                      {**attrs, "deterministic": 1}, "cuda", kernel)
        assert not out[:, -48:].any()
        return out

    theirs, ours = gradients("cudnn"), gradients("flash")
    error = np.linalg.norm(f32(theirs) - f32(ours)) / np.linalg.norm(f32(ours))
    assert error < 8e-3
    assert np.array_equal(theirs, gradients("cudnn"))
