"""Every kernel of every registered op against the op's reference. See surogate_core/ops/conformance.py."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.ops import conformance
from surogate_core.ops.record import Op, Operand, Sample, TensorType, Tolerance

from . import backends

OPS = ops.registered()
KERNELS = [k for k in backends.kernels() if k["op"] in OPS]
THREADS = {"cpu": (1, 2, 3), "cuda": (1, 1)}
"""How often each kernel runs a case, and with how many threads: the same bits are asked for every time."""


@cache
def cases(name: str) -> list[conformance.Case]:
    return conformance.cases(OPS[name])


@cache
def verdict(op: str, backend: str, name: str) -> conformance.Verdict:
    kernel = next(k for k in KERNELS if (k["op"], k["backend"], k["name"]) == (op, backend, name))
    return conformance.check_kernel(kernel, cases(op), THREADS[backend])


def of_backend(backend: str) -> tuple:
    return (pytest.mark.cuda,) if backend == "cuda" else ()


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(k, id=f"{k['backend']}-{k['op']}-{k['name']}", marks=of_backend(k["backend"])) for k in KERNELS],
)
def test_kernel_agrees_with_the_reference(kernel):
    if kernel["backend"] == "cpu" and not backends.runs_here(kernel["name"]):
        pytest.skip("this processor lacks its instructions")
    found = verdict(kernel["op"], kernel["backend"], kernel["name"])
    assert not found.problems, "\n".join(found.problems[:20])
    assert found.supported, "no sample of the op exercises this kernel"


@pytest.mark.parametrize(
    "name, backend",
    [*((name, "cpu") for name in sorted(OPS)), *(pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in ops.ALL)],
)
def test_every_case_of_an_op_has_a_kernel(name, backend):
    supported = {id(case) for each in backends.names(name, backend) for case in verdict(name, backend, each).supported}
    missing = [str(case) for case in cases(name) if id(case) not in supported]
    assert not missing, f"no kernel of {backend} runs:\n" + "\n".join(missing[:20])


def test_every_kernel_belongs_to_a_registered_op():
    assert {k["op"] for k in backends.kernels()} <= set(OPS)


# ---- the harness itself must be able to fail


def scale_as(reference, tolerance=Tolerance()):
    """The op `scale` with another reference; its kernels are what they are."""
    return Op(
        name="scale", doc="", inputs=(Operand("x", ""), Operand("by", "", optional=True)), outputs=(Operand("y", ""),),
        infer=lambda inputs, attrs: [TensorType(inputs[0].shape, attrs["out_dtype"])], attrs=OPS["scale"].attrs,
        reference=reference, tolerance=tolerance, in_place=0,
        samples=lambda rng: [Sample({"x": rng.standard_normal((3, 5)), "by": None}, {"factor": 2.0})],
    )


def verdict_of(record) -> conformance.Verdict:
    return conformance.check_kernel(conformance.kernels_of(record, "cpu")[0], conformance.cases(record))


def test_a_wrong_result_is_reported():
    assert not verdict_of(scale_as(lambda inputs, attrs, initial: [2.0 * inputs["x"]])).problems
    assert "off by" in verdict_of(scale_as(lambda inputs, attrs, initial: [2.001 * inputs["x"]])).problems[0]


def test_a_wrong_shape_is_reported():
    problems = verdict_of(scale_as(lambda inputs, attrs, initial: [inputs["x"][:2]])).problems
    assert "has shape (3, 5), the reference (2, 5)" in problems[0]


def test_an_unwritten_output_and_a_broken_guard_are_seen():
    whole = conformance.Stored.of(np.ones(8), "bf16").guarded(poisoned=True)
    assert np.isnan(whole.values).all() and whole.guards_intact
    memory = whole.array
    while memory.base is not None:
        memory = memory.base
    memory[-1] = 0
    assert not whole.guards_intact
    assert "8 NaN" in conformance.difference(whole, np.ones(8), Tolerance())


def test_infinities_must_match_exactly():
    output = conformance.Stored.of(np.array([np.inf, 1.0]), "f32")
    assert conformance.difference(output, np.array([np.inf, 1.0]), Tolerance()) is None
    assert conformance.difference(output, np.array([-np.inf, 1.0]), Tolerance()) is not None


def test_what_is_written_between_rows_is_seen():
    stored = conformance.Stored.of(np.arange(12.0).reshape(2, 3, 2), "bf16")
    wide = stored.apart(3, 2)
    assert wide.guards_intact and np.array_equal(wide.values, stored.values)
    assert wide.array.strides == (22, 4, 2)
    for side in (0, 1):
        broken = stored.apart(3, 2)
        broken.gaps[side][1, 0] = 7
        assert not broken.guards_intact
