"""linear and rms_norm_linear for a few tokens on CUDA, beyond the ops' samples: sizes that fill tiles and sizes that don't,
rows apart, every kind of bias, weights in blocks, and that a token's bits don't depend on how many others there are."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import dequantize, quantize

pytestmark = pytest.mark.cuda

BACKEND = "cuda"

TOLERANCE = {"f32": 3e-6, "bf16": 4e-3}


class Product:
    """0.5 x weight^T + bias + addend of random operands whose rows have ``gap`` elements between them."""

    def __init__(self, tokens: int, n: int, k: int, *, gap=0, bias=None, addend=False, result="bf16", weight="bf16"):
        rng = np.random.default_rng(tokens + n + k)
        self.gap, self.n, self.result_dtype = gap, n, result
        self.x, x = self._matrix(rng.standard_normal((tokens, k + gap)), "bf16", k)
        self.weight, w = self._matrix(rng.standard_normal((n, k + (gap if weight == "bf16" else 0))), weight, k)
        self.addend, a = self._matrix(rng.standard_normal((tokens, n + gap)), result, n)
        self.bias = None
        self.expected = 0.5 * x @ w.T
        if addend:
            self.expected += a
        else:
            self.addend = None
        if bias is not None:
            values = quantize(rng.standard_normal((1, n)).astype(np.float32), bias)
            self.bias = (values[0], bias, (n,))
            self.expected += dequantize(values, bias)

    @staticmethod
    def _matrix(values: np.ndarray, dtype: str, columns: int):
        memory = quantize(np.ascontiguousarray(values, np.float32), dtype)
        view = memory if columns == values.shape[1] else memory[:, :columns]
        stored = dequantize(np.ascontiguousarray(view), dtype).astype(np.float64)
        return (view, dtype, (values.shape[0], columns)), stored

    def run(self, kernel: str, tokens: int | None = None) -> np.ndarray:
        """The results of the first ``tokens``; those of a row's gap must still be NaN."""
        count = tokens or self.x[2][0]

        def first(operand):
            return operand and (operand[0][:count], operand[1], (count, operand[2][1]))

        memory = quantize(np.full((count, self.n + self.gap), np.nan, np.float32), self.result_dtype)
        result = memory[:, : self.n] if self.gap else memory
        engine.run_op(
            "linear", [first(self.x), self.weight, self.bias, first(self.addend)],
            [(result, self.result_dtype, (count, self.n))], {"alpha": 0.5}, backend=BACKEND, kernel=kernel,
        )
        assert np.isnan(dequantize(np.ascontiguousarray(memory[:, self.n :]), self.result_dtype)).all()
        return dequantize(np.ascontiguousarray(result), self.result_dtype)

    def check(self, kernel: str) -> None:
        found = self.run(kernel)
        error = np.linalg.norm(found - self.expected) / np.linalg.norm(self.expected)
        assert error <= TOLERANCE[self.result_dtype], f"off by {error:.3g}"
        assert found.tobytes() == self.run(kernel).tobytes()


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize(("n", "k"), ((16, 128), (33, 136), (130, 2048), (9000, 64), (72, 4224)))
def test_sizes(tokens, n, k):
    Product(tokens, n, k).check("few")
    Product(tokens, n, k, gap=8, bias="f32", addend=True, result="f32").check("few")


@pytest.fixture
def ring():
    if engine.device_info(BACKEND)["architecture"] != 90:
        pytest.skip("products through a ring are for compute capability 9.0")
    return "ring"


RING_SIZES = ((64, 64), (33, 8), (130, 2048), (20000, 72), (1000, 1024), (72, 8200), (1024, 3072))
"""n, k: of fewer rows than a tile, clusters of two, four and eight blocks, more tiles than blocks, K within a chunk and of
more chunks than stages."""


@pytest.mark.parametrize("tokens", (1, 8, 9, 16, 17, 32, 33, 64, 65, 128))
@pytest.mark.parametrize(("n", "k"), RING_SIZES)
def test_sizes_of_the_ring(ring, tokens, n, k):
    Product(tokens, n, k).check(ring)
    Product(tokens, n, k, gap=8, bias="f32", addend=True, result="f32").check(ring)


@pytest.mark.parametrize("gap", (0, 1, 8))
def test_the_ring_stores_where_quads_do_not_fit(ring, gap):
    Product(5, 66, 128, gap=8, bias="bf16", addend=True).check(ring)
    Product(31, 35 + gap, 256, bias="f16").check(ring)


@pytest.mark.parametrize("tokens", (1, 5, 8))
@pytest.mark.parametrize(("dtype", "offset"), (("bf16", 0.0), ("bf16", 1.0), ("f32", 0.0)))
@pytest.mark.parametrize(("n", "k"), RING_SIZES)
def test_normed_products_of_the_ring(ring, tokens, dtype, offset, n, k):
    """Against float64, and no further from it than the kernel for few tokens."""
    rng = np.random.default_rng(n + k + tokens)
    n += n % 2

    def operand(values, stored):
        memory = quantize(np.ascontiguousarray(values, np.float32), stored)
        return memory, dequantize(memory, stored).astype(np.float64)

    x, x64 = operand(3 * rng.standard_normal((tokens, k)), dtype)
    norm, norm64 = operand(rng.standard_normal((1, k)), dtype)
    weight, weight64 = operand(rng.standard_normal((n, k)) / np.sqrt(k), "bf16")
    bias = rng.standard_normal(n).astype(np.float32)
    normed = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5) * (norm64 + offset)
    product = normed @ weight64.T + bias
    gate, up = np.split(product, 2, axis=1)
    for activation, expected in (("none", product), ("silu", gate / (1.0 + np.exp(-gate)) * up)):
        errors = {}
        for kernel in (ring, "few"):
            y = np.full(expected.shape, np.nan, np.float32)
            engine.run_op(
                "rms_norm_linear",
                [(x, dtype, x64.shape), (norm[0], dtype, (k,)), (weight, "bf16", (n, k)), (bias, "f32", (n,))],
                [(y, "f32", y.shape)], {"activation": activation, "eps": 1e-5, "unit_offset": offset}, backend=BACKEND,
                kernel=kernel,
            )
            errors[kernel] = np.linalg.norm(y - expected) / np.linalg.norm(expected)
        assert errors[ring] <= max(1.2 * errors["few"], 1e-5), errors


@pytest.mark.parametrize(
    ("n", "k", "gap", "bias"), ((70, 130, 0, "bf16"), (17, 7, 3, "f16"), (48, 256, 4, "f32"), (9001, 24, 1, None))
)
def test_rows_that_cannot_be_packed(n, k, gap, bias):
    Product(5, n, k, gap=gap, bias=bias, addend=True).check("few")


@pytest.mark.parametrize("weight", ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"))
@pytest.mark.parametrize(("tokens", "blocks"), ((1, 1), (8, 9), (3, 65)))
def test_weights_in_blocks(weight, tokens, blocks):
    k = blocks * (256 if weight.endswith("k") else 32)
    Product(tokens, 41, k, weight=weight).check("few_blocks")
    Product(tokens, 41, k, gap=3, bias="f32", addend=True, weight=weight).check("few_blocks")


@pytest.mark.parametrize("weight", ("q4_k", "q5_k", "q6_k"))
@pytest.mark.parametrize(("tokens", "units"), ((1, 8), (2, 16), (3, 56), (8, 24), (7, 9), (5, 3)))
def test_blocks_through_a_ring(ring, weight, tokens, units):
    """Rows of one stage, of several and of part of one; more tiles than blocks, and a tile that is not full."""
    if weight == "q6_k" and units % 8 != 0:
        pytest.skip("its rows are then no multiple of 16 bytes")
    Product(tokens, 41, 256 * units, weight=weight).check("blocks_ring")
    Product(tokens, 4500 if units < 16 else 41, 256 * units, gap=8, bias="f32", addend=True, result="f32", weight=weight).check(
        "blocks_ring")


@pytest.mark.parametrize(("kernel", "weight"), (("few", "bf16"), ("few_blocks", "q4_1")))
def test_bits_of_a_token_do_not_depend_on_the_others(kernel, weight):
    for n in (64, 9000):
        product = Product(21, n, 576, bias="bf16", addend=True, result="f32", weight=weight)
        whole = product.run(kernel)
        for tokens in range(1, 21):
            assert product.run(kernel, tokens).tobytes() == whole[:tokens].tobytes()


def test_bits_of_a_normed_token_do_not_depend_on_the_others():
    rng = np.random.default_rng(3)
    x = quantize(rng.standard_normal((21, 576)).astype(np.float32), "bf16")
    norm = quantize(rng.standard_normal((1, 576)).astype(np.float32), "bf16")[0]
    for n in (64, 9000):
        weight = quantize(rng.standard_normal((n, 576)).astype(np.float32), "bf16")
        for activation, columns in (("none", n), ("silu", n // 2)):
            def run(tokens, columns=columns, activation=activation, weight=weight, n=n):
                y = np.zeros((tokens, columns), np.float32)
                inputs = [(x[:tokens], "bf16", (tokens, 576)), (norm, "bf16", (576,)), (weight, "bf16", (n, 576)), None]
                engine.run_op("rms_norm_linear", inputs, [(y, "f32", y.shape)], {"activation": activation}, backend=BACKEND,
                              kernel="few")
                return y

            whole = run(21)
            assert np.abs(whole).max() > 0.1
            for tokens in (1, 2, 7, 8, 9, 16, 20):
                assert run(tokens).tobytes() == whole[:tokens].tobytes()
