"""What the samples of attention do not show: independence of the batch, chunked gradients, refused operands."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.ops.attention import reference_attention, reference_attention_grad

from .backends import backends, choices, names, usable

RNG = np.random.default_rng(11)
ATTRS = {"scale": 0.125, "causal": 1, "window": 0, "softcap": 0.0}


def kernels(op: str) -> list[str]:
    """The kernels of `op` that this processor runs on fp32 operands."""
    return usable(op, ("avx2", "avx512"))


def paged_call(kernel: str, q, caches, ids, positions, tables, window: int, threads: int) -> np.ndarray:
    o = np.full((len(ids), q.shape[1], caches[1].shape[2]), np.nan, np.float32)
    attrs = {"scale": 0.125, "window": window, "softcap": 0.0, "block_size": 16}
    operands = [q, *caches, ids.astype(np.int32), positions.astype(np.int32), tables]
    engine.run_op("paged_attention", operands, [o], attrs, kernel=kernel, threads=threads)
    return o


@pytest.mark.parametrize("kernel", kernels("paged_attention"))
@pytest.mark.parametrize("window", [0, 150])
def test_a_token_gives_the_same_bits_alone_and_in_a_prompt(kernel, window):
    tokens, heads, kv_heads, dim, block = 600, 6, 2, 64, 16
    num_blocks = -(-tokens // block)
    tables = RNG.permutation(num_blocks).astype(np.int32)[None]
    caches = [RNG.standard_normal((num_blocks * block, kv_heads, dim)).astype(np.float32) for _ in range(2)]
    q = RNG.standard_normal((tokens, heads, dim)).astype(np.float32)
    ids, positions = np.zeros(tokens), np.arange(tokens)
    prompt = paged_call(kernel, q, caches, ids, positions, tables, window, threads=2)
    for part in ([0], [255], [256], [599], list(range(90, 93)), list(range(200, 310)), [511, 3, 130]):
        index = np.array(part)
        alone = paged_call(kernel, q[index], caches, ids[index], positions[index], tables, window, threads=1)
        assert alone.tobytes() == prompt[index].tobytes(), f"tokens {part}"


@pytest.mark.parametrize("kernel", kernels("attention_grad"))
@pytest.mark.parametrize("attrs", [{}, {"window": 100}, {"causal": 0}])
def test_a_gradient_of_many_chunks(kernel, attrs):
    """One document of several query chunks beside short ones: partial sums are added, none is left undefined."""
    attrs = {**ATTRS, **attrs}
    starts = np.array([0, 700, 701, 830, 830], np.int32)
    q, do = (RNG.standard_normal((830, 4, 32)).astype(np.float32) for _ in range(2))
    k, v = (RNG.standard_normal((830, 2, 32)).astype(np.float32) for _ in range(2))
    named = {"do": do, "q": q, "k": k, "v": v, "doc_starts": starts}
    exact = {name: x.astype(np.float64) if x.dtype != np.int32 else x for name, x in named.items()}
    o, lse = (x.astype(np.float32) for x in reference_attention(exact, attrs, {}))
    expected = reference_attention_grad({**exact, "o": o.astype(np.float64), "lse": lse.astype(np.float64)}, attrs, {})
    grads = [np.full(x.shape, np.nan, np.float32) for x in (q, k, v)]
    engine.run_op("attention_grad", [do, q, k, v, o, lse, starts], grads, attrs, kernel=kernel, threads=2)
    for got, want, name in zip(grads, expected, ("dq", "dk", "dv"), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), name


@pytest.mark.parametrize("kernel", kernels("attention"))
def test_operands_may_be_parts_of_one_fused_product(kernel):
    """q, k, v (and their gradients) as columns of one [T, heads + 2 * kv_heads, head_dim] array give the same bits."""
    fused, apart = (np.full((150, 8, 32), np.nan, np.float32) for _ in range(2))
    fused[:] = RNG.standard_normal(fused.shape)
    parts = [fused[:, :4], fused[:, 4:6], fused[:, 6:]]
    do, starts = RNG.standard_normal((150, 4, 32)).astype(np.float32), np.array([0, 61, 150], np.int32)
    results = []
    for q, k, v in (parts, [x.copy() for x in parts]):
        o, lse = np.full((150, 4, 32), np.nan, np.float32), np.full((150, 4), np.nan, np.float32)
        engine.run_op("attention", [q, k, v, starts], [o, lse], ATTRS, kernel=kernel)
        grads = [apart[:, :4], apart[:, 4:6], apart[:, 6:]] if not results else [np.full_like(x, np.nan) for x in parts]
        engine.run_op("attention_grad", [do, q, k, v, o, lse, starts], grads, ATTRS, kernel=kernel)
        results.append([x.copy() for x in (o, lse, *grads)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_documents_must_cover_the_tokens():
    q = np.zeros((8, 2, 16), np.float32)
    outputs = [np.zeros_like(q), np.zeros((8, 2), np.float32)]
    for starts, reason in (([0, 5], "from 0 to 5"), ([1, 8], "from 1 to 8"), ([0, 6, 4, 8], "must ascend")):
        with pytest.raises(engine.EngineError, match=reason):
            engine.run_op("attention", [q, q, q, np.array(starts, np.int32)], outputs, ATTRS)


def test_paged_positions_and_blocks_are_checked():
    kernel = kernels("paged_attention")[0]
    cache = np.zeros((32, 1, 16), np.float32)
    q = np.zeros((1, 1, 16), np.float32)

    def call(sequence, position, table):
        ids, positions, tables = np.array([sequence]), np.array([position]), np.array([table], np.int32)
        paged_call(kernel, q, [cache, cache], ids, positions, tables, window=0, threads=1)

    call(0, 31, [1, 0])
    for sequence, position, table, reason in (
        (1, 0, [0, 1], "sequence 1"),
        (0, 32, [0, 1], "position 32"),
        (0, 20, [0, 2], "block 2"),
        (0, 3, [-1, 1], "block -1"),
    ):
        with pytest.raises(engine.EngineError, match=reason):
            call(sequence, position, table)


def test_a_large_logit_stays_finite():
    """Logits of thousands: the maximum is subtracted before the exponential, and hidden keys weigh exactly nothing."""
    q = np.full((40, 1, 16), 100.0, np.float32)
    k = (RNG.standard_normal((40, 1, 16)) * 100).astype(np.float32)
    v = RNG.standard_normal((40, 1, 16)).astype(np.float32)
    starts = np.array([0, 40], np.int32)
    operands = {"q": q, "k": k, "v": v, "doc_starts": starts}
    exact = {name: x if x is starts else x.astype(np.float64) for name, x in operands.items()}
    expected = reference_attention(exact, ATTRS, {})
    for kernel in kernels("attention"):
        o, lse = np.full_like(q, np.nan), np.full((40, 1), np.nan, np.float32)
        engine.run_op("attention", list(operands.values()), [o, lse], ATTRS, kernel=kernel)
        np.testing.assert_allclose(o, expected[0], atol=2e-2)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-5)
