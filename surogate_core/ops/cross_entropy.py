"""linear_cross_entropy: the head's matrix product and the loss in one op, so that logits are never held whole."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

ATTRS = {
    "softcap": Attr(float, 0.0, "logits become softcap * tanh(logits / softcap); 0 leaves them alone"),
    "logit_scale": Attr(float, 1.0, "factor of the logits, before the cap"),
}
# Losses and gradients are sums over a vocabulary of exponentials in fp32.
TOLERANCE = Tolerance(relative={"f32": 6e-6, "bf16": 6e-3}, absolute=2e-6)


def _check(op: str, x, weight, targets) -> None:
    require(len(x.shape) == 2 and len(weight.shape) == 2, f"{op}: x is [T, K] and weight [V, K]")
    require(x.shape[1] == weight.shape[1], f"{op}: x has {x.shape[1]} features, weight takes {weight.shape[1]}")
    require(targets.shape == x.shape[:1], f"{op}: targets must have shape {x.shape[:1]}, not {targets.shape}")


def infer(inputs, attrs):
    x, weight, targets = inputs
    _check("linear_cross_entropy", x, weight, targets)
    return [TensorType(targets.shape, "f32")]


def _softmax(inputs, attrs):
    """Capped logits, their slope to the product x @ weight.T, probabilities and losses, of supervised rows only."""
    rows = np.flatnonzero(inputs["targets"] >= 0)
    targets = inputs["targets"][rows]
    logits = attrs["logit_scale"] * (inputs["x"][rows] @ inputs["weight"].T)
    slope = np.full_like(logits, attrs["logit_scale"])
    if attrs["softcap"] > 0:
        ratio = np.tanh(logits / attrs["softcap"])
        logits, slope = attrs["softcap"] * ratio, slope * (1.0 - ratio * ratio)
    largest = logits.max(axis=1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(axis=1, keepdims=True)
    picked = logits[np.arange(len(rows)), targets]
    losses = np.zeros(len(inputs["targets"]))
    losses[rows] = (largest + np.log(total))[:, 0] - picked
    return rows, targets, slope, exponentials / total, losses


def reference(inputs, attrs, initial):
    return [_softmax(inputs, attrs)[-1]]


def vjp(b, node, grads):
    (dtoken_loss,) = grads
    x, weight, targets = node.inputs
    attrs = {name: node.attrs[name] for name in ATTRS}
    operands = (x, weight, targets, dtoken_loss)
    if b.needs_grad(weight):
        _, dx, _ = b.accumulate(weight, "linear_cross_entropy_grad", *operands, out_dtype=x.dtype, **attrs)
    else:
        _, dx, _ = b.op("linear_cross_entropy_grad", *operands, absent=("dweight",), out_dtype=x.dtype, **attrs)
    return dx if b.needs_grad(x) else None, None, None


def infer_grad(inputs, attrs):
    x, weight, targets, dtoken_loss = inputs
    _check("linear_cross_entropy_grad", x, weight, targets)
    require(dtoken_loss.shape == targets.shape, f"linear_cross_entropy_grad: dtoken_loss must be {targets.shape}")
    return [
        TensorType(targets.shape, "f32"),
        TensorType(x.shape, attrs.get("out_dtype") or x.dtype),
        TensorType(weight.shape, "f32"),
    ]


def reference_grad(inputs, attrs, initial):
    rows, targets, slope, probabilities, losses = _softmax(inputs, attrs)
    dlogits = probabilities.copy()
    dlogits[np.arange(len(rows)), targets] -= 1.0
    dlogits *= inputs["dtoken_loss"][rows, None] * slope
    dx = np.zeros(inputs["x"].shape)
    dx[rows] = dlogits @ inputs["weight"]
    if "dweight" not in initial:
        return [losses, dx, None]
    return [losses, dx, initial["dweight"] + dlogits.T @ inputs["x"][rows]]


def _inputs(rng, tokens, features, vocabulary, supervised):
    targets = rng.integers(0, vocabulary, tokens)
    targets[rng.random(tokens) >= supervised] = -1
    return {
        "x": rng.standard_normal((tokens, features)),
        "weight": rng.standard_normal((vocabulary, features)) * 0.2,
        "targets": targets,
    }


SHAPES = (
    (1, 16, 40, 1.0, {}),
    (37, 65, 515, 0.5, {"softcap": 3.0}),
    (300, 80, 1300, 0.95, {"logit_scale": 0.5}),
    (140, 96, 1100, 0.9, {"softcap": 5.0}),
    (140, 288, 1100, 0.9, {}),
    (20, 32, 64, 0.0, {}),
    (0, 32, 64, 1.0, {}),
)
FLOATS = ({}, {"x": "bf16", "weight": "bf16"})


def samples(rng):
    cases = [Sample(_inputs(rng, *shape), attrs, FLOATS) for *shape, attrs in SHAPES]
    cases.append(Sample(_inputs(rng, 33, 256, 130, 0.5), {}, tuple({"weight": q} for q in ("q8_0", "q4_1", "q6_k"))))
    return cases


def samples_grad(rng):
    cases = []
    for *shape, attrs in SHAPES:
        inputs = _inputs(rng, *shape) | {"dtoken_loss": rng.random(shape[0])}
        dweight = rng.standard_normal(inputs["weight"].shape)
        cases.append(Sample(inputs, attrs, ({},), {"dweight": dweight}))
        cases.append(Sample(inputs, attrs, ({"x": "bf16", "weight": "bf16", "dx": "bf16"},),
                            absent_outputs=frozenset({"dweight"})))
    inputs = _inputs(rng, 33, 256, 130, 0.5) | {"dtoken_loss": rng.random(33)}
    quantised = tuple({"weight": q} for q in ("q8_0", "q4_1", "q6_k"))
    cases.append(Sample(inputs, {}, quantised, absent_outputs=frozenset({"dweight"})))
    return cases


LINEAR_CROSS_ENTROPY = Op(
    name="linear_cross_entropy",
    doc="token_loss[T] = -log softmax(x[T,K] @ weight[V,K].T)[targets]; 0 where the target is negative. Only one "
    "chunk of logits exists at a time.",
    inputs=(
        Operand("x", "[T, K]"),
        Operand("weight", "[V, K], plain or quantised along K"),
        Operand("targets", "i32 [T]; negative: no loss"),
    ),
    outputs=(Operand("token_loss", "f32 [T]"),),
    attrs=ATTRS,
    infer=infer,
    reference=reference,
    vjp=vjp,
    flops=lambda inputs, attrs: 2.0 * inputs[0].shape[0] * inputs[1].shape[0] * inputs[1].shape[1],
    samples=samples,
    tolerance=TOLERANCE,
    differentiable=("x", "weight"),
)

LINEAR_CROSS_ENTROPY_GRAD = Op(
    name="linear_cross_entropy_grad",
    doc="The losses of `linear_cross_entropy` and, from the same logits, the gradients to x and (if present) the "
    "weight.",
    inputs=(
        Operand("x", "[T, K]"),
        Operand("weight", "[V, K], plain or quantised along K"),
        Operand("targets", "i32 [T]; negative: no loss"),
        Operand("dtoken_loss", "f32 [T]: gradient of each token's loss"),
    ),
    outputs=(
        Operand("token_loss", "f32 [T]"),
        Operand("dx", "[T, K]"),
        Operand("dweight", "f32 [V, K]", optional=True, inout=True),
    ),
    attrs=ATTRS | {"out_dtype": Attr(str, None, "dtype of dx; x's when not given")},
    infer=infer_grad,
    reference=reference_grad,
    flops=lambda inputs, attrs: 6.0 * inputs[0].shape[0] * inputs[1].shape[0] * inputs[1].shape[1],
    samples=samples_grad,
    tolerance=TOLERANCE,
)

OPS = (LINEAR_CROSS_ENTROPY, LINEAR_CROSS_ENTROPY_GRAD)
