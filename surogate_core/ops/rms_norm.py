"""rms_norm: y = x * rstd * (weight + unit_offset) over the last axis, and its two gradients."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, require

UNIT_OFFSET = Attr(float, 0.0, "added to the weight: 1 for families that store the weight less one")
OUT_DTYPE = Attr(str, None, "dtype of the result; x's when not given")


def infer_rms_norm(inputs, attrs):
    x, weight = inputs
    require(len(x.shape) >= 1, "rms_norm: x is [..., N]")
    require(weight.shape == x.shape[-1:], f"rms_norm: weight must have shape {x.shape[-1:]}, not {weight.shape}")
    return [TensorType(x.shape, attrs.get("out_dtype") or x.dtype), TensorType(x.shape[:-1], "f32")]


def reference_rms_norm(inputs, attrs, initial):
    x = inputs["x"]
    rstd = 1.0 / np.sqrt(np.mean(x * x, axis=-1) + attrs["eps"])
    return [x * rstd[..., None] * (inputs["weight"] + attrs["unit_offset"]), rstd]


def vjp_rms_norm(b, node, grads):
    dy = grads[0]
    x, weight = node.inputs
    rstd = node.outputs[1]
    dx = None
    if b.needs_grad(x):
        dx = b.op("rms_norm_grad", dy, x, weight, rstd, None, unit_offset=node.attrs["unit_offset"], out_dtype=x.dtype)
    if b.needs_grad(weight):
        b.accumulate(weight, "rms_norm_weight_grad", dy, x, rstd)
    return dx, None


SHAPES = ((1, 1), (5, 3, 64), (0, 16), (37, 67), (130, 576), (3, 4099))


def samples_rms_norm(rng):
    dtypes = (
        {}, {"y": "bf16"}, {"x": "bf16", "y": "bf16"}, {"x": "bf16", "y": "f32"},
        {"x": "bf16", "weight": "bf16", "y": "bf16"}, {"weight": "f16"},
    )
    return [
        Sample(
            {"x": 3.0 * rng.standard_normal(shape), "weight": rng.standard_normal(shape[-1])},
            {"eps": 1e-5, "unit_offset": float(i % 2)},
            dtypes,
        )
        for i, shape in enumerate(SHAPES)
    ]


RMS_NORM = Op(
    name="rms_norm",
    doc="y[..., N] = x * rstd * (weight[N] + unit_offset), rstd = 1 / sqrt(mean(x^2) + eps), in fp32 inside.",
    inputs=(Operand("x", "[..., N]"), Operand("weight", "[N]")),
    outputs=(Operand("y", "[..., N]"), Operand("rstd", "f32 [...]; absent where no gradient follows", optional=True)),
    attrs={
        "eps": Attr(float, 1e-5, "added to the mean square"),
        "unit_offset": UNIT_OFFSET,
        "out_dtype": OUT_DTYPE,
    },
    infer=infer_rms_norm,
    reference=reference_rms_norm,
    vjp=vjp_rms_norm,
    samples=samples_rms_norm,
    in_place=0,
    rows_apart=("x", "y"),
    differentiable=("x", "weight"),
)


def infer_grad(inputs, attrs):
    dy, x, weight, rstd, addend = inputs
    require(dy.shape == x.shape, f"rms_norm_grad: dy has shape {dy.shape}, x {x.shape}")
    require(weight.shape == x.shape[-1:], f"rms_norm_grad: weight must have shape {x.shape[-1:]}")
    require(rstd.shape == x.shape[:-1], f"rms_norm_grad: rstd must have shape {x.shape[:-1]}")
    require(addend is None or addend.shape == x.shape, f"rms_norm_grad: addend must have shape {x.shape}")
    return [TensorType(x.shape, addend.dtype if addend is not None else attrs.get("out_dtype") or x.dtype)]


def reference_grad(inputs, attrs, initial):
    x, rstd = inputs["x"], inputs["rstd"][..., None]
    scaled = inputs["dy"] * (inputs["weight"] + attrs["unit_offset"])
    dx = rstd * (scaled - x * rstd**2 * np.mean(scaled * x, axis=-1, keepdims=True))
    return [dx if inputs["addend"] is None else dx + inputs["addend"]]


def _rstd(x: np.ndarray) -> np.ndarray:
    return 1.0 / np.sqrt(np.mean(x * x, axis=-1) + 1e-5)


def samples_grad(rng):
    cases = []
    dtypes = (
        {}, {"dy": "bf16"}, {"dy": "bf16", "x": "bf16", "addend": "bf16", "dx": "bf16"},
        {"dy": "bf16", "x": "bf16", "weight": "bf16"},
    )
    for i, shape in enumerate(SHAPES):
        x = 3.0 * rng.standard_normal(shape)
        cases.append(Sample(
            {
                "dy": rng.standard_normal(shape), "x": x, "weight": rng.standard_normal(shape[-1]), "rstd": _rstd(x),
                "addend": rng.standard_normal(shape) if i % 2 else None,
            },
            {"unit_offset": float(i % 2)},
            dtypes,
        ))
    return cases


RMS_NORM_GRAD = Op(
    name="rms_norm_grad",
    doc="dx = rstd * (g - x * rstd^2 * mean(g * x)) + addend with g = dy * (weight + unit_offset): the gradient of "
    "`rms_norm` to its input, added to what already flows along the residual.",
    inputs=(
        Operand("dy", "[..., N]"), Operand("x", "[..., N]"), Operand("weight", "[N]"), Operand("rstd", "f32 [...]"),
        Operand("addend", "[..., N], in the result's dtype", optional=True),
    ),
    outputs=(Operand("dx", "[..., N]"),),
    attrs={"unit_offset": UNIT_OFFSET, "out_dtype": OUT_DTYPE},
    infer=infer_grad,
    reference=reference_grad,
    samples=samples_grad,
    in_place=4,
    rows_apart=("dy", "x", "addend", "dx"),
)


def infer_weight_grad(inputs, attrs):
    dy, x, rstd = inputs
    require(dy.shape == x.shape, f"rms_norm_weight_grad: dy has shape {dy.shape}, x {x.shape}")
    require(rstd.shape == x.shape[:-1], f"rms_norm_weight_grad: rstd must have shape {x.shape[:-1]}")
    return [TensorType(x.shape[-1:], "f32")]


def reference_weight_grad(inputs, attrs, initial):
    terms = inputs["dy"] * inputs["x"] * inputs["rstd"][..., None]
    return [initial["dweight"] + terms.reshape(-1, terms.shape[-1]).sum(axis=0)]


def samples_weight_grad(rng):
    cases = []
    for shape in (*SHAPES, (700, 3, 64)):
        x = 3.0 * rng.standard_normal(shape)
        cases.append(Sample(
            {"dy": rng.standard_normal(shape), "x": x, "rstd": _rstd(x)},
            {},
            ({}, {"dy": "bf16"}, {"dy": "bf16", "x": "bf16"}),
            {"dweight": rng.standard_normal(shape[-1])},
        ))
    return cases


RMS_NORM_WEIGHT_GRAD = Op(
    name="rms_norm_weight_grad",
    doc="dweight[N] += sum over rows of dy * x * rstd: the gradient of `rms_norm` to its weight.",
    inputs=(Operand("dy", "[..., N]"), Operand("x", "[..., N]"), Operand("rstd", "f32 [...]")),
    outputs=(Operand("dweight", "f32 [N]", inout=True),),
    infer=infer_weight_grad,
    reference=reference_weight_grad,
    samples=samples_weight_grad,
    rows_apart=("dy", "x"),
)

OPS = (RMS_NORM, RMS_NORM_GRAD, RMS_NORM_WEIGHT_GRAD)
