"""The gradient of attention over long documents, where kernels have more blocks than fit the device: heads in shares, gradients
that lie apart, documents that are longer than said. Against our own kernel for every device."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine

pytestmark = pytest.mark.cuda

HEADS, KV_HEADS, APART = 32, 8, 48
"""APART: what adapters have beside q, k and v, in elements."""


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def columns(rows: np.ndarray, first: int, heads: int, dim: int) -> np.ndarray:
    """A view [T, heads, dim] of columns of rows that are wider."""
    return np.lib.stride_tricks.as_strided(
        rows[:, first * dim:], (len(rows), heads, dim), (rows.strides[0], 2 * dim, 2), writeable=True
    )


def parts(rows: np.ndarray, dim: int) -> list[np.ndarray]:
    return [columns(rows, 0, HEADS, dim), columns(rows, HEADS, KV_HEADS, dim), columns(rows, HEADS + KV_HEADS, KV_HEADS, dim)]


def operand(array: np.ndarray) -> tuple[np.ndarray, str, tuple[int, ...]]:
    return array, "bf16", array.shape


class Call:
    """attention over random numbers, q, k and v joined, and its gradients by one kernel or another."""

    def __init__(self, starts: list[int], dim: int, max_length: int) -> None:
        engine.load_backend("cuda")
        generator = np.random.Generator(np.random.SFC64(3))
        self.dim, self.starts = dim, np.array(starts, np.int32)
        self.joined = bf16(generator.standard_normal((starts[-1], (HEADS + 2 * KV_HEADS) * dim + APART), np.float32))
        self.do = bf16(generator.standard_normal((starts[-1], HEADS, dim), np.float32))
        attrs = {"scale": dim**-0.5, "causal": 1, "window": 0, "softcap": 0.0}
        self.attrs = {**attrs, "max_length": max_length, "deterministic": 1}
        self.o, self.lse = np.zeros_like(self.do), np.zeros((starts[-1], HEADS), np.float32)
        inputs = [*map(operand, parts(self.joined, dim)), self.starts]
        engine.run_op("attention", inputs, [operand(self.o), self.lse], attrs, "cuda")

    def gradients(self, kernel: str) -> np.ndarray:
        out = np.zeros_like(self.joined)
        inputs = [*map(operand, (self.do, *parts(self.joined, self.dim), self.o)), self.lse, self.starts]
        try:
            engine.run_op("attention_grad", inputs, list(map(operand, parts(out, self.dim))), self.attrs, "cuda", kernel)
        except engine.EngineError as error:
            if "cannot run op" not in error.message:
                raise
            pytest.skip(f"{kernel} does not take these operands here")
        assert not out[:, -APART:].any()
        return out[:, :-APART]


@pytest.mark.parametrize("kernel", ["cudnn", "tiles"])
@pytest.mark.parametrize(("starts", "dim"), [([0, 8192], 128), ([0, 300, 2348, 4396, 4500, 8192], 64)], ids=str)
def test_gradients_that_lie_apart(kernel, starts, dim):
    call = Call(starts, dim, max_length=int(max(np.diff(starts))))
    theirs, ours = call.gradients(kernel), call.gradients("flash")
    for first, heads in ((0, HEADS), (HEADS, KV_HEADS), (HEADS + KV_HEADS, KV_HEADS)):
        part = slice(first * dim, (first + heads) * dim)
        error = np.linalg.norm(f32(theirs[:, part]) - f32(ours[:, part])) / np.linalg.norm(f32(ours[:, part]))
        assert error < 8e-3
    for _ in range(3):
        assert np.array_equal(theirs, call.gradients(kernel))


def test_documents_longer_than_said():
    """What does not fit the workspace is not written: everything is not a number, and nothing else is touched."""
    assert np.isnan(f32(Call([0, 1024], 64, max_length=64).gradients("tiles"))).all()
