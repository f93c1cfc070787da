"""Streams written into sockets by a thread: every byte once and in order, whoever reads late, leaves, or is closed."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from surogate_core.engine import EngineError
from surogate_core.engine.chunks import ChunkStream, chunk_writer

FEW, MANY = 1, 24
"""Streams that are open: of so many, whoever puts sends, or the thread does."""


def coded(parts: list[bytes]) -> bytes:
    body = b"".join(parts)
    return b"%x\r\n%b\r\n" % (len(body), body)


class Pair:
    """A stream, and the other end of its socket."""

    def __init__(self, stream: ChunkStream, near: socket.socket, far: socket.socket) -> None:
        self.stream, self.near, self.far = stream, near, far
        far.settimeout(10)

    def received(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self.far.recv(size - len(data))
        return data

    def nothing_more(self) -> bool:
        self.far.setblocking(False)
        try:
            return not self.far.recv(1)
        except BlockingIOError:
            return True


@pytest.fixture(params=[FEW, MANY])
def pairs(request: pytest.FixtureRequest) -> Iterator[list[Pair]]:
    writer = chunk_writer()
    ends = [socket.socketpair() for _ in range(request.param)]
    pairs = [Pair(writer.open(near.fileno()), near, far) for near, far in ends]
    yield pairs
    for pair in pairs:
        pair.stream.close()
        pair.near.close()
        pair.far.close()


def fill(pair: Pair) -> list[bytes]:
    """Puts until no more is taken, also once the thread has tried again; the parts that were."""
    taken, refused = [], 0
    while refused < 2 and len(taken) < 10000:
        part = b"%d " % len(taken) + b"x" * 3000
        if pair.stream.put([part]):
            taken.append(part)
            refused = 0
        else:
            refused += 1
            time.sleep(0.05)
    return taken


def test_chunks_arrive_in_order(pairs):
    draw, sent = random.Random(3), [b""] * len(pairs)
    for step in range(200):
        for place, pair in enumerate(pairs):
            parts = [b"%d:%d " % (step, place)] + [draw.randbytes(draw.randrange(40)) for _ in range(draw.randrange(3))]
            assert pair.stream.put(parts) and pair.stream.put([]) and pair.stream.put([b""])  # which would be the end
            sent[place] += coded(parts)
    for place, pair in enumerate(pairs):
        assert pair.received(len(sent[place])) == sent[place]
        assert pair.stream.close() == b"" and pair.nothing_more()


def test_a_reader_that_reads_nothing(pairs):
    """No more is taken while 64 KiB wait; what was not sent is given back, and is the rest."""
    pair = pairs[0]
    whole = b"".join(coded([part]) for part in fill(pair))
    assert not pair.stream.put([b"more"])
    left = pair.stream.close()
    assert 64 << 10 < len(left) < (64 << 10) + 4096
    assert pair.received(len(whole) - len(left)) + left == whole
    assert pair.nothing_more() and not pair.stream.put([b"more"])
    for other in pairs[1:]:
        assert other.stream.put([b"others go on"])
        assert other.received(len(coded([b"others go on"]))) == coded([b"others go on"])


def test_what_waits_is_sent_once_it_is_read(pairs):
    """Without another put, and while other streams have bytes all the time."""
    pair, ended = pairs[0], threading.Event()

    def keep_busy() -> None:
        while not ended.is_set():
            for other in pairs[1:]:
                other.stream.put([b"x"])
                other.far.recv(100)
            time.sleep(1e-3)

    whole = b"".join(coded([part]) for part in fill(pair))
    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        assert pair.received(len(whole)) == whole
    finally:
        ended.set()
        busy.join()
    assert pair.stream.put([b"on"]) and pair.received(7) == coded([b"on"])


def test_the_number_of_a_closed_socket_is_anothers(pairs):
    """A stream never writes into a connection that has got the number of its own."""
    pair = pairs[0]
    near, far = socket.socketpair()
    os.dup2(near.fileno(), pair.near.fileno())
    other = Pair(pair.stream, near, far)
    assert pair.stream.put([b"mine"]) and pair.received(9) == coded([b"mine"])
    pair.stream.close()
    near.send(b"y")
    assert other.received(1) == b"y" and other.nothing_more()
    assert pair.far.recv(1) == b""  # the stream had the last descriptor
    near.close()
    far.close()


def test_a_reader_that_left(pairs):
    pair = pairs[0]
    pair.far.close()
    until = time.monotonic() + 10
    while pair.stream.put([b"x"]):
        assert time.monotonic() < until, "nobody is told"
        time.sleep(1e-3)
    assert pair.stream.close() == b""


def test_threads_with_streams_of_their_own(pairs):
    """Each puts what its reader must get, and closes and opens again in between."""
    writer, failures = chunk_writer(), []

    def use(pair: Pair, seed: int) -> None:
        draw, stream = random.Random(seed), writer.open(pair.near.fileno())
        for _ in range(300):
            parts = [draw.randbytes(draw.randrange(1, 2000))]
            if draw.random() < 0.1:
                rest = stream.close()
                pair.near.sendall(rest)
                stream = writer.open(pair.near.fileno())
            while not stream.put(parts):
                time.sleep(1e-3)
        pair.near.sendall(stream.close())

    def read(pair: Pair, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            expected = coded([draw.randbytes(draw.randrange(1, 2000))])
            draw.random()
            if pair.received(len(expected)) != expected:
                failures.append(seed)
                pair.far.close()  # or the other side would wait for ever
                return

    threads = [threading.Thread(target=each, args=(pair, seed)) for seed, pair in enumerate(pairs) for each in (use, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_what_cannot_be_opened_or_put():
    writer = chunk_writer()
    with pytest.raises(EngineError, match="descriptor"):
        writer.open(-1)
    near, far = socket.socketpair()
    stream = writer.open(near.fileno())
    with pytest.raises(TypeError):
        stream.put(["text"])  # type: ignore[list-item]
    assert stream.close() == stream.close() == b""
    near.close()
    far.close()
