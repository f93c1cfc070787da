"""Kernels that promise a token the same bits in every batch: alone, at another place, among more or fewer others."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.weights.formats import byte_count
from surogate_core.weights.tensor import from_f32

RNG = np.random.default_rng(5)
BATCHES = ([0], [3, 0], [5, 4, 3, 2, 1, 0, 6, 7, 8], list(range(16)) * 2, list(range(70)))


def invariant(op: str) -> list[str]:
    """Names of the op's kernels of the CPU that make the promise."""
    engine.load_backend("cpu")
    return [k["name"] for k in engine.kernels() if k["op"] == op and k["backend"] == "cpu" and k["row_invariant"]]


def as_operand(values: np.ndarray, dtype: str):
    stored = from_f32("x", values.astype(np.float32), dtype)
    return np.ascontiguousarray(stored.data), dtype, values.shape


def run(op, kernel, inputs, shape, dtype, attrs, threads=1):
    size = byte_count(dtype, shape) // (2 if dtype == "bf16" else 4)
    out = np.zeros(size, np.uint16 if dtype == "bf16" else np.float32).reshape(shape)
    engine.run_op(op, inputs, [(out, dtype, shape)], attrs, "cpu", kernel, threads)
    return out


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("weight", ["f32", "bf16", "q4_1", "q8_0"])
@pytest.mark.parametrize("shape", [(72, 96), (160, 640), (33, 2112)])
def test_products(dtype, weight, shape):
    columns, depth = shape
    x = RNG.standard_normal((70, depth))
    w = as_operand(RNG.standard_normal(shape), weight)
    found = 0
    for kernel in invariant("linear"):
        for batch in BATCHES:
            operands = [as_operand(x[batch], dtype), w, None, None]
            try:
                got = run("linear", kernel, operands, (len(batch), columns), dtype, {"alpha": 1.0}, threads=2)
            except engine.EngineError as error:
                assert "cannot run op" in error.message
                break
            alone = [run("linear", kernel, [as_operand(x[[i]], dtype), w, None, None], (1, columns), dtype, {"alpha": 1.0})[0]
                     for i in batch[:9]]
            assert all(np.array_equal(a, b) for a, b in zip(got, alone)), (kernel, len(batch))
            found += 1
    assert found >= len(BATCHES), "no kernel keeps the promise for these operands"


@pytest.mark.parametrize("window", [0, 37, 300])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_packed_attention_is_the_attention_of_a_cache(dtype, window):
    """Two documents packed, beside the same tokens in a cache of blocks: in one chunk, the last token decoded, and a run of
    tokens by itself, whose chunks of keys are shared out."""
    lengths, heads, kv_heads, dim, block = (620, 91), 6, 2, 32, 16
    tokens = sum(lengths)
    q, k, v = (RNG.standard_normal((tokens, n, dim)) for n in (heads, kv_heads, kv_heads))
    attrs = {"scale": dim**-0.5, "window": window, "softcap": 0.0}
    starts = np.array([0, lengths[0], tokens], np.int32)
    kernel = [name for name in invariant("attention") if name.startswith("paged")][-1]
    cached = invariant("paged_attention")[-1]
    # of the widest instruction set: those that a session takes
    kind = np.uint16 if dtype == "bf16" else np.float32
    packed, lse = np.zeros((tokens, heads, dim), kind), np.zeros((tokens, heads), np.float32)
    operands = [as_operand(x, dtype) for x in (q, k, v)]
    engine.run_op("attention", [*operands, starts], [(packed, dtype, packed.shape), lse],
                  {**attrs, "causal": 1, "max_length": 0}, "cpu", kernel)
    usual, usual_lse = np.zeros_like(packed), np.zeros_like(lse)
    engine.run_op("attention", [*operands, starts], [(usual, dtype, usual.shape), usual_lse],
                  {**attrs, "causal": 1, "max_length": 0}, "cpu")
    np.testing.assert_allclose(lse, usual_lse, rtol=0, atol=0.02 if dtype == "bf16" else 1e-5)

    blocks = [-(-n // block) for n in lengths]
    table = np.full((2, max(blocks)), -1, np.int32)
    order = RNG.permutation(sum(blocks)).astype(np.int32)
    table[0, :blocks[0]], table[1, :blocks[1]] = order[:blocks[0]], order[blocks[0]:]
    caches = [np.zeros((sum(blocks) * block, kv_heads, dim)) for _ in range(2)]
    sequences = np.repeat([0, 1], lengths).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    rows = table[sequences, positions // block] * block + positions % block
    for cache, values in zip(caches, (k, v)):
        cache[rows] = values
    for kept in (slice(None), slice(lengths[0] - 1, lengths[0]), slice(lengths[0] - 40, lengths[0]), slice(tokens - 40, tokens),
                 [tokens - 1, lengths[0] - 1, 3]):
        at = np.arange(tokens)[kept]
        got = run("paged_attention", cached,
                  [as_operand(q[at], dtype), *(as_operand(c, dtype) for c in caches), sequences[at], positions[at], table],
                  (len(at), heads, dim), dtype, {**attrs, "block_size": block}, threads=2)
        assert np.array_equal(got, packed[at])


def test_a_session_takes_no_other_kernel():
    from surogate_core.program.program import Entry, Instruction, Program, Storage, TensorEntry, dense_strides

    program = Program()
    for name, shape in (("x", (2, 64)), ("w", (32, 64)), ("y", (2, 32))):
        size = 4 * shape[0] * shape[1]
        program.storages.append(Storage(name, None, 0, size))
        program.tensors.append(TensorEntry(name, name, 0, "f32", shape, dense_strides(shape)))
    program.instructions.append(Instruction("linear", ("x", "w", None, None), ("y",), (("alpha", 1.0),)))
    program.entries.append(Entry("run", 0, 1))
    session = engine.Session(program.to_bytes(), "cpu", 1, batch_invariant=True)
    assert session.explain()[0]["kernel"] in invariant("linear")
    program.instructions[0] = Instruction("linear_weight_grad", ("y", "x"), ("w",), (("alpha", 1.0),))
    with pytest.raises(engine.EngineError, match="same bits in every batch"):
        engine.Session(program.to_bytes(), "cpu", 1, batch_invariant=True)


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_that_looks_ahead_depends_on_no_other_document(dtype, window):
    """A document by itself, and between others, on one worker and two."""
    heads, kv_heads, dim, before, length, after = 6, 2, 32, 91, 301, 60
    parts = [RNG.standard_normal((before + length + after, n, dim)) for n in (heads, kv_heads, kv_heads)]
    kernel = [name for name in invariant("attention") if name.startswith("whole")][-1]
    attrs = {"scale": dim**-0.5, "causal": 0, "window": window, "softcap": 0.0, "max_length": 0}

    def attend(rows: slice, starts: list[int], threads: int) -> np.ndarray:
        operands = [as_operand(x[rows], dtype) for x in parts]
        out = np.zeros(operands[0][2], np.uint16 if dtype == "bf16" else np.float32)
        results = [(out, dtype, out.shape), np.zeros(out.shape[:2], np.float32)]
        engine.run_op("attention", [*operands, np.array(starts, np.int32)], results, attrs, "cpu", kernel, threads)
        return out

    alone = attend(slice(before, before + length), [0, length], 1)
    ends = [0, before, before + length, before + length + after]
    assert np.array_equal(attend(slice(None), ends, 2)[before:before + length], alone)
