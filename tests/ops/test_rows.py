"""What the samples do not reach: operands whose rows lie apart, and indices that must not be trusted."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.errors import EngineError

from .backends import backends, choices, usable

def reference(op: str, inputs: dict, attrs: dict, initial: dict | None = None) -> list[np.ndarray]:
    record = ops.get(op)
    wide = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in inputs.items()}
    return record.reference(wide, record.complete_attrs(attrs), initial or {})


def parts_of(whole: np.ndarray, columns: list[slice], kernel: dict) -> list[np.ndarray]:
    """Views of columns of one array, for outputs; of copies of it on a device, where each operand is copied back alone."""
    return [(whole if kernel["backend"] == "cpu" else whole.copy())[:, part] for part in columns]


@pytest.mark.parametrize("kernel", choices("glu"))
def test_glu_reads_two_halves_of_one_product(kernel):
    product = np.random.default_rng(0).standard_normal((9, 2 * 37)).astype(np.float32)
    gate, up, h = product[:, :37], product[:, 37:], np.full((9, 37), np.nan, np.float32)
    engine.run_op("glu", [gate, up], [h], {"activation": "silu"}, **kernel)
    np.testing.assert_allclose(h, reference("glu", {"gate": gate, "up": up}, {})[0], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kernel", choices("glu_grad"))
def test_glu_grad_writes_two_halves_of_one_gradient(kernel):
    rng = np.random.default_rng(1)
    dh, gate, up = (rng.standard_normal((9, 37)).astype(np.float32) for _ in range(3))
    both = np.full((9, 2 * 37 + 3), np.nan, np.float32)
    dgate, dup = parts_of(both, [slice(0, 37), slice(37, 74)], kernel)
    engine.run_op("glu_grad", [dh, gate, up], [dgate, dup], {"activation": "gelu"}, **kernel)
    expected = reference("glu_grad", {"dh": dh, "gate": gate, "up": up}, {"activation": "gelu"})
    np.testing.assert_allclose(dgate, expected[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(dup, expected[1], rtol=2e-5, atol=1e-6)
    assert np.isnan(both[:, 74:]).all()


@pytest.mark.parametrize("kernel", choices("rope"))
@pytest.mark.parametrize("interleaved", (0, 1))
def test_rope_turns_the_heads_of_a_fused_product(kernel, interleaved):
    rng = np.random.default_rng(2)
    fused = rng.standard_normal((5, 7, 32)).astype(np.float32)
    table = rng.standard_normal((8, 16, 2)).astype(np.float32)
    positions = np.array([0, 7, 3, 3, 1], np.int32)
    x, attrs = fused[:, 2:5], {"inverse": 0, "interleaved": interleaved}
    expected = reference("rope", {"x": x, "positions": positions, "table": table}, attrs)[0]
    around = fused[:, [0, 1, 5, 6]].copy()
    engine.run_op("rope", [x, positions, table], [x], attrs, **kernel)
    np.testing.assert_allclose(fused[:, 2:5], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(fused[:, [0, 1, 5, 6]], around)


@pytest.mark.parametrize("kernel", choices("kv_write"))
def test_kv_write_takes_rows_apart(kernel):
    rng = np.random.default_rng(3)
    fused = rng.standard_normal((4, 6, 8)).astype(np.float32)
    k, v, slots = fused[:, 2:4], fused[:, 4:6], np.array([3, -1, 0, 5], np.int32)
    key_cache, value_cache = (np.zeros((6, 2, 8), np.float32) for _ in range(2))
    engine.run_op("kv_write", [k, v, slots], [key_cache, value_cache], **kernel)
    for rows, cache in ((k, key_cache), (v, value_cache)):
        np.testing.assert_array_equal(cache[[3, 0, 5]], rows[[0, 2, 3]])
        assert not cache[[1, 2, 4]].any()


def runs_with_index(bad: int) -> dict[str, tuple[list, list]]:
    """Calls whose second row is of index ``bad``, where there are four."""
    rng = np.random.default_rng(4)
    index, f32 = np.array([0, bad], np.int32), lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return {
        "embedding": ([index, f32(4, 8)], [f32(2, 8)]),
        "embedding_weight_grad": ([index, f32(2, 8)], [f32(4, 8)]),
        "gather_rows": ([f32(4, 8), index], [f32(2, 8)]),
        "rope": ([f32(2, 1, 8), index, f32(4, 2, 2)], [f32(2, 1, 8)]),
    }


@pytest.mark.parametrize("bad", (-1, 4, 2**31 - 1))
def test_an_index_outside_is_an_error_that_names_it(bad):
    for op, (inputs, outputs) in runs_with_index(bad).items():
        for kernel in usable(op):
            with pytest.raises(EngineError, match=str(bad)):
                engine.run_op(op, inputs, outputs, kernel=kernel)


@pytest.mark.cuda
@pytest.mark.parametrize("bad", (-1, 4, 2**31 - 1))
def test_an_index_outside_gives_nan_on_a_device(bad):
    """Nobody waits for a device inside a step, so what is wrong is seen in its results; a sum leaves such rows out."""
    for op, (inputs, (result,)) in runs_with_index(bad).items():
        before = result.copy()
        engine.run_op(op, inputs, [result], backend="cuda")
        if op == "embedding_weight_grad":
            np.testing.assert_allclose(result[0], before[0] + inputs[1][0], rtol=1e-6)
            np.testing.assert_array_equal(result[1:], before[1:])
        else:
            assert np.isfinite(result[0]).all() and np.isnan(result[1]).any(), op


@pytest.mark.cuda
def test_a_slot_past_the_cache_is_left_out_on_a_device():
    rows, cache = np.ones((2, 1, 8), np.float32), np.zeros((4, 1, 8), np.float32)
    other = cache.copy()
    engine.run_op("kv_write", [rows, rows, np.array([4, 2], np.int32)], [cache, other], backend="cuda")
    for each in (cache, other):
        np.testing.assert_array_equal(each[:, 0, 0], [0, 0, 1, 0])


def test_a_slot_past_the_cache_is_an_error():
    rows, cache = np.zeros((1, 1, 8), np.float32), np.zeros((4, 1, 8), np.float32)
    for kernel in usable("kv_write"):
        with pytest.raises(EngineError, match="slot 4"):
            engine.run_op("kv_write", [rows, rows, np.array([4], np.int32)], [cache, cache.copy()], kernel=kernel)


@pytest.mark.parametrize("choice", backends())
def test_kernels_refuse_what_they_cannot_run(choice):
    f32 = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    refused = [
        ("add", [f32(2, 3), f32(3, 2)], [f32(2, 3)], {}),
        ("glu", [f32(2, 3), f32(2, 3)], [f32(2, 3)], {"activation": "relu"}),
        ("rms_norm", [f32(2, 3), f32(4)], [f32(2, 3), f32(2)], {"eps": 1e-5}),
        ("dropout", [f32(4), np.zeros(2, np.int32)], [f32(4)], {"p": 1.0}),
        ("adamw", [f32(4), None, f32(4)], [f32(4), f32(4), f32(4)], {"max_grad_norm": 1.0}),
    ]
    for op, inputs, outputs, attrs in refused:
        with pytest.raises(EngineError, match="no kernel for op"):
            engine.run_op(op, inputs, outputs, attrs, **choice)
