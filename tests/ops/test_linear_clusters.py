"""linear and rms_norm_linear for some tens of tokens by clusters of CUDA's blocks, beyond the ops' samples: sizes that
fill tiles and parts of K and sizes that don't, rows apart, both kinds of ends."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import cuda
from surogate_core.ops.rms_norm_linear import reference_rms_norm_linear
from surogate_core.weights.quants import dequantize, quantize

from .test_few_tokens import BACKEND, Product

pytestmark = pytest.mark.cuda

KERNEL = "clusters"
TOKENS = (9, 16, 17, 32, 33, 64)


@pytest.fixture(autouse=True, scope="module")
def has_clusters():
    if cuda.find_driver().devices[0].architecture < 90:
        pytest.skip("this device has no clusters of blocks")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("n", "k"), ((16, 8), (33, 136), (130, 2048), (9000, 64), (257, 8200), (1024, 3080), (17000, 520))
)
def test_sizes(tokens, n, k):
    Product(tokens, n, k).check(KERNEL)
    Product(tokens, n, k, gap=8, bias="f32", addend=True, result="f32").check(KERNEL)
    Product(tokens, n, k, gap=8, bias="bf16", addend=True).check(KERNEL)


def test_bits_do_not_depend_on_how_many_tokens_there_are():
    product = Product(64, 300, 2080, bias="bf16", addend=True)
    whole = product.run(KERNEL)
    for tokens in (1, 9, 16, 31, 33):
        assert product.run(KERNEL, tokens).tobytes() == whole[:tokens].tobytes()


def rounded(rng, shape, dtype):
    """(what `run_op` takes, the values in float64) of random numbers, times 3 and 1 larger."""
    stored = quantize((3.0 * rng.standard_normal(shape) + 1.0).astype(np.float32).reshape(-1, shape[-1]), dtype)
    return (stored.reshape(shape), dtype, shape), dequantize(stored, dtype).astype(np.float64).reshape(shape)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("n", "k", "activation"),
    (
        (34, 136, "silu"), (130, 2048, "gelu"), (130, 2048, "none"), (4100, 72, "gelu_tanh"), (2112, 1032, "silu"),
        (256, 8200, "none"),
    ),
)
def test_normed(tokens, n, k, activation):
    rng = np.random.default_rng(tokens + n + k)
    columns = n if activation == "none" else n // 2
    for dtype, norm_dtype, biased in (("bf16", "bf16", False), ("f32", "f32", True)):
        shapes = {"x": (tokens, k), "norm_weight": (k,), "weight": (n, k), "bias": (n,)}
        dtypes = {"x": "bf16", "norm_weight": norm_dtype, "weight": "bf16", "bias": dtype}
        operands = {name: rounded(rng, shape, dtypes[name]) for name, shape in shapes.items()}
        if not biased:
            operands["bias"] = (None, None)
        attrs = {"eps": 1e-5, "unit_offset": 1.0, "alpha": 0.01, "activation": activation}
        (expected,) = reference_rms_norm_linear({name: value for name, (_, value) in operands.items()}, attrs, {})
        found = []
        for _ in range(2):
            memory = quantize(np.full((tokens, columns + 8), np.nan, np.float32), dtype)
            y = (memory[:, :columns], dtype, (tokens, columns))
            engine.run_op(
                "rms_norm_linear", [given for given, _ in operands.values()], [y], attrs, backend=BACKEND, kernel=KERNEL
            )
            assert np.isnan(dequantize(np.ascontiguousarray(memory[:, columns:]), dtype)).all()
            found.append(dequantize(np.ascontiguousarray(y[0]), dtype))
        assert np.linalg.norm(found[0] - expected) <= 6e-3 * np.linalg.norm(expected)
        assert found[0].tobytes() == found[1].tobytes()
