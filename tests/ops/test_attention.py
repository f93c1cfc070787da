"""What the samples of attention do not show: independence of the batch, chunked gradients, refused operands."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.ops.attention import reference_attention, reference_attention_grad
from surogate_core.weights.quants import bf16_to_f32, f32_to_bf16

from .backends import backends, choices, names, usable

RNG = np.random.default_rng(11)
ATTRS = {"scale": 0.125, "causal": 1, "window": 0, "softcap": 0.0}


def kernels(op: str) -> list[str]:
    """The kernels of `op` that this processor runs on fp32 operands."""
    return usable(op, ("avx2", "avx512"))


def on_fp32(op: str) -> list:
    """Choices of kernels for fp32 operands: each of the CPU's, and what the registry takes on a device."""
    return [*(pytest.param({"backend": "cpu", "kernel": name}, id=name) for name in kernels(op)), *backends()[1:]]


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


@pytest.mark.parametrize("kernel", on_fp32("attention_grad"))
@pytest.mark.parametrize("attrs", [{}, {"window": 100}, {"causal": 0}, {"causal": 0, "window": 100}])
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
    engine.run_op("attention_grad", [do, q, k, v, o, lse, starts], grads, attrs, threads=2, **kernel)
    for got, want, name in zip(grads, expected, ("dq", "dk", "dv"), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), name


@pytest.mark.parametrize("kernel", on_fp32("attention"))
def test_operands_may_be_parts_of_one_fused_product(kernel):
    """q, k, v (and their gradients) as columns of one [T, heads + 2 * kv_heads, head_dim] array give the same bits."""
    whole = [np.full((150, 8, 32), np.nan, np.float32) for _ in range(4)]
    whole[0][:] = RNG.standard_normal(whole[0].shape)
    heads = [slice(0, 4), slice(4, 6), slice(6, 8)]
    parts = [whole[0][:, part] for part in heads]
    # On a device each operand is copied back alone, so that results cannot be parts of one array there.
    results_of = whole[1:] if kernel["backend"] == "cuda" else [whole[1]] * 3
    do, starts = RNG.standard_normal((150, 4, 32)).astype(np.float32), np.array([0, 61, 150], np.int32)
    results = []
    for q, k, v in (parts, [x.copy() for x in parts]):
        o, lse = np.full((150, 4, 32), np.nan, np.float32), np.full((150, 4), np.nan, np.float32)
        engine.run_op("attention", [q, k, v, starts], [o, lse], ATTRS, **kernel)
        grads = [np.full_like(x, np.nan) for x in (q, k, v)]
        if not results:
            grads = [array[:, part] for array, part in zip(results_of, heads, strict=True)]
        engine.run_op("attention_grad", [do, q, k, v, o, lse, starts], grads, ATTRS, **kernel)
        results.append([x.copy() for x in (o, lse, *grads)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 4, 128), (6, 3, 80)], ids=str)
@pytest.mark.parametrize("attrs", [{}, {"window": 100}], ids=str)
@pytest.mark.parametrize("kernel", [each for each in choices("attention_grad", ()) if each.marks])
def test_packed_documents_in_bf16_on_a_device(kernel, attrs, shape):
    """Documents shorter and longer than any tile, and a tail of starts that repeat: against the float64 reference."""
    heads, kv_heads, dim = shape
    attrs = {**ATTRS, "scale": dim**-0.5, "max_length": 400, "deterministic": 0 if kernel["kernel"] == "cudnn_atomic" else 1,
             **attrs}
    starts = np.array([0, 1, 130, 530, 531, 700, 700, 700], np.int32)
    named = {"do": heads, "q": heads, "k": kv_heads, "v": kv_heads}
    bits = {name: f32_to_bf16(RNG.standard_normal((700, count, dim)).astype(np.float32)) for name, count in named.items()}
    exact = {**{name: bf16_to_f32(x).astype(np.float64) for name, x in bits.items()}, "doc_starts": starts}
    operand = {name: (x, "bf16", x.shape) for name, x in bits.items()}
    o, lse = reference_attention(exact, attrs, {})
    stored = f32_to_bf16(o.astype(np.float32))
    expected = reference_attention_grad({**exact, "o": bf16_to_f32(stored).astype(np.float64), "lse": lse}, attrs, {})
    grads = [np.zeros_like(bits[name]) for name in ("q", "k", "v")]
    inputs = [*operand.values(), (stored, "bf16", stored.shape), lse.astype(np.float32), starts]
    try:
        if kernel["kernel"] in names("attention", "cuda"):
            got = np.zeros_like(stored), np.zeros(lse.shape, np.float32)
            forward = {name: value for name, value in attrs.items() if name != "deterministic"}
            results = [(got[0], "bf16", stored.shape), got[1]]
            engine.run_op("attention", [*inputs[1:4], starts], results, forward, **kernel)
            assert np.linalg.norm(bf16_to_f32(got[0]) - o) <= 4e-3 * np.linalg.norm(o)
            np.testing.assert_allclose(got[1], lse, rtol=1e-4, atol=1e-4)
        engine.run_op("attention_grad", inputs, [(x, "bf16", x.shape) for x in grads], attrs, **kernel)
    except engine.EngineError as error:
        if "cannot run op" not in error.message:
            raise
        pytest.skip(f"{kernel['kernel']} does not take these operands")
    for got, want, name in zip(grads, expected, ("dq", "dk", "dv"), strict=True):
        assert np.linalg.norm(bf16_to_f32(got) - want) <= 6e-3 * np.linalg.norm(want), name


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


@pytest.mark.parametrize("kernel", on_fp32("attention"))
def test_a_large_logit_stays_finite(kernel):
    """Logits of thousands: the maximum is subtracted before the exponential, and hidden keys weigh exactly nothing."""
    q = np.full((40, 1, 16), 100.0, np.float32)
    k = (RNG.standard_normal((40, 1, 16)) * 100).astype(np.float32)
    v = RNG.standard_normal((40, 1, 16)).astype(np.float32)
    starts = np.array([0, 40], np.int32)
    operands = {"q": q, "k": k, "v": v, "doc_starts": starts}
    exact = {name: x if x is starts else x.astype(np.float64) for name, x in operands.items()}
    expected = reference_attention(exact, ATTRS, {})
    o, lse = np.full_like(q, np.nan), np.full((40, 1), np.nan, np.float32)
    engine.run_op("attention", list(operands.values()), [o, lse], ATTRS, **kernel)
    np.testing.assert_allclose(o, expected[0], atol=2e-2)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-5)
