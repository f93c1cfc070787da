"""The loss on CUDA where a batch of tokens is cut into chunks of logits, over a vocabulary that no kernel likes."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

pytestmark = pytest.mark.cuda

# 1500 tokens of 128257 logits make two chunks, of 768 and 732.
TOKENS, FIRST, VOCABULARY, WIDTH = 1500, 768, 128257, 64


def bf16(values):
    bits = f32_to_bf16(np.asarray(values, np.float32))
    return bits, "bf16", bits.shape


def operands():
    rng = np.random.default_rng(8)
    targets = rng.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    targets[::5], targets[[1, FIRST + 1]] = -1, VOCABULARY - 1
    weight = bf16(0.3 * rng.standard_normal((VOCABULARY, WIDTH)))
    return rng.standard_normal((TOKENS, WIDTH)), weight, targets, rng.random(TOKENS).astype(np.float32) / TOKENS


def gradients(x, weight, targets, dloss, dweight, **attrs):
    loss, dx = np.full(len(x), np.nan, np.float32), np.zeros(x.shape, np.uint16)
    outputs = [loss, (dx, "bf16", dx.shape), dweight]
    engine.run_op("linear_cross_entropy_grad", [bf16(x), weight, targets, dloss], outputs, attrs, backend="cuda")
    return loss, dx


@pytest.mark.parametrize("softcap", (0.0, 8.0))
def test_chunks_are_what_each_would_be_alone(softcap):
    x, weight, targets, dloss = operands()
    whole, parts = (np.zeros((VOCABULARY, WIDTH), np.float32) for _ in range(2))
    loss, dx = gradients(x, weight, targets, dloss, whole, softcap=softcap)
    for part in (slice(0, FIRST), slice(FIRST, TOKENS)):
        one_loss, one_dx = gradients(x[part], weight, targets[part], dloss[part], parts, softcap=softcap)
        np.testing.assert_array_equal(loss[part], one_loss)
        np.testing.assert_array_equal(dx[part], one_dx)
    np.testing.assert_array_equal(whole, parts)
    forward = np.full(TOKENS, np.nan, np.float32)
    engine.run_op("linear_cross_entropy", [bf16(x), weight, targets], [forward], {"softcap": softcap}, backend="cuda")
    np.testing.assert_allclose(forward, loss, rtol=2e-6)


def test_rows_of_a_wide_vocabulary_are_right():
    x, weight, targets, dloss = operands()
    dweight = np.zeros((VOCABULARY, WIDTH), np.float32)
    loss, dx = gradients(x, weight, targets, dloss, dweight)
    rows = np.arange(0, TOKENS, 37)
    table = bf16_to_f32(weight[0]).astype(np.float64)
    logits = bf16_to_f32(bf16(x[rows])[0]).astype(np.float64) @ table.T
    largest = logits.max(axis=1)
    probability = np.exp(logits - largest[:, None])
    total = probability.sum(axis=1)
    picked = logits[np.arange(len(rows)), np.maximum(targets[rows], 0)]
    wanted = np.where(targets[rows] < 0, 0.0, largest + np.log(total) - picked)
    np.testing.assert_allclose(loss[rows], wanted, rtol=1e-5)
    dz = probability / total[:, None]
    dz[np.arange(len(rows)), np.maximum(targets[rows], 0)] -= 1.0
    dz *= np.where(targets[rows] < 0, 0.0, dloss[rows])[:, None]
    expected = dz @ table
    assert np.linalg.norm(bf16_to_f32(dx[rows]) - expected) <= 6e-3 * np.linalg.norm(expected)

    # Rows of dweight, from all tokens; the last one is the target of a token in each chunk.
    columns, tokens = np.array([0, 64001, VOCABULARY - 1]), bf16_to_f32(bf16(x)[0]).astype(np.float64)
    log_sums = loss + (tokens * table[np.maximum(targets, 0)]).sum(axis=1)
    dz = np.exp(tokens @ table[columns].T - log_sums[:, None]) - (targets[:, None] == columns)
    expected = (dz * np.where(targets < 0, 0.0, dloss)[:, None]).T @ tokens
    error, size = np.linalg.norm(dweight[columns] - expected, axis=1), np.linalg.norm(expected, axis=1)
    assert (error <= 6e-3 * size).all()


def test_a_target_outside_the_vocabulary_makes_its_token_nan_and_no_other():
    x, weight, targets, dloss = operands()
    targets[3] = VOCABULARY
    loss, dx = gradients(x, weight, targets, dloss, None)
    assert np.isnan(loss[3]) and np.isnan(bf16_to_f32(dx[3])).all()
    others = np.arange(TOKENS) != 3
    assert np.isfinite(loss[others]).all() and np.isfinite(bf16_to_f32(dx[others])).all()
