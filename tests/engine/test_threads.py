from __future__ import annotations

import threading

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 64])
def test_every_task_runs_once(fake, threads, tasks):
    counts = np.zeros(tasks, np.int32)
    engine.run_op("fake_tasks", [], [counts], {"repeat": 2000, "work": 0}, threads=threads)
    np.testing.assert_array_equal(counts, 2000)


def test_uneven_work_and_sleeping_workers(fake):
    counts = np.zeros(5, np.int32)
    for repeat in range(20):
        engine.run_op("fake_tasks", [], [counts], {"repeat": 5, "work": 3000 * repeat}, threads=3)
    np.testing.assert_array_equal(counts, 100)


def test_callers_from_several_threads(fake):
    results = [np.zeros(16, np.int32) for _ in range(4)]

    def call(counts: np.ndarray) -> None:
        for _ in range(50):
            engine.run_op("fake_tasks", [], [counts], {"repeat": 10, "work": 10}, threads=2)

    callers = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for counts in results:
        np.testing.assert_array_equal(counts, 500)


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_absurd_number_of_threads(fake, threads):
    with pytest.raises(EngineError, match="threads must be between"):
        engine.run_op("fake_tasks", [], [np.zeros(1, np.int32)], {"repeat": 1}, threads=threads)
