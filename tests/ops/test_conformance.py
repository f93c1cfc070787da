"""Every kernel of every registered op against the op's reference. See surogate_core/ops/conformance.py."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from surogate_core import engine, ops
from surogate_core.ops import conformance
from surogate_core.ops.record import Op, Operand, Sample, TensorType, Tolerance
from surogate_core.plugins import get_manager

OPS = ops.registered()
get_manager().load_kernels()
# Taken now: other tests of this process may bring kernels of their own later.
AT_START = [k for k in engine.kernels() if k["backend"] == "cpu"]
KERNELS = [k for k in AT_START if k["op"] in OPS]


@cache
def cases(name: str) -> list[conformance.Case]:
    return conformance.cases(OPS[name])


@cache
def verdict(op: str, name: str) -> conformance.Verdict:
    kernel = next(k for k in KERNELS if (k["op"], k["name"]) == (op, name))
    return conformance.check_kernel(kernel, cases(op))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: f"{k['op']}-{k['name']}")
def test_kernel_agrees_with_the_reference(kernel):
    features = engine.cpu_features()
    wants_avx512 = kernel["name"].startswith("avx512")
    if wants_avx512 and not features["avx512f"]:
        pytest.skip("this processor has no AVX-512")
    found = verdict(kernel["op"], kernel["name"])
    assert not found.problems, "\n".join(found.problems[:20])
    assert found.supported, "no sample of the op exercises this kernel"


@pytest.mark.parametrize("name", sorted(OPS))
def test_every_case_of_an_op_has_a_kernel(name):
    supported = {id(case) for k in KERNELS if k["op"] == name for case in verdict(name, k["name"]).supported}
    missing = [str(case) for case in cases(name) if id(case) not in supported]
    assert not missing, "no CPU kernel runs:\n" + "\n".join(missing[:20])


def test_every_kernel_belongs_to_a_registered_op():
    assert {k["op"] for k in AT_START} <= set(OPS)


# ---- the harness itself must be able to fail


def scale_as(reference, tolerance=Tolerance()):
    """The op `scale` with another reference; its kernels are what they are."""
    return Op(
        name="scale", doc="", inputs=(Operand("x", ""),), outputs=(Operand("y", ""),),
        infer=lambda inputs, attrs: [TensorType(inputs[0].shape, attrs["out_dtype"])], attrs=OPS["scale"].attrs,
        reference=reference, tolerance=tolerance, in_place=0,
        samples=lambda rng: [Sample({"x": rng.standard_normal((3, 5))}, {"factor": 2.0})],
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
