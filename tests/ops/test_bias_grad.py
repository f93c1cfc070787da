"""bias_grad of matrices that are long and wide enough to be cut among many blocks, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine

from . import backends
from .test_low_rank_products import TOLERANCE, Matrix


@pytest.mark.parametrize("dtype", ("bf16", "f32"))
@pytest.mark.parametrize("kernel", backends.choices("bias_grad"))
@pytest.mark.parametrize("shape", ((1, 8), (130, 2048), (1283, 264), (5000, 1032), (2600, 130)), ids=str)
def test_long_matrices(kernel, dtype, shape):
    rng = np.random.default_rng(0)
    dy = Matrix(rng.standard_normal(shape), dtype, 0)
    before = rng.standard_normal(shape[1]).astype(np.float32)
    results = []
    for _ in range(2):
        dbias = before.copy()
        engine.run_op("bias_grad", [dy.operand], [dbias], {}, **kernel)
        results.append(dbias)
    assert results[0].tobytes() == results[1].tobytes()
    expected = before + dy.values.sum(0)
    assert np.linalg.norm(results[0] - expected) <= TOLERANCE["f32"] * np.linalg.norm(expected)
