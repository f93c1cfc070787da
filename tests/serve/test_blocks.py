"""Cache blocks: names, who holds what, and what goes first; the pool beside a slow one in Python."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surogate_core.engine import EngineError
from surogate_core.engine.library import native

KEY = bytes(range(16))
SIZE = 4
Kind = native().ExtraKind


def pool(num_blocks: int = 8, key: bytes = KEY) -> Any:
    return native().BlockPool(num_blocks, SIZE, key)


def chain_of(blocks: Any, tokens: list[int], extras: tuple[tuple[Any, bytes], ...] = ()) -> list[bytes]:
    return blocks.extend(blocks.root(extras), tokens)


def computed(blocks: Any, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """Blocks of a sequence that was not looked up: allocated, computed, published."""
    chain = chain_of(blocks, tokens)
    held = blocks.allocate(len(chain))
    for block, name in zip(held, chain, strict=True):
        blocks.publish(block, name)
    return held, chain


def counts(blocks: Any) -> tuple[int, int, int]:
    stats = blocks.stats()
    return stats["free"], stats["cached"], stats["used"]


# -- the hash ----------------------------------------------------------------------------------------------------------


def siphash(key: bytes, data: bytes) -> bytes:
    """SipHash-2-4 with 128 bits of output, word by word."""
    low, high = struct.unpack("<QQ", key)
    v = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]
    v[1] ^= 0xEE

    def rotated(word: int, by: int) -> int:
        return (word << by | word >> 64 - by) & (1 << 64) - 1

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, by, swap in ((0, 1, 13, True), (2, 3, 16, False), (0, 3, 21, False), (2, 1, 17, True)):
                v[a] = v[a] + v[b] & (1 << 64) - 1
                v[b] = rotated(v[b], by) ^ v[a]
                v[a] = rotated(v[a], 32) if swap else v[a]

    for (word,) in struct.iter_unpack("<Q", data + bytes(7 - len(data) % 8) + bytes([len(data) & 255])):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<QQ", first, v[0] ^ v[1] ^ v[2] ^ v[3])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (7, "a1f1ebbed8dbc153c0b84aa61ff08239"),
        (8, "3b62a9ba6258f5610f83e264f31497b4"),
        (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
        (63, "5150d1772f50834a503e069a973fbd7c"),
    ],
)
def test_the_hash_has_its_published_vectors(size: int, expected: str) -> None:
    """Key 00 01 .. 0f, message 00 01 ..: from the table of the reference implementation."""
    assert native().siphash(KEY, bytes(range(size))).hex() == expected


def test_the_hash_of_every_length() -> None:
    key = b"0123456789abcdef"
    for size in range(300):
        data = bytes(i * 7 & 255 for i in range(size))
        assert native().siphash(key, data) == siphash(key, data), size


def test_a_block_is_named_by_its_parent_and_its_tokens() -> None:
    blocks = pool()
    root = blocks.root([])
    assert root == siphash(KEY, struct.pack("<Q", 1))
    contents = struct.pack("<Q", 2) + root + struct.pack("<4i", 1, 2, 3, -4)
    assert blocks.next(root, [1, 2, 3, -4]) == siphash(KEY, contents)


def test_names_differ_by_all_that_decides_the_contents() -> None:
    tokens = list(range(8))
    names = [
        chain_of(pool(), tokens, extras)[1]
        for extras in (
            (),
            ((Kind.SALT, b""),),
            ((Kind.SALT, b"a"),),
            ((Kind.ADAPTER, b"a"),),  # a salt that is an adapter's name is another thing
            ((Kind.ADAPTER, b"a"), (Kind.SALT, b"bc")),
            ((Kind.ADAPTER, b"ab"), (Kind.SALT, b"c")),
            ((Kind.ADAPTER, b"a" + struct.pack("<Q", 3) + b"bc"),),  # one value that looks like two
            ((Kind.MODEL_GENERATION, b"a"),),
            ((Kind.IMAGE, b"a"),),
            ((Kind.IMAGE, b"a\0"),),
        )
    ]
    names += [
        chain_of(pool(), [9, *tokens[1:]])[1],  # another beginning, the same second block
        chain_of(pool(), [*tokens[:-1], 9])[1],
        chain_of(pool(key=bytes(16)), tokens)[1],
    ]
    assert len(set(names)) == len(names)


def test_a_chain_grows_by_whole_blocks() -> None:
    blocks = pool()
    root = blocks.root([])
    tokens = list(range(11))
    whole = blocks.extend(root, tokens)
    assert len(whole) == 2
    assert blocks.extend(root, tokens[:3]) == []
    assert blocks.extend(root, tokens, whole[:1]) == whole
    assert blocks.extend(root, [*tokens, 11], whole)[:2] == whole


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_a_prefix_is_found_and_shared() -> None:
    blocks = pool()
    first, chain = computed(blocks, list(range(12)))
    other = chain_of(blocks, [*range(8), 99, 99, 99, 99])
    assert blocks.find(other) == 2
    assert blocks.match(other) == first[:2]
    assert [blocks.holders(block) for block in first] == [2, 2, 1]
    blocks.release(first)
    assert counts(blocks) == (5, 1, 2)
    blocks.release(first[:2])
    assert counts(blocks) == (5, 3, 0)
    assert blocks.match(chain) == first
    stats = blocks.stats()
    assert (stats["queries"], stats["hits"], stats["evictions"]) == (24, 20, 0)


def test_what_is_not_published_is_free_again() -> None:
    """Blocks of a step that failed, or of a request that was cancelled before its step was read back."""
    blocks = pool()
    chain = chain_of(blocks, list(range(8)))
    held = blocks.allocate(2)
    blocks.publish(held[0], chain[0])
    blocks.release(held)
    assert counts(blocks) == (7, 1, 0)
    assert blocks.find(chain) == 1  # what was computed before stays


def test_all_or_nothing() -> None:
    blocks = pool(4)
    held, _ = computed(blocks, list(range(12)))
    assert blocks.allocate(2) is None
    assert counts(blocks) == (1, 0, 3)
    assert blocks.allocate(10**12) is None
    assert blocks.allocate(0) == []
    blocks.release(held)
    assert len(blocks.allocate(4)) == 4
    assert blocks.stats()["evictions"] == 3


def test_the_least_recently_used_goes_first_and_a_chain_from_its_end() -> None:
    blocks = pool(6)
    first, first_chain = computed(blocks, list(range(12)))
    second, second_chain = computed(blocks, list(range(100, 112)))
    blocks.release(first)
    blocks.release(second)
    blocks.release(blocks.match(first_chain))  # used again: now the newer one
    assert blocks.allocate(2) == [second[2], second[1]]
    assert (blocks.find(first_chain), blocks.find(second_chain)) == (3, 1)
    assert blocks.allocate(2) == [second[0], first[2]]
    assert (blocks.find(first_chain), blocks.find(second_chain)) == (2, 0)


def test_a_block_computed_twice_is_kept_once() -> None:
    blocks = pool()
    first, chain = computed(blocks, list(range(8)))
    second, _ = computed(blocks, list(range(8)))
    assert [blocks.is_published(block) for block in first + second] == [True, True, False, False]
    blocks.release(second)
    assert counts(blocks) == (6, 0, 2)
    blocks.release(first)
    assert counts(blocks) == (6, 2, 0)
    third, _ = computed(blocks, list(range(8)))  # nobody holds the first ones: those in use take their place
    assert blocks.match(chain) == third
    assert counts(blocks) == (6, 0, 2)


def test_forgetting_frees_what_nobody_holds_and_names_nothing() -> None:
    blocks = pool()
    kept, kept_chain = computed(blocks, list(range(8)))
    gone, gone_chain = computed(blocks, list(range(50, 58)))
    blocks.release(gone)
    blocks.forget()
    assert counts(blocks) == (6, 0, 2)
    assert blocks.find(kept_chain) == blocks.find(gone_chain) == 0
    blocks.release(kept)
    assert counts(blocks) == (8, 0, 0)


def test_misuse_is_told() -> None:
    blocks = pool()
    held, chain = computed(blocks, list(range(4)))
    with pytest.raises(EngineError, match="published under another name"):
        blocks.publish(held[0], bytes(16))
    blocks.publish(held[0], chain[0])  # the same once more is nothing
    blocks.release(held)
    for call in (blocks.release, blocks.hold, lambda one: blocks.publish(one[0], chain[0])):
        with pytest.raises(EngineError, match="cache block 0: nobody holds it"):
            call([0])
    for block in (-1, 8):
        with pytest.raises(EngineError, match="the pool has 8"):
            blocks.release([block])
    with pytest.raises(EngineError, match="of 4 tokens was to be named by 3"):
        blocks.next(bytes(16), [1, 2, 3])
    with pytest.raises(EngineError, match="both must be at least 1"):
        pool(0)
    with pytest.raises(EngineError, match="15 bytes, not 16"):
        pool(8, bytes(15))


# -- beside a slow pool ------------------------------------------------------------------------------------------------


class SlowPool:
    """The same rules with lists and dicts. names: block -> name; cached: oldest first; free: a stack."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(reversed(range(num_blocks)))
        self.cached: list[int] = []
        self.holders: dict[int, int] = {}
        self.names: dict[int, bytes] = {}

    def find(self, name: bytes) -> int | None:
        return next((block for block, other in self.names.items() if other == name), None)

    def match(self, chain: list[bytes]) -> list[int]:
        found = []
        for name in chain:
            block = self.find(name)
            if block is None:
                break
            if block in self.cached:
                self.cached.remove(block)
            self.holders[block] = self.holders.get(block, 0) + 1
            found.append(block)
        return found

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free) + len(self.cached):
            return None
        result = []
        for _ in range(count):
            block = self.free.pop() if self.free else self.cached.pop(0)
            self.names.pop(block, None)
            self.holders[block] = 1
            result.append(block)
        return result

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                del self.holders[block]
                (self.cached if block in self.names else self.free).append(block)

    def publish(self, block: int, name: bytes) -> None:
        other = self.find(name)
        if other == block or (other is not None and other in self.holders):
            return
        if other is not None:
            del self.names[other]
            self.cached.remove(other)
            self.free.append(other)
        self.names[block] = name

    def forget(self) -> None:
        self.free += self.cached
        self.cached = []
        self.names = {}


def crowded(chain: list[bytes]) -> list[bytes]:
    """The names with few different first words, so that they crowd a few places of the table."""
    return [struct.pack("<Q", name[0] % 4 * 7) + name[8:] for name in chain]


class Traffic(RuleBasedStateMachine):
    """Sequences over few different tokens come, grow, share, and go; some leave before their blocks are published."""

    @initialize(num_blocks=st.integers(1, 24))
    def begin(self, num_blocks: int) -> None:
        self.pool = pool(num_blocks)
        self.slow = SlowPool(num_blocks)
        self.root = self.pool.root([])
        self.sequences: list[tuple[list[int], list[bytes], int]] = []  # blocks, chain, how many are published

    @rule(head=st.lists(st.integers(0, 1), max_size=7), cached=st.booleans())
    def come(self, head: list[int], cached: bool) -> None:
        chain = crowded(self.pool.extend(self.root, [token for token in head for _ in range(SIZE)]))
        unknown = [i for i, name in enumerate(chain) if self.slow.find(name) is None]
        assert self.pool.find(chain) == min(unknown, default=len(chain))
        blocks = self.pool.match(chain) if cached else []
        assert blocks == (self.slow.match(chain) if cached else [])
        fresh = self.pool.allocate(len(chain) - len(blocks))
        assert fresh == self.slow.allocate(len(chain) - len(blocks))
        if fresh is None:
            self.pool.release(blocks)
            self.slow.release(blocks)
        elif chain:
            self.sequences.append((blocks + fresh, chain, len(blocks)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        blocks, chain, published = self.sequences[index]
        end = data.draw(st.integers(published, len(blocks)))
        for i in range(published, end):
            self.pool.publish(blocks[i], chain[i])
            self.slow.publish(blocks[i], chain[i])
        self.sequences[index] = (blocks, chain, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks, chain, published = self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]
        self.pool.hold(blocks)
        for block in blocks:
            self.slow.holders[block] += 1
        self.sequences.append((blocks, chain, published))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        blocks, _, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(blocks)
        self.slow.release(blocks)

    @precondition(lambda self: not self.sequences)
    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.slow.forget()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert counts(self.pool) == (len(self.slow.free), len(self.slow.cached), len(self.slow.holders))
        for block in range(self.pool.stats()["total"]):
            assert self.pool.holders(block) == self.slow.holders.get(block, 0)
            assert self.pool.is_published(block) == (block in self.slow.names)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
