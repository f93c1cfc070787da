"""The loss gradient at sizes where it is cut into chunks of rows, slots of the vocabulary and panels of a slot."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

from .backends import choices

OP = "linear_cross_entropy_grad"
CHOICES = choices(OP, ("avx2", "avx512", "avx512bf16", "amx"))


@pytest.mark.parametrize("tokens, vocabulary", [(129, 1100), (300, 520), (600, 1536), (64, 2000)])
@pytest.mark.parametrize("kernel", CHOICES)
def test_every_cut_gives_the_same_gradient(kernel, tokens, vocabulary):
    rng = np.random.default_rng(3)
    x = f32_to_bf16(rng.standard_normal((tokens, 32)).astype(np.float32))
    weight = bf16_to_f32(f32_to_bf16(rng.standard_normal((vocabulary, 32)).astype(np.float32)))
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[::7] = -100
    dloss = np.where(targets >= 0, 1.0 / tokens, 0.0).astype(np.float32)
    loss, dx = np.zeros(tokens, np.float32), np.zeros((tokens, 32), np.float32)
    dweight = np.ones((vocabulary, 32), np.float32) if kernel["backend"] == "cuda" else None
    head = weight if dweight is None else (f32_to_bf16(weight), "bf16", weight.shape)
    engine.run_op(OP, [(x, "bf16", x.shape), head, targets, dloss], [loss, dx, dweight], {}, threads=2, **kernel)

    logits = bf16_to_f32(x).astype(np.float64) @ weight.T
    logits -= logits.max(axis=1, keepdims=True)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.flatnonzero(targets >= 0)
    wanted = np.where(targets >= 0, -np.log(probability[np.arange(tokens), np.maximum(targets, 0)]), 0.0)
    probability[rows, targets[rows]] -= 1.0
    dlogits = probability * dloss[:, None]
    expected = dlogits @ weight
    np.testing.assert_allclose(loss, wanted, atol=1e-3)
    np.testing.assert_allclose(dx, expected, atol=1e-2 * np.abs(expected).max())
    if dweight is not None:
        expected = dlogits.T @ bf16_to_f32(x).astype(np.float64)
        np.testing.assert_allclose(dweight - 1, expected, atol=1e-2 * np.abs(expected).max())
