"""Sessions that share a queue: one after another, on the same streams, in the same memory where nothing is kept."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from surogate_core.engine import Memory, Queue, Session

from .programs import INPUT, PERSISTENT, Draft
from .test_device import after, forked


def chain(n: int) -> bytes:
    """y = (x + state) + x, where the sum lies in an arena of its own in which nothing is kept."""
    draft = Draft()
    kept, passing = draft.arena("kept", 12 * n, 256), draft.arena("activations", 4 * n, 256)
    x = draft.tensor("x", draft.storage("x", kept, 0, 4 * n, INPUT), [n])
    y = draft.tensor("y", draft.storage("y", kept, 4 * n, 4 * n, PERSISTENT), [n])
    state = draft.tensor("state", draft.storage("state", -1, 0, 4 * n), [n])
    total = draft.tensor("total", draft.storage("total", passing, 0, 4 * n), [n])
    draft.instruction("fake_add", [x, state], [total])
    draft.instruction("fake_add", [total, x], [y])
    draft.entry("step")
    return draft.to_bytes()


@pytest.mark.parametrize("backend", ["cpu", "fake"])
def test_scratch_memory_is_shared(fake, device, backend):
    queue = Queue(backend, threads=2)
    state = Memory(backend, 64 * 4)
    sessions = [Session(chain(64), queue=queue) for _ in range(3)]
    for i, session in enumerate(sessions):
        session.bind("state", state)
        session.write("x", np.full(64, i, np.float32))
    state.write(np.full(64, 5, np.float32))
    for session in sessions:
        session.run("step")
    assert [float(session.read("y")[0]) for session in sessions] == [5, 7, 9]  # inputs and results are each one's own
    if backend == "cpu":
        places = {session.tensor("total").ctypes.data for session in sessions}
        assert len(places) == 1 and len({session.tensor("y").ctypes.data for session in sessions}) == 3


def test_a_larger_one_takes_the_name(fake):
    queue = Queue(threads=1)
    small, large, middle = (Session(chain(n), queue=queue) for n in (8, 64, 32))
    for session in (small, large, middle):
        session.bind("state", np.ones(session.shape("x"), np.float32))
        session.write("x", np.ones(session.shape("x"), np.float32))
        session.run("step")
    assert (small.read("y") == 3).all() and (large.read("y") == 3).all() and (middle.read("y") == 3).all()
    assert middle.tensor("total").ctypes.data == large.tensor("total").ctypes.data
    assert queue.threads == small.threads == 1


def test_runs_of_many_threads_take_turns(fake):
    queue = Queue(threads=2)
    sessions = [Session(chain(4096), queue=queue) for _ in range(4)]
    wrong = []

    def work(i: int, session: Session) -> None:
        session.bind("state", np.full(4096, i, np.float32))
        session.write("x", np.full(4096, 10 * i, np.float32))
        for _ in range(200):
            session.run("step")
            if not (session.read("y") == 21 * i).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("graphs", [False, True])
def test_streams_are_shared(device, graphs):
    queue = Queue("fake", 1)
    sessions = [Session(forked(), queue=queue, graphs=graphs) for _ in range(2)]
    for session in sessions:
        session.write("x", np.full(4, 2, np.float32))
        session.write("a", np.full(4, 3, np.float32))
    for _ in range(3):
        for session in sessions:
            session.run("step")
    y, a = after(3, 2, 3)
    for session in sessions:
        assert (session.read("y") == y).all() and (session.read("a") == a).all()
    queue.synchronize()
    assert (queue.backend, queue.device) == ("fake", 1)
