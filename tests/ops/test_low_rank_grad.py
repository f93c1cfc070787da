"""low_rank_grad where programs use it: columns of joined buffers, branches side by side, and shapes that are cut into many
blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.bench.kernels import cost
from surogate_core.ops.low_rank_grad import FACTORS, GRADIENTS
from surogate_core.ops.record import TensorType
from surogate_core.program import Program
from surogate_core.program.program import Instruction, TensorEntry, dense_strides

from . import backends
from .test_low_rank_products import TOLERANCE, Matrix

CHOICES = backends.choices("low_rank_grad")
RECORD = ops.get("low_rank_grad")


def filled_up(operands: Sequence, missing: object = None) -> list:
    return [*operands, *[missing] * (len(FACTORS) - len(operands))]


def run(kernel: dict, dy: Matrix, low: Matrix, factors: Sequence[Matrix], dlow: Matrix, gradients: Sequence[np.ndarray]) -> None:
    engine.run_op(
        "low_rank_grad", [dy.operand, low.operand, *filled_up([b.operand for b in factors])],
        [dlow.operand, *filled_up(gradients)], {"alpha": 2.0}, **kernel,
    )


def check(kernel: dict, dy: Matrix, low: Matrix, factors: Sequence[Matrix], gap: int) -> None:
    rng = np.random.default_rng(1)
    before = [rng.standard_normal(b.values.shape).astype(np.float32) for b in factors]
    bits = []
    for _ in range(2):
        dlow, gradients = Matrix(np.full(low.values.shape, np.nan), dy.dtype, gap), [g.copy() for g in before]
        run(kernel, dy, low, factors, dlow, gradients)
        bits.append((dlow.memory.tobytes(), *(g.tobytes() for g in gradients)))
    assert bits[0] == bits[1]
    assert np.isnan(dlow.gap).all()
    values = {"dy": dy.values, "low": low.values, **dict(zip(FACTORS, filled_up([b.values for b in factors])))}
    expected = RECORD.reference(values, {"alpha": 2.0}, dict(zip(GRADIENTS, before)))
    tolerances = [TOLERANCE[dy.dtype], *[TOLERANCE["f32"]] * len(factors)]
    for result, right, tolerance in zip([dlow.values, *gradients], expected, tolerances):
        assert np.linalg.norm(result - right) <= tolerance * np.linalg.norm(right)


def operands(tokens: int, widths: Sequence[int], rank: int, dtype: str, gap: int) -> tuple[Matrix, Matrix, list[Matrix]]:
    """dy, low and each b; the first two with ``gap`` elements behind their rows."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, beside: int) -> Matrix:
        return Matrix(rng.standard_normal((rows, columns)), dtype, beside)

    factors = [matrix(width, rank, 0) for width in widths]
    return matrix(tokens, sum(widths), gap), matrix(tokens, len(widths) * rank, gap), factors


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("kernel", CHOICES)
class TestPlaces:
    @pytest.mark.parametrize("rank", (8, 16, 64))
    def test_columns_of_joined_buffers(self, kernel, rank, dtype):
        if dtype == "f32" and kernel["kernel"] in ("one_pass", "tiles"):
            pytest.skip(f"{kernel['kernel']} is for bf16")
        for tokens, features in ((1, 64), (37, 72), (300, 264), (1056, 1544)):
            check(kernel, *operands(tokens, [features], rank, dtype, 2 * rank), 2 * rank)

    def test_the_shapes_of_a_layer(self, kernel, dtype):
        if dtype == "f32" and kernel["kernel"] in ("one_pass", "tiles"):
            pytest.skip(f"{kernel['kernel']} is for bf16")
        check(kernel, *operands(1500, [4096], 16, dtype, 0), 32)


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("kernel", backends.backends())
class TestBranches:
    @pytest.mark.parametrize("rank", (8, 16, 24, 32))
    @pytest.mark.parametrize("widths", ((192, 64), (512, 128, 128), (72, 1, 200), (40, 136, 8, 328)), ids=str)
    def test_side_by_side_with_something_beside_them(self, kernel, widths, rank, dtype):
        for tokens in (1, 45, 301):
            check(kernel, *operands(tokens, widths, rank, dtype, 2 * rank), rank)

    def test_queries_keys_and_values_of_a_layer(self, kernel, dtype):
        check(kernel, *operands(1500, (2048, 512, 512), 16, dtype, 48), 0)


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("name", backends.usable("low_rank_grad"))
def test_on_the_cpu_each_branch_has_the_bits_that_it_has_alone(name, dtype):
    kernel, widths, rank = {"backend": "cpu", "kernel": name}, (96, 40, 8), 16
    dy, low, factors = operands(77, widths, rank, dtype, 8)
    whole = Matrix(np.zeros(low.values.shape), dtype, 0), [np.zeros(b.values.shape, np.float32) for b in factors]
    run(kernel, dy, low, factors, *whole)
    start = 0
    for i, b in enumerate(factors):
        place = slice(i * rank, (i + 1) * rank)
        alone = Matrix(np.zeros((77, rank)), dtype, 0), [np.zeros(b.values.shape, np.float32)]
        own = Matrix(dy.values[:, start : start + widths[i]], dtype, 0), Matrix(low.values[:, place], dtype, 0)
        run(kernel, *own, [b], *alone)
        np.testing.assert_array_equal(whole[0].values[:, place], alone[0].values)
        np.testing.assert_array_equal(whole[1][i], alone[1][0])
        start += widths[i]


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["one_pass", "tiles"])
def test_operands_that_begin_within_a_pack(kernel):
    """Rows that are whole packs apart may still begin anywhere."""
    rng = np.random.default_rng(2)
    wide = [Matrix(rng.standard_normal((40, columns + 8)), "bf16", 0) for columns in (64, 16)]
    b = Matrix(rng.standard_normal((64, 16)), "bf16", 0)
    dy, low = (Matrix(m.values[:, 3 : m.columns - 5], "bf16", 0) for m in wide)
    for narrow, whole in ((dy, wide[0]), (low, wide[1])):
        narrow.view = whole.memory[:, 3 : whole.columns - 5]
        narrow.operand = (narrow.view, "bf16", narrow.view.shape)
    check({"backend": "cuda", "kernel": kernel}, dy, low, [b], 16)


class TestShapes:
    """Of two branches of 6 and 3 columns and rank 4, and 5 tokens."""

    right = {"dy": (5, 9), "low": (5, 8), "b": (6, 4), "b_2": (3, 4)}

    def infer(self, **changed: tuple[int, int] | None) -> list[TensorType]:
        shapes = {**self.right, **changed}
        inputs = [shapes.get(operand.name) for operand in RECORD.inputs]
        return RECORD.infer([None if shape is None else TensorType(shape, "bf16") for shape in inputs], {"alpha": 1.0})

    def test_of_what_is_there(self):
        dlow, db, db_2, *absent = self.infer()
        assert (dlow, db, db_2) == (TensorType((5, 8), "bf16"), TensorType((6, 4), "f32"), TensorType((3, 4), "f32"))
        assert [t.shape for t in absent] == [(0, 4), (0, 4)]

    @pytest.mark.parametrize("changed, why", [
        ({"dy": (5, 10)}, "dy has 10 columns, the b's 9 rows"), ({"low": (5, 4)}, r"low must have shape \(5, 8\)"),
        ({"b_2": (3, 5)}, "every b must have 4 columns"), ({"b_2": None}, "dy has 9 columns, the b's 6 rows"),
        ({"b_2": None, "b_3": (3, 4)}, "a b is missing before the last one"), ({"dy": (5, 9, 1)}, r"dy is \[T, N\]"),
    ])
    def test_others_are_refused(self, changed, why):
        with pytest.raises(ValueError, match=why):
            self.infer(**changed)


def test_what_a_call_costs():
    """dy, low, dlow and B's once, gradients of B twice; two products of all columns."""
    t, widths, rank = 100, (64, 16, 24), 8
    program, n, g = Program(), sum(widths), len(widths)
    shapes = {"dy": (t, n), "low": (t, g * rank), "dlow": (t, g * rank)}
    shapes |= {name: (width, rank) for names in (FACTORS, GRADIENTS) for name, width in zip(names, widths)}
    for name, shape in shapes.items():
        dtype = "f32" if name in GRADIENTS else "bf16"
        program.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
    call = Instruction(
        "low_rank_grad", ("dy", "low", *filled_up(FACTORS[:g])), ("dlow", *filled_up(GRADIENTS[:g])), (("alpha", 1.0),))
    flops, moved = cost(program, call, [t], 1)
    assert flops == 4 * t * n * rank
    assert moved == 2 * (t * n + 2 * t * g * rank + n * rank) + 2 * 4 * n * rank
