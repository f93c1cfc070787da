"""glu: h = activation(gate) * up, the gated unit of SwiGLU and GeGLU, and its gradient."""

from __future__ import annotations

import math

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, require

ACTIVATION = Attr(str, "silu", "silu, gelu_tanh or gelu")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _activation(name: str, gate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """activation(gate) and its derivative. The forms of gelu: https://arxiv.org/abs/1606.08415."""
    if name == "silu":
        sigmoid = 1.0 / (1.0 + np.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if name == "gelu_tanh":
        slope = math.sqrt(2.0 / math.pi)
        tanh = np.tanh(slope * (gate + 0.044715 * gate**3))
        inner = slope * (1.0 + 3.0 * 0.044715 * gate**2)
        return 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh**2) * inner
    cdf = 0.5 * (1.0 + _erf(gate / math.sqrt(2.0)))
    return gate * cdf, cdf + gate * np.exp(-0.5 * gate**2) / math.sqrt(2.0 * math.pi)


def _check(op: str, attrs, gate, up) -> None:
    require(gate.shape == up.shape, f"{op}: gate has shape {gate.shape}, up {up.shape}")
    require(gate.dtype == up.dtype, f"{op}: gate is {gate.dtype}, up {up.dtype}")
    name = attrs.get("activation", "silu")
    require(name in ACTIVATIONS, f"{op}: no activation {name!r}; there are {', '.join(ACTIVATIONS)}")


def infer_glu(inputs, attrs):
    gate, up = inputs
    _check("glu", attrs, gate, up)
    return [TensorType(gate.shape, gate.dtype)]


def vjp_glu(b, node, grads):
    gate, up = node.inputs
    return b.op("glu_grad", grads[0], gate, up, activation=node.attrs["activation"])


SHAPES = ((1, 1), (7, 33), (0, 8), (64, 96), (130, 1536))
DTYPES = ({}, {"dh": "bf16", "gate": "bf16", "up": "bf16", "h": "bf16", "dgate": "bf16", "dup": "bf16"})


def _samples(rng, operands: tuple[str, ...]) -> list[Sample]:
    return [
        Sample(
            {name: (4.0 if name == "gate" else 1.0) * rng.standard_normal(shape) for name in operands},
            {"activation": activation},
            DTYPES,
        )
        for shape in SHAPES
        for activation in ACTIVATIONS
    ]


GLU = Op(
    name="glu",
    doc="h[T, N] = activation(gate[T, N]) * up[T, N].",
    inputs=(Operand("gate", "[T, N]"), Operand("up", "[T, N], in gate's dtype")),
    outputs=(Operand("h", "[T, N], in gate's dtype"),),
    attrs={"activation": ACTIVATION},
    infer=infer_glu,
    reference=lambda inputs, attrs, initial: [_activation(attrs["activation"], inputs["gate"])[0] * inputs["up"]],
    vjp=vjp_glu,
    samples=lambda rng: _samples(rng, ("gate", "up")),
    in_place=0,
    rows_apart=("gate", "up", "h"),
    differentiable=("gate", "up"),
)


def infer_grad(inputs, attrs):
    dh, gate, up = inputs
    _check("glu_grad", attrs, gate, up)
    require(dh.shape == gate.shape, f"glu_grad: dh has shape {dh.shape}, gate {gate.shape}")
    return [TensorType(gate.shape, gate.dtype), TensorType(up.shape, up.dtype)]


def reference_grad(inputs, attrs, initial):
    value, derivative = _activation(attrs["activation"], inputs["gate"])
    return [inputs["dh"] * inputs["up"] * derivative, inputs["dh"] * value]


GLU_GRAD = Op(
    name="glu_grad",
    doc="dgate = dh * up * activation'(gate), dup = dh * activation(gate).",
    inputs=(
        Operand("dh", "[T, N]"),
        Operand("gate", "[T, N]"),
        Operand("up", "[T, N], in gate's dtype"),
    ),
    outputs=(Operand("dgate", "[T, N], in gate's dtype"), Operand("dup", "[T, N], in gate's dtype")),
    attrs={"activation": ACTIVATION},
    infer=infer_grad,
    reference=reference_grad,
    samples=lambda rng: _samples(rng, ("dh", "gate", "up")),
    in_place=0,
    rows_apart=("dh", "gate", "up", "dgate", "dup"),
)

OPS = (GLU, GLU_GRAD)
