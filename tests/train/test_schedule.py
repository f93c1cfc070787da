"""Learning rates in closed form."""

from __future__ import annotations

import math

import pytest

from surogate_core.train.schedule import Schedule

KINDS = ("constant", "linear", "cosine", "wsd")


def rates(kind: str, total: int = 20, **settings) -> list[float]:
    schedule = Schedule(kind, 2e-3, total, **settings)
    return [schedule.rate(step) for step in range(total)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 5, 20])
@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_every_step_trains_and_the_course_has_its_shape(kind, warmup, floor):
    found = rates(kind, warmup=warmup, floor=floor)
    assert all(0 < rate <= 2e-3 * (1 + 1e-12) for rate in found)
    assert found[:warmup] == [pytest.approx(2e-3 * (i + 1) / warmup) for i in range(warmup)]
    after = found[warmup:]
    assert all(a >= b for a, b in zip(after, after[1:]))
    assert not after or after[-1] >= floor * 2e-3
    if warmup < 20:
        assert max(found) == pytest.approx(2e-3)


def test_closed_forms():
    assert rates("constant") == [2e-3] * 20
    assert rates("linear", warmup=4) == pytest.approx(
        [2e-3 * (i + 1) / 4 for i in range(4)] + [2e-3 * (1 - i / 16) for i in range(16)])
    assert rates("cosine", floor=0.1) == pytest.approx(
        [2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 20))) for i in range(20)])
    assert rates("wsd", decay_ratio=0.2, warmup=2) == pytest.approx(
        [1e-3, 2e-3] + [2e-3] * 14 + [2e-3 * (1 - i / 5) for i in (1, 2, 3, 4)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_step_trains(kind):
    assert rates(kind, total=1)[0] > 0
