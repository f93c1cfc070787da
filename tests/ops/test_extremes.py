"""Values at the ends of the range: NaN spreads, infinities and saturation come out as in exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

from .backends import backends, usable

KERNELS = [
    *(pytest.param({"backend": "cpu", "kernel": name}, id=name) for name in usable("glu")),
    *backends()[1:],
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_cast_to_bf16_rounds_to_even_and_keeps_nan(kernel):
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800000, 0x80000000, 0x7FC00000, 0x7F800001,
         0xFFFFFFFF, 0x00800000], np.uint32
    )
    x, y = bits.view(np.float32), np.zeros(len(bits), np.uint16)
    engine.run_op("cast", [x], [(y, "bf16", y.shape)], {"out_dtype": "bf16"}, **kernel)
    nan = np.isnan(x)
    assert np.isnan(bf16_to_f32(y)[nan]).all()
    np.testing.assert_array_equal(y[~nan], f32_to_bf16(x)[~nan])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
def test_activations_over_the_whole_range(kernel, activation):
    gate = np.concatenate([np.linspace(-130, 130, 4001), np.linspace(-2, 2, 4001), [-1e4, 1e4, -3e4, 0.0]])
    gate = gate.astype(np.float32)[None]
    one, h, dgate, dup = np.ones_like(gate), *(np.full_like(gate, np.nan) for _ in range(3))
    attrs = {"activation": activation}
    engine.run_op("glu", [gate, one], [h], attrs, **kernel)
    engine.run_op("glu_grad", [one, gate, one], [dgate, dup], attrs, **kernel)
    wide = {"dh": one.astype(np.float64), "gate": gate.astype(np.float64), "up": one.astype(np.float64)}
    with np.errstate(over="ignore"):
        slope, value = ops.get("glu_grad").reference(wide, attrs, {})
    np.testing.assert_allclose(h, value, rtol=3e-6, atol=2e-7)
    np.testing.assert_allclose(dup, value, rtol=3e-6, atol=2e-7)
    np.testing.assert_allclose(dgate, slope, rtol=3e-6, atol=5e-7)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
def test_nan_spreads_through_activations(kernel, activation):
    gate, up = np.array([[np.nan, 1.0, 1.0]], np.float32), np.array([[1.0, np.nan, 1.0]], np.float32)
    h = np.zeros_like(gate)
    engine.run_op("glu", [gate, up], [h], {"activation": activation}, **kernel)
    assert np.isnan(h[0, :2]).all() and np.isfinite(h[0, 2])


@pytest.mark.parametrize("kernel", KERNELS)
def test_softcap_saturates_and_is_exact_near_zero(kernel):
    x = np.array([-1e30, -1e4, -50.0, -1e-3, 0.0, 1e-6, 2.9, 3.1, 1e30, np.inf], np.float32)
    y = np.zeros_like(x)
    engine.run_op("softcap", [x], [y], {"cap": 30.0}, **kernel)
    np.testing.assert_allclose(y, 30.0 * np.tanh(x.astype(np.float64) / 30.0), rtol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_nan_in_a_row_reaches_the_norm(kernel):
    x, weight = np.ones((2, 40), np.float32), np.ones(40, np.float32)
    x[0, 33] = np.nan
    y, rstd = np.zeros_like(x), np.zeros(2, np.float32)
    engine.run_op("rms_norm", [x, weight], [y, rstd], {"eps": 1e-5}, **kernel)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    norm = np.zeros(1, np.float32)
    engine.run_op("global_norm", [x.reshape(-1)], [norm], backend=kernel["backend"])
    assert np.isnan(norm[0])
