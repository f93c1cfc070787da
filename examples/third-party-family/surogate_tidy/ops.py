"""relu2: y = max(x, 0)^2, and its gradient. The core's conformance and gradient suites run over both records."""

from __future__ import annotations

import numpy as np

from surogate_core.ops import Op, Operand, Sample, TensorType, require

DTYPES = ({}, {"x": "bf16", "y": "bf16"})
GRAD_DTYPES = ({}, {"dy": "bf16", "x": "bf16", "dx": "bf16"})
SHAPES = ((0, 8), (1, 1), (7, 33), (3, 5, 129), (64, 1024))


def infer_relu2(inputs, attrs):
    return [TensorType(inputs[0].shape, inputs[0].dtype)]


def reference_relu2(inputs, attrs, initial):
    return [np.maximum(inputs["x"], 0.0) ** 2]


def vjp_relu2(b, node, grads):
    return [b.op("relu2_grad", grads[0], node.inputs[0])]


def infer_relu2_grad(inputs, attrs):
    dy, x = inputs
    require(dy.shape == x.shape, f"relu2_grad: dy has shape {dy.shape}, x {x.shape}")
    return [TensorType(x.shape, x.dtype)]


def reference_relu2_grad(inputs, attrs, initial):
    return [inputs["dy"] * 2.0 * np.maximum(inputs["x"], 0.0)]


RELU2 = Op(
    name="relu2",
    doc="y = max(x, 0)^2, element by element.",
    inputs=(Operand("x", "[...]"),),
    outputs=(Operand("y", "[...], like x"),),
    infer=infer_relu2,
    reference=reference_relu2,
    vjp=vjp_relu2,
    samples=lambda rng: [Sample({"x": rng.standard_normal(shape)}, {}, DTYPES) for shape in SHAPES],
    in_place=0,
    differentiable=("x",),
)

RELU2_GRAD = Op(
    name="relu2_grad",
    doc="dx = dy * 2 * max(x, 0): the gradient of `relu2`.",
    inputs=(Operand("dy", "[...]"), Operand("x", "[...], the input of `relu2`")),
    outputs=(Operand("dx", "[...], like x"),),
    infer=infer_relu2_grad,
    reference=reference_relu2_grad,
    samples=lambda rng: [
        Sample({"dy": rng.standard_normal(shape), "x": rng.standard_normal(shape)}, {}, GRAD_DTYPES) for shape in SHAPES
    ],
    in_place=0,
)
