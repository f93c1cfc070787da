"""Products on CUDA beyond the samples of `linear`: one narrow side, as in a low-rank branch, rows apart, and operands whose
dtypes differ; each kernel against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import dequantize, quantize

from . import backends

pytestmark = pytest.mark.cuda

TOLERANCE = {"f32": 3e-6, "bf16": 4e-3}
SIZES = ((1, 64), (37, 72), (300, 264), (1056, 512))
"""Tokens, and features of the wide side."""


class Matrix:
    """Rounded values [rows, columns] within rows that are ``gap`` elements longer; the gap is NaN and must stay so."""

    def __init__(self, values: np.ndarray, dtype: str, gap: int) -> None:
        rows, self.columns = values.shape
        wide = np.full((rows, self.columns + gap), np.nan, np.float32)
        wide[:, : self.columns] = values
        self.dtype, self.memory = dtype, quantize(wide, dtype)
        self.view = self.memory[:, : self.columns]
        self.operand = (self.view, dtype, values.shape)

    @property
    def values(self) -> np.ndarray:
        return dequantize(np.ascontiguousarray(self.view), self.dtype).astype(np.float64)

    @property
    def gap(self) -> np.ndarray:
        return dequantize(np.ascontiguousarray(self.memory[:, self.columns :]), self.dtype)


def check(op: str, kernel: str, inputs: list[Matrix | None], result: Matrix, attrs: dict, expected: np.ndarray) -> None:
    before = result.memory.copy()
    operands = [None if matrix is None else matrix.operand for matrix in inputs]
    bits = []
    for _ in range(2):
        result.memory[...] = before
        engine.run_op(op, operands, [result.operand], attrs, backend="cuda", kernel=kernel)
        bits.append(result.memory.tobytes())
    assert bits[0] == bits[1]
    assert np.isnan(result.gap).all()
    error = np.linalg.norm(result.values - expected) / np.linalg.norm(expected)
    assert error <= TOLERANCE[result.dtype], f"{op} by {kernel}: off by {error:.3g}"


def kernels(*among: str) -> list[str]:
    return [name for name in backends.names("linear", "cuda") if name in among] or list(among)


@pytest.fixture
def matrix():
    rng = np.random.default_rng(0)
    return lambda rows, columns, dtype, gap: Matrix(rng.standard_normal((rows, columns)), dtype, gap)


@pytest.mark.parametrize("gap", (0, 32))
@pytest.mark.parametrize("rank", (16, 32, 48, 64))
@pytest.mark.parametrize("kernel", kernels("cublaslt", "narrow", "tiled"))
def test_low_rank_branches(kernel, rank, gap, matrix):
    for tokens, width in SIZES:
        for dtype in ("bf16", "f32"):  # of the results
            x, low = matrix(tokens, width, "bf16", gap), matrix(tokens, rank, "bf16", gap)
            down, up = matrix(rank, width, "bf16", gap), matrix(width, rank, "bf16", gap)
            y = matrix(tokens, width, dtype, gap)
            into = matrix(tokens, width, dtype, gap)
            check("linear", kernel, [low, up, None, y], into, {"alpha": 2.0, "out_dtype": dtype},
                  y.values + 2.0 * low.values @ up.values.T)
            check("linear_input_grad", kernel, [low, down, y], into, {"alpha": 2.0, "out_dtype": dtype},
                  y.values + 2.0 * low.values @ down.values)
            if width % 32 == 0 or kernel != "narrow":
                into = matrix(tokens, rank, dtype, gap)
                check("linear", kernel, [x, down, None, None], into, {"alpha": 1.0, "out_dtype": dtype},
                      x.values @ down.values.T)
                check("linear_input_grad", kernel, [x, up, None], into, {"alpha": 0.5, "out_dtype": dtype},
                      0.5 * x.values @ up.values)
            for left, right in ((low, x), (x, low)):
                gradient = matrix(left.columns, right.columns, dtype, gap)
                check("linear_weight_grad", kernel, [left, right], gradient, {"alpha": 0.5},
                      gradient.values + 0.5 * left.values.T @ right.values)


@pytest.mark.parametrize("gap", (0, 3, 16))
@pytest.mark.parametrize("weight", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("x", ("f32", "bf16"))
@pytest.mark.parametrize("kernel", kernels("cublaslt", "tiled"))
def test_operands_of_other_dtypes_are_converted_first(kernel, x, weight, gap, matrix):
    tokens, rows, width = 65, 136, 80
    left, right = matrix(tokens, width, x, gap), matrix(rows, width, weight, gap)
    read = right.values if x == "f32" else Matrix(right.values, "bf16", 0).values
    for y in ("f32", "bf16"):
        for bias in (None, "f32", "bf16", "f16"):
            vector = None if bias is None else matrix(1, rows, bias, 0)
            into = matrix(tokens, rows, y, gap)
            expected = left.values @ read.T
            if vector is not None:
                vector.operand = (vector.memory.reshape(-1), bias, (rows,))
                expected = expected + Matrix(vector.values, y if y == "bf16" else "f32", 0).values
            check("linear", kernel, [left, right, vector, None], into, {"alpha": 1.0, "out_dtype": y}, expected)
