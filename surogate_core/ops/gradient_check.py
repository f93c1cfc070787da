"""Level 2 of the tests: an op's gradient rule against finite differences, all in float64.

The rule is run by the same builder that `autodiff` uses; what it emits is interpreted with the numpy references. So a
rule is checked before any kernel of its gradient ops exists.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import ops
from ..ir.builder import VIEW, GradientBuilder
from ..ir.graph import PARAM, Graph, Node, Value
from .record import Op, Sample

_STEP = 1e-5
_TOLERANCE = 1e-6  # central differences of step h are off by h^2 times the third derivative
MAX_ELEMENTS = 100_000
"""Samples with a larger operand are left to the conformance test."""


def small_samples(record: Op) -> list[tuple[int, Sample]]:
    """The samples to check gradients on, with their indices."""
    samples = record.samples(np.random.default_rng(1))
    return [
        (i, sample) for i, sample in enumerate(samples)
        if all(x is None or np.size(x) <= MAX_ELEMENTS for x in sample.inputs.values())
    ]


def check_op_gradients(record: Op) -> list[str]:
    """Checks the rule with all differentiable inputs needed, on every small sample, and with each one alone, on two."""
    samples = small_samples(record)
    problems = [] if len(samples) >= 2 else ["fewer than two samples are small enough to check gradients on"]
    for needed in (record.differentiable, *((name,) for name in record.differentiable)):
        for i, sample in samples if needed == record.differentiable else samples[1:3]:
            lines = check_gradient(record, sample, needed, np.random.default_rng(2))
            problems += [f"sample {i}, gradients of {', '.join(needed)}: {line}" for line in lines]
    return problems


def check_gradient(record: Op, sample: Sample, needed: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Compares the gradients of sum(output 0 * random) to the inputs ``needed``. Returns a line for each failure."""
    attrs = record.complete_attrs(sample.attrs)
    outputs = record.reference(sample.inputs, attrs, sample.initial)
    is_root = record.outputs[0].inout  # the end of a loss: gradients start from it with 1
    weights = np.ones_like(outputs[0]) if is_root else rng.standard_normal(outputs[0].shape)
    gradients, strays = rule_gradients(record, sample, needed, outputs, weights)
    problems = [f"a gradient of {name} is made, which nobody needs" for name in strays]

    def objective(name: str, values: np.ndarray) -> float:
        moved = record.reference({**sample.inputs, name: values}, attrs, sample.initial)
        return float(np.sum(moved[0] * weights))

    for name in needed:
        x = sample.inputs[name]
        if x is None:
            continue
        direction = rng.standard_normal(x.shape)
        expected = (objective(name, x + _STEP * direction) - objective(name, x - _STEP * direction)) / (2 * _STEP)
        if name not in gradients:
            problems.append(f"there is no gradient of {name}")
            continue
        got = float(np.sum(gradients[name] * direction))
        scale = max(abs(expected), float(np.linalg.norm(gradients[name])), 1e-3)
        if not abs(got - expected) <= _TOLERANCE * scale:
            problems.append(f"along a random direction of {name} the rule gives {got:.9g}, differences {expected:.9g}")
    return problems


def rule_gradients(
    record: Op, sample: Sample, needed: Sequence[str], outputs: Sequence[np.ndarray], weights: np.ndarray
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Runs the rule of ``record`` and interprets what it emits.

    Returns the gradients by input name, and the names of parameters that got one without being ``needed``.
    """
    graph = Graph()
    region = graph.prologue
    arrays: dict[Value, np.ndarray] = {}

    def value(name: str, array: np.ndarray, kind: str) -> Value:
        dtype = "i32" if np.issubdtype(array.dtype, np.integer) else "f32"
        made = graph.value(name, array.shape, dtype, kind=kind)
        arrays[made] = array
        return made

    # Every input stands for a parameter, so that a rule may accumulate into any of them.
    inputs = [None if sample.inputs.get(o.name) is None else value(o.name, np.asarray(sample.inputs[o.name]), PARAM)
              for o in record.inputs]
    results = [value(o.name, np.asarray(array), "activation") for o, array in zip(record.outputs, outputs)]
    node = Node(record.name, tuple(inputs), tuple(results), record.complete_attrs(sample.attrs))
    by_name = {v.name: v for v in inputs if v is not None}
    builder = GradientBuilder(graph, region, {by_name[name] for name in needed if name in by_name})
    incoming = [value("weights", np.asarray(weights), "activation"), *(None,) * (len(results) - 1)]
    returned = record.vjp(builder, node, incoming)

    for param, accumulator in graph.grads.items():
        arrays[accumulator] = np.zeros(param.shape)
    for emitted in region.backward:
        _interpret(emitted, arrays)

    gradients = {param.name: arrays[accumulator] for param, accumulator in graph.grads.items()}
    strays = sorted(set(gradients) - set(needed))
    for source, gradient in zip(inputs, returned, strict=True):
        if source is not None and gradient is not None and source.name in needed:
            gradients[source.name] = gradients.get(source.name, 0.0) + arrays[gradient]
    return gradients, strays


def _interpret(node: Node, arrays: dict[Value, np.ndarray]) -> None:
    if node.op == VIEW:
        arrays[node.outputs[0]] = arrays[node.inputs[0]].reshape(node.outputs[0].shape)
        return
    record = ops.get(node.op)
    inputs = {o.name: None if v is None else arrays[v] for o, v in zip(record.inputs, node.inputs)}
    initial = {o.name: arrays[v] for o, v in zip(record.outputs, node.outputs) if o.inout and v is not None}
    for target, array in zip(node.outputs, record.reference(inputs, node.attrs, initial)):
        if target is not None:
            arrays[target] = np.asarray(array)
