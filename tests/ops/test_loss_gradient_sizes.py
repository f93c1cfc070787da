"""The loss gradient at sizes where it is cut into chunks of rows, slots of the vocabulary and panels of a slot."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

OP = "linear_cross_entropy_grad"
FEATURES = {"avx2": "avx2", "avx512": "avx512f", "avx512bf16": "avx512bf16", "amx": "amx_bf16"}


def kernels() -> list[str]:
    usable = {name for name, feature in FEATURES.items() if engine.cpu_features().get(feature)}
    return sorted({k["name"] for k in engine.kernels() if k["op"] == OP and k["backend"] == "cpu"} & usable)


@pytest.mark.parametrize("tokens, vocabulary", [(129, 1100), (300, 520), (600, 1536), (64, 2000)])
@pytest.mark.parametrize("kernel", kernels())
def test_every_cut_gives_the_same_gradient(kernel, tokens, vocabulary):
    rng = np.random.default_rng(3)
    x = f32_to_bf16(rng.standard_normal((tokens, 32)).astype(np.float32))
    weight = bf16_to_f32(f32_to_bf16(rng.standard_normal((vocabulary, 32)).astype(np.float32)))
    targets = rng.integers(0, vocabulary, tokens).astype(np.int32)
    targets[::7] = -100
    dloss = np.where(targets >= 0, 1.0 / tokens, 0.0).astype(np.float32)
    loss, dx = np.zeros(tokens, np.float32), np.zeros((tokens, 32), np.float32)
    engine.run_op(OP, [(x, "bf16", x.shape), weight, targets, dloss], [loss, dx, None], {}, kernel=kernel, threads=2)

    logits = bf16_to_f32(x).astype(np.float64) @ weight.T
    logits -= logits.max(axis=1, keepdims=True)
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.flatnonzero(targets >= 0)
    wanted = np.where(targets >= 0, -np.log(probability[np.arange(tokens), np.maximum(targets, 0)]), 0.0)
    probability[rows, targets[rows]] -= 1.0
    expected = (probability * dloss[:, None]) @ weight
    np.testing.assert_allclose(loss, wanted, atol=1e-3)
    np.testing.assert_allclose(dx, expected, atol=1e-2 * np.abs(expected).max())
