"""What adamw promises beyond its reference: the same bits from every kernel, and nothing lost where it must not act."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

from .backends import backends, choices, usable

KERNELS = choices("adamw")
ATTRS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1.0}


def update(kernel, grad, param, m, v, norm=0.5, step=3.0, **attrs):
    """param, m, v (uint16 bits of bf16) after one update, as bits."""
    outputs = [f32_to_bf16(np.asarray(x, np.float32)) for x in (param, m, v)]
    hyper = np.array([1e-3, step, 0, 0], np.float32)
    engine.run_op("adamw", [np.asarray(grad, np.float32), np.array([norm], np.float32), hyper],
                  [(x, "bf16", x.shape) for x in outputs], {**ATTRS, **attrs}, **kernel)
    return outputs


def state(n):
    rng = np.random.default_rng(4)
    return rng.standard_normal(n), rng.standard_normal(n), 0.1 * rng.standard_normal(n), 0.1 * rng.random(n)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rounding", ("nearest", "stochastic"))
def test_every_kernel_gives_the_same_bits(kernel, rounding):
    attrs = {"rounding": rounding, "seed": 7 << 32 | 9}
    first = update({"backend": "cpu", "kernel": usable("adamw")[0]}, *state(40001), **attrs)
    for ours, theirs in zip(update(kernel, *state(40001), **attrs), first):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("norm", (np.nan, np.inf))
def test_a_norm_that_is_not_finite_leaves_everything_as_it_is(kernel, norm):
    grad, *rest = state(300)
    after = update(kernel, np.full(300, norm), *rest, norm=norm, rounding="stochastic", max_grad_norm=0.0)
    for before, bits in zip(rest, after):
        np.testing.assert_array_equal(bits, f32_to_bf16(before.astype(np.float32)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_stochastic_rounding_is_right_on_average_and_draws_anew(kernel):
    n = 1 << 18
    # m becomes 1 + 1/512: a quarter of the way from 1 to the next bf16.
    grad, m = np.full(n, 1.0 + 10.0 / 512), np.ones(n)
    draw = [update(kernel, grad, m, m, m, step=step, rounding="stochastic", seed=seed, max_grad_norm=0.0)
            for step, seed in ((3.0, 5), (3.0, 6), (3.0, 5 + 2**32), (4.0, 5))]
    raised = [bf16_to_f32(bits[1]) > 1.0 for bits in draw]
    for which in raised:
        assert abs(which.mean() - 0.25) < 0.005
    for other in raised[1:]:
        assert abs(np.mean(raised[0] & other) - 0.0625) < 0.005
    assert abs(np.mean(raised[0][1:] & raised[0][:-1]) - 0.0625) < 0.005


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_stays_zero(kernel):
    zero = np.zeros(77)
    for bits in update(kernel, zero, zero, zero, zero, rounding="stochastic"):
        assert not bits.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_and_infinity_are_not_rounded_into_numbers(kernel):
    grad = np.array([np.nan, np.inf, 1.0] * 20)
    param, m, v = update(kernel, grad, *np.ones((3, 60)), rounding="stochastic", max_grad_norm=0.0)
    assert np.isnan(bf16_to_f32(np.stack([param, m, v]))[:, ::3]).all()
    assert np.isposinf(bf16_to_f32(np.stack([m, v]))[:, 1::3]).all()
    assert np.isfinite(bf16_to_f32(np.stack([param, m, v]))[:, 2::3]).all()


@pytest.mark.parametrize("kernel", backends())
def test_an_unknown_rounding_is_refused(kernel):
    with pytest.raises(engine.EngineError, match="no kernel for op"):
        update(kernel, *state(4), rounding="upwards")
