"""paged_attention on CUDA beyond the op's samples: long sequences, runs that cross windows of tokens, caches whose other
rows were never written, tables that point outside, and which tokens get the same bits in which calls."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.program.program import (
    FIXED, HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Program, Storage, TensorEntry, dense_strides,
)
from surogate_core.weights.formats import byte_count
from surogate_core.weights.quants import dequantize, quantize

pytestmark = pytest.mark.cuda

BACKEND, KERNEL = "cuda", "flash"
BLOCK = 16
TOLERANCE = 4e-3


class Cache:
    """Sequences of the given lengths in a cache of bf16, in blocks that lie anywhere; every other row is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, block: int = BLOCK) -> None:
        rng = np.random.default_rng(sum(lengths) + head_dim)
        self.block, self.kv_heads, self.head_dim = block, kv_heads, head_dim
        width = max(-(-length // block) for length in lengths) + 1
        blocks = rng.permutation(len(lengths) * width)
        self.tables = blocks.reshape(len(lengths), width).astype(np.int32)
        rows = blocks.size * block
        self.caches = [np.full((rows, kv_heads, head_dim), np.nan, np.float32) for _ in range(2)]
        for table, length in zip(self.tables, lengths, strict=True):
            at = np.arange(length)
            for cache in self.caches:
                cache[table[at // block] * block + at % block] = rng.standard_normal((length, kv_heads, head_dim))
        self.stored = [quantize(cache.reshape(rows, -1), "bf16") for cache in self.caches]
        self.values = [dequantize(s, "bf16").reshape(c.shape) for s, c in zip(self.stored, self.caches, strict=True)]


class Call:
    """Tokens ``runs`` of (sequence, first position, count); sequence -1 is padding. Queries depend on their place."""

    def __init__(self, cache: Cache, runs: list[tuple[int, int, int]], group: int, gap: int = 0, **attrs) -> None:
        self.cache, self.heads = cache, group * cache.kv_heads
        self.ids = np.array([s for s, _, count in runs for _ in range(count)], np.int32)
        self.positions = np.array([first + i for _, first, count in runs for i in range(count)], np.int32)
        tokens, width = len(self.ids), self.heads * cache.head_dim
        q = np.zeros((tokens, width + gap), np.float32)
        for token, (sequence, position) in enumerate(zip(self.ids, self.positions, strict=True)):
            q[token] = np.random.default_rng([int(sequence) + 1, int(position) + 1]).standard_normal(width + gap)
        self.q = quantize(q, "bf16")
        self.gap = gap
        self.attrs = {"scale": cache.head_dim**-0.5, "window": 0, "softcap": 0.0, "block_size": cache.block, **attrs}

    def run(self, kernel: str | None = None) -> np.ndarray:
        cache, tokens = self.cache, len(self.ids)
        shape = (tokens, self.heads, cache.head_dim)
        width = self.heads * cache.head_dim
        memory = quantize(np.full((tokens, width + self.gap), np.nan, np.float32), "bf16")
        inputs = [(self._heads(self.q), "bf16", shape)]
        inputs += [(s.reshape(v.shape), "bf16", v.shape) for s, v in zip(cache.stored, cache.values, strict=True)]
        inputs += [(a, "i32", a.shape) for a in (self.ids, self.positions, cache.tables)]
        engine.run_op("paged_attention", inputs, [(self._heads(memory), "bf16", shape)], self.attrs, backend=BACKEND,
                      kernel=kernel or KERNEL)
        assert np.isnan(dequantize(np.ascontiguousarray(memory[:, width:]), "bf16")).all()
        return dequantize(np.ascontiguousarray(memory[:, :width]), "bf16").reshape(shape)

    def _heads(self, memory: np.ndarray) -> np.ndarray:
        width = self.heads * self.cache.head_dim
        return np.lib.stride_tricks.as_strided(
            memory, (len(memory), self.heads, self.cache.head_dim),
            (memory.strides[0], self.cache.head_dim * memory.itemsize, memory.itemsize),
        )

    def expected(self) -> np.ndarray:
        shape = (len(self.ids), self.heads, self.cache.head_dim)
        q = dequantize(self.q, "bf16")[:, : self.heads * self.cache.head_dim].reshape(shape).astype(np.float64)
        inputs = {
            "q": q, "key_cache": self.cache.values[0].astype(np.float64),
            "value_cache": self.cache.values[1].astype(np.float64), "sequence_ids": self.ids,
            "positions": self.positions, "block_tables": self.cache.tables,
        }
        return ops.get("paged_attention").reference(inputs, self.attrs, {})[0]

    def check(self) -> np.ndarray:
        found, expected = self.run(), self.expected()
        assert not np.isnan(found).any()
        for token in range(len(found)):
            error = np.linalg.norm(found[token] - expected[token]) / max(np.linalg.norm(expected[token]), 1e-30)
            assert error <= 2 * TOLERANCE, f"token {token} is off by {error:.3g}"
        assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
        assert found.tobytes() == self.run().tobytes()
        return found


SHAPES = (
    (2, 4, 64), (1, 4, 128), (3, 1, 64), (1, 8, 128), (1, 12, 128), (2, 16, 64), (1, 4, 256), (2, 2, 256), (1, 8, 256),
    (1, 16, 256), (2, 1, 96), (1, 10, 96), (3, 3, 80),
)
"""Key-value heads, query heads of each, elements of a head."""


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), SHAPES)
@pytest.mark.parametrize("attrs", ({}, {"window": 100}, {"softcap": 2.0}))
def test_lone_tokens(kv_heads, group, head_dim, attrs):
    positions = [0, 15, 16, 31, 32, 100, 511, 640, 1023, 1500]
    cache = Cache([p + 1 for p in positions], kv_heads, head_dim)
    Call(cache, [(s, p, 1) for s, p in enumerate(positions)] + [(-1, 0, 3)], group, **attrs).check()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), SHAPES)
@pytest.mark.parametrize("attrs", ({}, {"window": 100}, {"softcap": 2.0}))
def test_runs_and_lone_tokens(kv_heads, group, head_dim, attrs):
    cache = Cache([200, 90, 641, 40, 300, 2], kv_heads, head_dim)
    runs = [(0, 199, 1), (1, 89, 1), (2, 341, 150), (3, 0, 40), (-1, 0, 2), (4, 299, 1), (5, 0, 2), (-1, 7, 5)]
    Call(cache, runs, group, gap=8, **attrs).check()


def test_many_sequences():
    lengths = [1 + 37 * i % 400 for i in range(128)]
    cache = Cache(lengths, 4, 64)
    Call(cache, [(s, length - 1, 1) for s, length in enumerate(lengths)], 4).check()


def test_more_lone_tokens_than_blocks_for_them():
    lengths = [1 + 7 * i % 50 for i in range(300)]
    cache = Cache(lengths, 4, 64)
    Call(cache, [(s, length - 1, 1) for s, length in enumerate(lengths)] + [(-1, 0, 20)], 2).check()


def test_a_position_far_into_a_sequence():
    cache = Cache([20000, 1], 1, 64)
    Call(cache, [(0, 19999, 1)], 4).check()
    Call(cache, [(0, 19900, 100), (1, 0, 1)], 4, window=3000).check()


def test_blocks_of_more_than_a_tile():
    cache = Cache([333, 70], 2, 64, block=64)
    Call(cache, [(0, 332, 1), (1, 69, 1)], 2).check()
    Call(cache, [(0, 200, 133), (1, 69, 1)], 2).check()


def test_what_lies_outside_becomes_nan_and_nothing_else():
    cache = Cache([600, 50, 300, 40], 2, 64)
    cache.tables[0, 10] = 1 << 20
    cache.tables[2, 2] = -1
    few = [(0, 150, 1), (0, 170, 1), (1, 49, 1), (9, 0, 1), (1, 100000, 1), (1, -1, 1)]
    found = Call(cache, few, 4).run()
    assert [bool(np.isnan(found[i]).all()) for i in range(6)] == [False, True, False, True, True, True]
    mixed = [(0, 100, 100), (3, 0, 40), (2, 299, 1), (9, 5, 2), (1, 49, 1)]
    found = Call(cache, mixed, 4).run()
    assert not np.isnan(found[:60]).any() and np.isnan(found[60:100]).all()
    assert not np.isnan(found[100:140]).any() and np.isnan(found[140:143]).all() and not np.isnan(found[143]).any()
    windowed = Call(cache, [(0, 590, 1), (2, 200, 40)], 4, window=64).run()
    assert not np.isnan(windowed).any()


def test_bits_of_a_lone_token_do_not_depend_on_the_call():
    lengths = [5, 640, 1500, 33] + [20 + i for i in range(140)]
    for kv_heads, head_dim in ((2, 64), (8, 128), (4, 256), (1, 256)):
        cache = Cache(lengths, kv_heads, head_dim)
        alone = [(s, lengths[s] - 1, 1) for s in range(4)]
        few = Call(cache, alone, 4).run()
        others = [(s, lengths[s] - 1, 1) for s in range(4, len(lengths))]
        for count in (60, 140):
            many = Call(cache, others[: count - 50] + [(0, 0, 3)] + alone + others[count - 50 : count], 4).run()
            at = count - 50 + 3
            assert many[at : at + 4].tobytes() == few.tobytes()


@pytest.mark.parametrize("head_dim", (64, 256))
def test_bits_of_a_run_do_not_depend_on_its_place(head_dim):
    cache = Cache([700, 30, 31], 2, head_dim)
    first = Call(cache, [(0, 600, 100)], 4).run()
    second = Call(cache, [(1, 29, 1), (2, 30, 1), (0, 600, 100)], 4).run()
    assert first.tobytes() == second[2:].tobytes()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), SHAPES)
def test_bits_of_tokens_by_batches_are_those_of_whole_tokens(kv_heads, group, head_dim):
    """Every number of batches, beside padding and unknown tokens; calls of more than 128 tokens have one block for each."""
    lengths = [1, 17, *range(40, 1100, 63), 2300]
    cache = Cache(lengths, kv_heads, head_dim)
    tokens = [(s, length - 1, 1) for s, length in enumerate(lengths)]
    whole = Call(cache, [*tokens, (-1, 0, 128)], group, lone=1).run()
    for some in (tokens[:3], tokens[-2:], [(-1, 0, 1), *tokens[:12]], tokens):
        found = Call(cache, some, group, lone=1).run()
        at = [s for s, _, _ in some]
        assert found[[s >= 0 for s in at]].tobytes() == whole[[s for s in at if s >= 0]].tobytes()
        assert not found[[s < 0 for s in at]].any()
    windowed = [Call(cache, [*tokens, (-1, 0, count)], group, lone=1, window=300).run()[: len(tokens)] for count in (1, 128)]
    assert windowed[0].tobytes() == windowed[1].tobytes()


def test_prompts_of_several_sequences():
    """Windows that see little and much, with lone tokens between them, and more keys than are looked up at a time."""
    lengths = [300, 130, 700, 20, 450]
    cache = Cache(lengths, 1, 64)
    runs = [(0, 170, 130), (1, 0, 130), (3, 19, 1), (2, 500, 200), (-1, 0, 60), (4, 200, 250)]
    Call(cache, runs, 2).check()
    Call(cache, runs, 2, window=50).check()


def test_more_windows_than_are_put_in_order():
    count = 126
    cache = Cache([132] * count, 1, 64)
    found = Call(cache, [(s, 0, 132) for s in range(count)], 1).run()
    for sequence in (0, 31, 64, count - 1):
        alone = Call(cache, [(sequence, 0, 132)], 1).run()
        assert found[132 * sequence : 132 * (sequence + 1)].tobytes() == alone.tobytes()


@pytest.mark.parametrize(("kv_heads", "group", "head_dim"), ((8, 2, 128), (2, 4, 64), (1, 4, 256)))
@pytest.mark.parametrize("tokens", (1, 3, 20, 40, 130))
def test_rows_of_earlier_steps_are_read_before_the_kernels_ahead_have_ended(kv_heads, group, head_dim, tokens):
    """Four layers on one cache, so that each token's own row is written anew between them: with tables that nothing writes the
    bits are those of kernels that wait for everything."""
    lengths = [1 + (37 * i + 600) % 900 for i in range(tokens)]
    cache = Cache(lengths, kv_heads, head_dim)
    early, late = (_layers(cache, lengths, group, flags) for flags in (FIXED, 0))
    assert [a.tobytes() for a in early] == [a.tobytes() for a in late]
    assert len({a.tobytes() for a in early}) == len(early) and not np.isnan(early).any()


def _layers(cache: Cache, lengths: list[int], group: int, flags: int, layers: int = 4) -> list[np.ndarray]:
    tokens, heads, dim = len(lengths), cache.kv_heads, cache.head_dim
    rng = np.random.default_rng(7)
    at = np.array(lengths, np.int32) - 1
    ids = np.arange(tokens, dtype=np.int32)
    arrays = {
        "sequence_ids": ids, "positions": at, "block_tables": cache.tables,
        "slots": cache.tables[ids, at // cache.block] * cache.block + at % cache.block,
        "angles": rng.standard_normal((1024, dim // 2, 2)).astype(np.float32),
    }
    indices = set(arrays)
    kinds = {name: ("f32" if a.dtype == np.float32 else "i32", a.shape) for name, a in arrays.items()}
    for name, stored, values in zip(("keys", "values"), cache.stored, cache.values, strict=True):
        arrays[name], kinds[name] = stored, ("bf16", values.shape)
    program = Program()
    for layer in range(layers):
        for name, count in (("q", group * heads), ("k", heads), ("v", heads)):
            arrays[f"{name}{layer}"] = quantize(rng.standard_normal((tokens, count * dim)).astype(np.float32), "bf16")
            kinds[f"{name}{layer}"] = ("bf16", (tokens, count, dim))
        for name in ("rotated", "o"):
            kinds[f"{name}{layer}"] = ("bf16", (tokens, group * heads, dim))
        program.instructions.append(Instruction(
            "rope_kv_write", (f"q{layer}", f"k{layer}", f"v{layer}", "positions", "angles", "slots", None, None),
            (f"rotated{layer}", "keys", "values"), (("eps", 1e-6), ("interleaved", 0)),
        ))
        program.instructions.append(Instruction(
            "paged_attention", (f"rotated{layer}", "keys", "values", "sequence_ids", "positions", "block_tables"), (f"o{layer}",),
            (("block_size", cache.block), ("lone", 1), ("scale", dim**-0.5), ("softcap", 0.0), ("window", 0)), kernel=KERNEL,
        ))
    size = 0
    for name, (dtype, shape) in kinds.items():
        nbytes = byte_count(dtype, shape)
        program.storages.append(Storage(name, "all", size, nbytes, PERSISTENT | HOST_WRITTEN | (flags if name in indices else 0)))
        program.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
        size += -(-nbytes // 256) * 256
    program.arenas.append(Arena("all", size))
    program.entries.append(Entry("run", 0, len(program.instructions)))
    session = engine.Session(program.to_bytes(), BACKEND)
    for name, array in arrays.items():
        session.write(name, np.ascontiguousarray(array))
    session.run("run")
    found = [session.read(f"o{layer}") for layer in range(layers)]
    return [dequantize(a.reshape(tokens, -1), "bf16") for a in found]
