"""The update of a step: global_norm of the gradients, and AdamW with clipping by that norm."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require


def infer_global_norm(inputs, attrs):
    require(len(inputs[0].shape) == 1, f"global_norm: grad is [n], not {inputs[0].shape}")
    return [TensorType((1,), "f32")]


GLOBAL_NORM = Op(
    name="global_norm",
    doc="norm = sqrt(sum of squares of grad), summed in float64 over blocks of fixed size, in a fixed order.",
    inputs=(Operand("grad", "f32 [n]"),),
    outputs=(Operand("norm", "f32 [1]"),),
    infer=infer_global_norm,
    reference=lambda inputs, attrs, initial: [np.sqrt(np.sum(inputs["grad"] ** 2, keepdims=True))],
    samples=lambda rng: [Sample({"grad": 0.01 * rng.standard_normal(n)}) for n in (0, 1, 67, 16384, 70001)],
    tolerance=Tolerance(relative={"f32": 1e-7}),
)


def infer_adamw(inputs, attrs):
    grad, norm, hyper = inputs
    require(len(grad.shape) == 1, f"adamw: grad is [n], not {grad.shape}")
    require(hyper.shape == (4,), f"adamw: hyper must have shape (4,), not {hyper.shape}")
    if attrs.get("max_grad_norm", 0.0) > 0.0:
        require(norm is not None, "adamw: max_grad_norm needs the norm of the gradients")
    require(norm is None or norm.shape == (1,), "adamw: norm must have shape (1,)")
    return [TensorType(grad.shape, "f32")] * 3


def reference_adamw(inputs, attrs, initial):
    grad, (learning_rate, step) = inputs["grad"], inputs["hyper"][:2]
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    if attrs["max_grad_norm"] > 0.0:
        grad = grad * min(1.0, attrs["max_grad_norm"] / (inputs["norm"][0] + 1e-6))
    m = beta1 * initial["m"] + (1.0 - beta1) * grad
    v = beta2 * initial["v"] + (1.0 - beta2) * grad * grad
    param = initial["param"] * (1.0 - learning_rate * attrs["weight_decay"])
    denominator = np.sqrt(v / (1.0 - beta2**step)) + attrs["eps"]
    return [param - learning_rate / (1.0 - beta1**step) * m / denominator, m, v]


ADAMW = Op(
    name="adamw",
    doc="One step of AdamW (https://arxiv.org/abs/1711.05101; decoupled weight decay) over a flat group of parameters, "
    "on the gradient scaled by min(1, max_grad_norm / (norm + 1e-6)).",
    inputs=(
        Operand("grad", "f32 [n]"),
        Operand("norm", "f32 [1]; not needed without clipping", optional=True),
        Operand("hyper", "f32 [4]: learning rate, step counted from 1, 0, 0"),
    ),
    outputs=(
        Operand("param", "f32 [n]", inout=True),
        Operand("m", "f32 [n], mean of the gradients", inout=True),
        Operand("v", "f32 [n], mean of their squares", inout=True),
    ),
    attrs={
        "beta1": Attr(float, 0.9, "decay of m"),
        "beta2": Attr(float, 0.999, "decay of v"),
        "eps": Attr(float, 1e-8, "added to the root of v"),
        "weight_decay": Attr(float, 0.0, "share of the learning rate by which parameters shrink"),
        "max_grad_norm": Attr(float, 0.0, "norm above which gradients are scaled down; 0 for no clipping"),
    },
    infer=infer_adamw,
    reference=reference_adamw,
    samples=lambda rng: [
        Sample(
            {
                "grad": rng.standard_normal(n), "norm": np.array([norm]) if norm else None,
                "hyper": np.array([1e-3, step, 0.0, 0.0]),
            },
            {"weight_decay": 0.1, "max_grad_norm": 1.0 if norm else 0.0, "beta2": 0.95},
            ({},),
            {"param": rng.standard_normal(n), "m": 0.1 * rng.standard_normal(n), "v": 0.1 * rng.random(n)},
        )
        for n, norm, step in ((1, None, 1), (67, 0.5, 2), (0, 1.0, 1), (70001, 12.5, 100))
    ],
)

OPS = (GLOBAL_NORM, ADAMW)
