"""What the matrix products promise beyond their samples: batch independence, unsupervised rows, refusals."""

from __future__ import annotations

import time

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError, onednn
from surogate_core.weights.quants import dequantize, f32_to_bf16, quantize

from . import backends

QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def names(op: str, ending: str = "") -> list[str]:
    """Of kernels that this processor runs."""
    return [name for name in backends.names(op) if name.endswith(ending) and backends.runs_here(name)]


def weight(rng, dtype: str, rows: int, width: int):
    values = rng.standard_normal((rows, width)).astype(np.float32)
    return values if dtype == "f32" else (quantize(values, dtype), dtype, values.shape)


def run_linear(x, w, tokens: int, rows: int, kernel: str) -> np.ndarray:
    y = np.full((tokens, rows), np.nan, np.float32)
    engine.run_op("linear", [x, w, None, None], [y], {"alpha": 1.0}, kernel=kernel, threads=2)
    return y


SHORT = ("q4_0", "q4_1", "q5_0", "q5_1")
WIDE = ("q4_k", "q5_k", "q6_k")
OF_BF16 = {"avx512_bf16_few": (*SHORT, "q8_0"), "avx512_bf16_wide_few": WIDE, "amx_bf16_codes_few": SHORT,
           "amx_bf16_tables_few": SHORT, "amx_bf16_few": ("q8_0", *WIDE)}
"""What kernels for few bf16 tokens read; the others read everything, and tokens in fp32 too."""
MOST = {"amx_bf16_few": 16, "amx_bf16_tables_few": 32}
"""Tokens that they take at most, where that is not 8."""


def takes(kernel: str, x: str, w: str) -> bool:
    return kernel not in OF_BF16 or (x == "bf16" and w in OF_BF16[kernel])


FEW = [
    (kernel, x, w)
    for kernel in names("linear", "_few") for x in ("f32", "bf16") for w in ("f32", "bf16", "f16", *QUANTISED)
    if takes(kernel, x, w)
]


@pytest.mark.parametrize("kernel, x_dtype, w_dtype", FEW)
def test_a_decoded_token_has_the_same_bits_alone_and_in_a_batch(kernel, x_dtype, w_dtype):
    rng = np.random.default_rng(0)
    most = MOST.get(kernel, 8)
    values = rng.standard_normal((most, 512)).astype(np.float32)
    w = weight(rng, w_dtype, 77, 512)

    def run(first: int, tokens: int) -> np.ndarray:
        x = values[first : first + tokens]
        return run_linear(x if x_dtype == "f32" else (f32_to_bf16(x), "bf16", x.shape), w, tokens, 77, kernel)

    alone = np.concatenate([run(i, 1) for i in range(most)])
    assert np.isfinite(alone).all()
    for tokens in range(2, most + 1):
        assert np.array_equal(run(0, tokens), alone[:tokens])


@pytest.mark.parametrize("kernel", [k for k in names("linear") if not k.endswith("_few") and k != "onednn"])
def test_a_prompt_token_has_the_same_bits_whatever_the_prompt(kernel):
    rng = np.random.default_rng(1)
    bits = f32_to_bf16(rng.standard_normal((200, 320)).astype(np.float32))
    w = weight(rng, "q8_0", 150, 320)

    def run(tokens: int) -> np.ndarray:
        return run_linear((bits[:tokens].copy(), "bf16", (tokens, 320)), w, tokens, 150, kernel)

    assert np.array_equal(run(33), run(200)[:33])


@pytest.mark.skipif("amx_bf16_tables_few" not in names("linear"), reason="this processor has no AMX")
@pytest.mark.parametrize("rows", [32, 77, 1100])
@pytest.mark.parametrize("dtype", SHORT)
def test_a_few_tokens_get_the_bits_of_a_prompt(dtype, rows):
    """Scales of both signs and of none: a code's value is then a zero of either sign."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((rows, 352)).astype(np.float32)
    values[:, :32] = 0
    w = (quantize(values, dtype), dtype, values.shape)
    bits = f32_to_bf16(rng.standard_normal((32, 352)).astype(np.float32))
    for tokens in (1, 16, 17, 32):
        x = (bits[:tokens].copy(), "bf16", (tokens, 352))
        few, prompt = (run_linear(x, w, tokens, rows, kernel) for kernel in ("amx_bf16_tables_few", "amx"))
        assert np.array_equal(few.view(np.uint32), prompt.view(np.uint32)), tokens


@pytest.mark.parametrize("kernel", names("linear_cross_entropy_grad"))
def test_rows_without_a_target_are_not_looked_at(kernel):
    rng = np.random.default_rng(2)
    bits = f32_to_bf16(rng.standard_normal((40, 64)).astype(np.float32))
    targets = np.full(40, -1, np.int32)
    targets[[3, 17, 39]] = (0, 5, 699)
    bits[targets < 0] = 0x7FC0  # NaN
    loss, dx = np.full(40, np.nan, np.float32), np.full((40, 64), 0x7FC0, np.uint16)
    weights = np.ones(40, np.float32)
    engine.run_op(
        "linear_cross_entropy_grad",
        [(bits, "bf16", bits.shape), weight(rng, "bf16", 700, 64), targets, weights],
        [loss, (dx, "bf16", dx.shape), None],
        kernel=kernel,
    )
    assert (loss[targets < 0] == 0).all() and (loss[targets >= 0] > 0).all()
    assert (dx[targets < 0] == 0).all() and ((dx[targets >= 0] & 0x7F80) != 0x7F80).all()


@pytest.mark.parametrize("kernel", names("linear_cross_entropy"))
def test_a_target_outside_the_vocabulary_is_refused(kernel):
    x = (np.zeros((2, 32), np.uint16), "bf16", (2, 32))
    w = (np.zeros((10, 32), np.uint16), "bf16", (10, 32))
    with pytest.raises(EngineError, match="target 10 of token 1 is outside the vocabulary of 10"):
        targets = np.array([1, 10], np.int32)
        engine.run_op("linear_cross_entropy", [x, w, targets], [np.zeros(2, np.float32)], kernel=kernel)


def test_onednn_is_found_where_its_distribution_lists_it():
    assert onednn.preload() is None
    assert onednn.find().name.startswith("libdnnl")
    assert "onednn" in names("linear")


ADAPTER_KERNELS = [(op, name) for op in ("linear", "linear_input_grad") for name in names(op) if not name.endswith("_few")]


@pytest.mark.parametrize("kernel", [k for k in names("linear") if k in ("amx", "avx512bf16")])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_quantised_weight_is_multiplied_as_its_values_in_bf16(kernel, dtype):
    """But for those few that one rounding less sends to another bf16 number. 77 rows: whole groups of 16, and others."""
    rng = np.random.default_rng(2)
    x = (f32_to_bf16(rng.standard_normal((37, 512)).astype(np.float32)), "bf16", (37, 512))
    stored = quantize(rng.standard_normal((77, 512)).astype(np.float32), dtype)
    found = run_linear(x, (stored, dtype, (77, 512)), 37, 77, kernel)
    expected = run_linear(x, (f32_to_bf16(dequantize(stored, dtype)), "bf16", (77, 512)), 37, 77, kernel)
    assert (found == expected).mean() > 0.95
    assert np.abs(found - expected).max() < 0.1


@pytest.mark.parametrize("op, kernel", ADAPTER_KERNELS)
def test_a_factor_and_an_addend_are_no_reason_to_be_slow(op, kernel):
    """What an adapter adds: alpha * x @ B + addend over a short inner length. A library may fall back to plain loops."""
    rng = np.random.default_rng(5)
    tokens, rows, width = 256, 192, 16
    x = rng.standard_normal((tokens, width if op == "linear" else rows)).astype(np.float32)
    w = rng.standard_normal((rows, width)).astype(np.float32)
    if "amx" in kernel or "bf16" in kernel:
        x, w = (f32_to_bf16(x), "bf16", x.shape), (f32_to_bf16(w), "bf16", w.shape)
    result = np.zeros((tokens, rows if op == "linear" else width), np.float32)

    def seconds(alpha: float, addend: np.ndarray | None) -> float:
        inputs = [x, w, None, addend] if op == "linear" else [x, w, addend]
        times = []
        for _ in range(5):
            started = time.perf_counter()
            engine.run_op(op, inputs, [result], {"alpha": alpha}, kernel=kernel, threads=1)
            times.append(time.perf_counter() - started)
        return min(times)

    assert seconds(2.0, np.ones_like(result)) < 10 * seconds(1.0, None) + 0.005
