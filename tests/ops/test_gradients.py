"""Every gradient rule against finite differences in float64. See surogate_core/ops/gradient_check.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core import ops
from surogate_core.ops.gradient_check import check_gradient, check_op_gradients

OPS = ops.registered()
DIFFERENTIABLE = sorted(name for name, op in OPS.items() if op.differentiable)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_rule_agrees_with_finite_differences(name):
    problems = check_op_gradients(OPS[name])
    assert not problems, "\n".join(problems)


def test_every_rule_is_checked():
    unchecked = sorted(name for name, op in OPS.items() if op.vjp is not None and not op.differentiable)
    assert not unchecked, f"ops with a gradient rule must name their differentiable inputs: {unchecked}"


def test_a_wrong_rule_is_reported():
    op = OPS["scale"]
    assert not check_gradient(op, op.samples(np.random.default_rng(0))[1], ("x",), np.random.default_rng(0))
    wrong = replace(op, vjp=lambda b, node, grads: (b.op("scale", grads[0], factor=2.0), None))
    sample = op.samples(np.random.default_rng(0))[1]
    assert check_gradient(wrong, sample, ("x",), np.random.default_rng(0))
    missing = replace(op, vjp=lambda b, node, grads: (None, None))
    assert check_gradient(missing, sample, ("x",), np.random.default_rng(0)) == ["there is no gradient of x"]


def test_a_gradient_that_nobody_needs_is_reported():
    op = OPS["linear"]
    sample = op.samples(np.random.default_rng(0))[1]

    def greedy(b, node, grads):
        b.accumulate(node.inputs[1], "linear_weight_grad", grads[0], node.inputs[0])
        return op.vjp(b, node, grads)

    lines = check_gradient(replace(op, vjp=greedy), sample, ("x",), np.random.default_rng(0))
    assert lines == ["a gradient of weight is made, which nobody needs"]
