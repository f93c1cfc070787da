from __future__ import annotations

import numpy as np
import pytest

from surogate_core import engine
from surogate_core.engine import EngineError


def library(origin: str) -> dict:
    return next(row for row in engine.libraries() if row["origin"] == origin)


def test_cpu_backend_is_loaded():
    (cpu,) = [row for row in engine.libraries() if row["name"] == "surogate_cpu"]
    assert cpu["failure"] is None and cpu["abi"] == "1.3"


def test_library_by_path(fake):
    assert library(str(fake.path))["num_kernels"] == 7
    assert {row["name"] for row in engine.kernels() if row["op"] == "fake_add"} == {"plain", "low"}
    plain = next(row for row in engine.kernels() if row["op"] == "fake_add" and row["name"] == "plain")
    assert plain["library"] == "fake" and plain["in_place_input"] == 0 and plain["deterministic"]


def test_same_table_again_changes_nothing(fake):
    before = len(engine.kernels())
    engine.register_library(fake.table(0), "again")
    engine.register_library(fake.function("sg_kernel_library_v1"), "and again")
    assert len(engine.kernels()) == before


def test_other_version_is_refused_with_both_numbers(fake):
    with pytest.raises(EngineError, match=r"99\.7.*1\.3"):
        engine.register_library(fake.table(1), "version 99")
    assert "99.7" in library("version 99")["failure"]


def test_incomplete_kernel_is_refused(fake):
    with pytest.raises(EngineError, match="fake_no_run/plain.*lacks supports or run"):
        engine.register_library(fake.table(2), "incomplete")


def test_taken_name_is_refused_and_nothing_of_the_library_stays(fake):
    with pytest.raises(EngineError, match="'duplicate' brings kernel 'plain' for op 'fake_add'.*'fake'"):
        engine.register_library(fake.table(3), "duplicate")
    assert not [row for row in engine.kernels() if row["op"] == "fake_never"]


def test_newer_minor_version_is_taken(fake):
    engine.register_library(fake.table(4), "newer")
    assert library("newer")["abi"] == "1.4"
    assert [row["name"] for row in engine.kernels() if row["op"] == "fake_newer"] == ["plain"]


def test_reason_of_a_library_that_refuses_is_kept(fake):
    with pytest.raises(EngineError, match="no such device"):
        engine.register_library(fake.function("fake_refuses"), "refuses")
    assert library("refuses")["failure"] == "no such device"


def test_what_is_no_library(tmp_path):
    path = tmp_path / "libnone.so"
    path.write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be opened"):
        engine.load_library(path)
    assert library(str(path))["failure"]
    with pytest.raises(EngineError, match="not a capsule that the engine knows"):
        engine.register_library(object(), "an object")


def test_best_score_runs_unless_one_is_named(fake):
    a, b, y = np.ones(4, np.float32), np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    engine.run_op("fake_add", [a, b], [y])
    np.testing.assert_array_equal(y, [1, 2, 3, 4])
    engine.run_op("fake_add", [a, None], [y], kernel="low")
    np.testing.assert_array_equal(y, [1, 1, 1, 1])


def test_no_kernel_names_candidates_and_operands(fake):
    a, y = np.ones((2, 3), np.float64), np.zeros((2, 3), np.float64)
    with pytest.raises(EngineError) as caught:
        engine.run_op("fake_add", [a, a], [y])
    assert caught.value.op == "fake_add" and caught.value.instruction is None
    assert caught.value.operands == ["input 0: f64[2, 3]", "input 1: f64[2, 3]", "output 0: f64[2, 3]"]
    assert "plain (fake) scores 0" in str(caught.value)
    with pytest.raises(EngineError, match="'nobody' cannot run op 'fake_add'"):
        engine.run_op("fake_add", [a.astype(np.float32), None], [y], kernel="nobody")
    with pytest.raises(EngineError, match="install the plugin that does"):
        engine.run_op("no_such_op", [], [])


def test_kernel_error_carries_its_reason(fake):
    with pytest.raises(EngineError, match="'fake_fail', kernel 'plain' failed to run: the moon is in the wrong phase"):
        engine.run_op("fake_fail", [], [])


def test_operands_are_checked(fake):
    y = np.zeros(4, np.float32)
    with pytest.raises(EngineError, match="uint16"):
        engine.run_op("fake_add", [np.zeros(4, np.uint16), None], [y])
    with pytest.raises(EngineError, match="takes 40 bytes, its buffer has 16"):
        engine.run_op("fake_add", [(y, "f32", (10,)), None], [y])
    with pytest.raises(EngineError, match="multiple of 32"):
        engine.run_op("fake_add", [(np.zeros(20, np.uint8), "q4_1", (1, 20)), None], [y])
    with pytest.raises(EngineError, match="unknown dtype 'f8'"):
        engine.run_op("fake_add", [(y, "f8", (4,)), None], [y])
    y.flags.writeable = False
    with pytest.raises(EngineError, match="no writable buffer"):
        engine.run_op("fake_add", [y, None], [y])
