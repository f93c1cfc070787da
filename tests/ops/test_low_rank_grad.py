"""low_rank_grad where programs use it: columns of joined buffers, and shapes that are cut into many blocks."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine

from . import backends
from .test_low_rank_products import TOLERANCE, Matrix

CHOICES = backends.choices("low_rank_grad")


def check(kernel: dict, dy: Matrix, b: Matrix, low: Matrix, gap: int) -> None:
    rng = np.random.default_rng(1)
    before = rng.standard_normal((b.values.shape)).astype(np.float32)
    bits = []
    for _ in range(2):
        dlow, db = Matrix(np.full(low.values.shape, np.nan), dy.dtype, gap), before.copy()
        engine.run_op("low_rank_grad", [dy.operand, b.operand, low.operand], [dlow.operand, db], {"alpha": 2.0}, **kernel)
        bits.append((dlow.memory.tobytes(), db.tobytes()))
    assert bits[0] == bits[1]
    assert np.isnan(dlow.gap).all()
    for result, expected, tolerance in (
        (dlow.values, 2.0 * dy.values @ b.values, TOLERANCE[dy.dtype]),
        (db, before + 2.0 * dy.values.T @ low.values, TOLERANCE["f32"]),
    ):
        assert np.linalg.norm(result - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("kernel", CHOICES)
class TestPlaces:
    def operands(self, tokens: int, features: int, rank: int, dtype: str, gap: int) -> list[Matrix]:
        rng = np.random.default_rng(0)
        shapes = ((tokens, features, gap), (features, rank, 0), (tokens, rank, gap))
        return [Matrix(rng.standard_normal((rows, columns)), dtype, beside) for rows, columns, beside in shapes]

    @pytest.mark.parametrize("rank", (8, 16, 64))
    def test_columns_of_joined_buffers(self, kernel, rank, dtype):
        if dtype == "f32" and kernel["kernel"] == "one_pass":
            pytest.skip("one_pass is for bf16")
        for tokens, features in ((1, 64), (37, 72), (300, 264), (1056, 1544)):
            check(kernel, *self.operands(tokens, features, rank, dtype, 2 * rank), 2 * rank)

    def test_the_shapes_of_a_layer(self, kernel, dtype):
        if dtype == "f32" and kernel["kernel"] == "one_pass":
            pytest.skip("one_pass is for bf16")
        check(kernel, *self.operands(1500, 4096, 16, dtype, 0), 32)


@pytest.mark.cuda
def test_operands_that_begin_within_a_pack():
    """Rows that are whole packs apart may still begin anywhere."""
    rng = np.random.default_rng(2)
    wide = [Matrix(rng.standard_normal((40, columns + 8)), "bf16", 0) for columns in (64, 16)]
    b = Matrix(rng.standard_normal((64, 16)), "bf16", 0)
    dy, low = (Matrix(m.values[:, 3 : m.columns - 5], "bf16", 0) for m in wide)
    for narrow, whole in ((dy, wide[0]), (low, wide[1])):
        narrow.view = whole.memory[:, 3 : whole.columns - 5]
        narrow.operand = (narrow.view, "bf16", narrow.view.shape)
    check({"backend": "cuda", "kernel": "one_pass"}, dy, b, low, 16)
