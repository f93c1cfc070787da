"""Every gradient rule against finite differences in float64. See surogate_core/ops/gradient_check.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from surogate_core import ops
from surogate_core.ops.gradient_check import MAX_ELEMENTS, check_gradient

OPS = ops.registered()
DIFFERENTIABLE = sorted(name for name, op in OPS.items() if op.differentiable)


def small_samples(op):
    for i, sample in enumerate(op.samples(np.random.default_rng(1))):
        if all(x is None or np.size(x) <= MAX_ELEMENTS for x in sample.inputs.values()):
            yield i, sample


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_rule_agrees_with_finite_differences(name):
    op, problems, count = OPS[name], [], 0
    for i, sample in small_samples(op):
        count += 1
        problems += [f"sample {i}: {p}" for p in check_gradient(op, sample, op.differentiable, np.random.default_rng(2))]
    assert not problems, "\n".join(problems)
    assert count >= 2, "too few samples are small enough"


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if len(OPS[name].differentiable) > 1])
def test_rule_makes_only_the_gradients_that_are_needed(name):
    op, problems = OPS[name], []
    samples = list(small_samples(op))[1:3]
    for needed in op.differentiable:
        for i, sample in samples:
            lines = check_gradient(op, sample, (needed,), np.random.default_rng(3))
            problems += [f"sample {i}, only {needed}: {line}" for line in lines]
    assert not problems, "\n".join(problems)


def test_every_rule_is_checked():
    unchecked = sorted(name for name, op in OPS.items() if op.vjp is not None and not op.differentiable)
    assert not unchecked, f"ops with a gradient rule must name their differentiable inputs: {unchecked}"


def test_a_wrong_rule_is_reported():
    op = OPS["scale"]
    wrong = replace(op, vjp=lambda b, node, grads: (b.op("scale", grads[0], factor=2.0),))
    sample = op.samples(np.random.default_rng(0))[1]
    assert check_gradient(wrong, sample, ("x",), np.random.default_rng(0))
    missing = replace(op, vjp=lambda b, node, grads: (None,))
    assert check_gradient(missing, sample, ("x",), np.random.default_rng(0)) == ["there is no gradient of x"]
