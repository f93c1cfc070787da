"""Element by element: add, scale, cast, softcap, fill, accumulate; and token_sum, which ends a loss."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

SHAPES = ((1,), (7, 33), (0, 8), (3, 5, 67), (130, 576))
OUT_DTYPE = Attr(str, None, "dtype of the result; the first input's when not given")
MIXED = ({}, {"x": "bf16", "y": "bf16"}, {"y": "bf16"}, {"x": "bf16"})


def _like_first(inputs, attrs):
    return [TensorType(inputs[0].shape, attrs.get("out_dtype") or inputs[0].dtype)]


def _as_dtype(b, gradient, dtype: str):
    return gradient if gradient.dtype == dtype else b.op("cast", gradient, out_dtype=dtype)


def _samples(rng, attrs=None, dtypes=MIXED, operands=("x",)) -> list[Sample]:
    return [
        Sample({name: 2.0 * rng.standard_normal(shape) for name in operands}, dict(attrs or {}), dtypes)
        for shape in SHAPES
    ]


def infer_add(inputs, attrs):
    a, b = inputs
    require(a.shape == b.shape, f"add: a has shape {a.shape}, b {b.shape}")
    return [TensorType(a.shape, attrs.get("out_dtype") or a.dtype)]


def vjp_add(b, node, grads):
    return tuple(_as_dtype(b, grads[0], x.dtype) if b.needs_grad(x) else None for x in node.inputs)


ADD = Op(
    name="add",
    doc="y = a + b.",
    inputs=(Operand("a", "[...]"), Operand("b", "[...], a's shape")),
    outputs=(Operand("y", "[...]"),),
    attrs={"out_dtype": OUT_DTYPE},
    infer=infer_add,
    reference=lambda inputs, attrs, initial: [inputs["a"] + inputs["b"]],
    vjp=vjp_add,
    samples=lambda rng: _samples(
        rng, None, ({}, {"a": "bf16", "b": "bf16", "y": "bf16"}, {"b": "bf16"}, {"a": "bf16", "y": "f32"}), ("a", "b")
    ),
    in_place=0,
    differentiable=("a", "b"),
)


def infer_scale(inputs, attrs):
    x, by = inputs
    require(by is None or (by.shape == (1,) and by.dtype == "f32"), f"scale: by is f32 [1], not {by}")
    return _like_first([x], attrs)


def vjp_scale(b, node, grads):
    x, by = node.inputs
    if b.needs_grad(by):
        raise ValueError("scale: there is no gradient to the factor that it reads")
    return b.op("scale", grads[0], by, factor=node.attrs["factor"], out_dtype=x.dtype), None


def samples_scale(rng) -> list[Sample]:
    cases = _samples(rng, {"factor": -1.625})
    for i, case in enumerate(cases):
        case.inputs["by"] = rng.standard_normal(1) if i % 2 else None
    return cases


SCALE = Op(
    name="scale",
    doc="y = factor * x, or factor * by[0] * x.",
    inputs=(Operand("x", "[...]"), Operand("by", "f32 [1]", optional=True)),
    outputs=(Operand("y", "[...]"),),
    attrs={"factor": Attr(float, 1.0, "the factor"), "out_dtype": OUT_DTYPE},
    infer=infer_scale,
    reference=lambda inputs, attrs, initial: [
        attrs["factor"] * inputs["x"] * (1.0 if inputs["by"] is None else inputs["by"][0])
    ],
    vjp=vjp_scale,
    samples=samples_scale,
    in_place=0,
    rows_apart=("y",),
    differentiable=("x",),
)

CAST = Op(
    name="cast",
    doc="y = x in another dtype, rounded to nearest even.",
    inputs=(Operand("x", "[...], f32, bf16 or f16"),),
    outputs=(Operand("y", "[...], f32, bf16 or f16"),),
    attrs={"out_dtype": OUT_DTYPE},
    infer=_like_first,
    reference=lambda inputs, attrs, initial: [inputs["x"]],
    vjp=lambda b, node, grads: (_as_dtype(b, grads[0], node.inputs[0].dtype),),
    samples=lambda rng: _samples(rng, None, tuple({"x": x, "y": y} for x in ("f32", "bf16", "f16")
                                                  for y in ("f32", "bf16", "f16"))),
    tolerance=Tolerance(relative={"f32": 0.0, "bf16": 4e-3, "f16": 5e-4}, absolute=0.0),
    rows_apart=("y",),
    differentiable=("x",),
)

CAP = Attr(float, None, "the bound that |y| stays below")

SOFTCAP = Op(
    name="softcap",
    doc="y = cap * tanh(x / cap).",
    inputs=(Operand("x", "[...]"),),
    outputs=(Operand("y", "[...]"),),
    attrs={"cap": CAP, "out_dtype": OUT_DTYPE},
    infer=_like_first,
    reference=lambda inputs, attrs, initial: [attrs["cap"] * np.tanh(inputs["x"] / attrs["cap"])],
    vjp=lambda b, node, grads: (b.op("softcap_grad", grads[0], node.inputs[0], cap=node.attrs["cap"]),),
    samples=lambda rng: _samples(rng, {"cap": 1.5}),
    in_place=0,
    differentiable=("x",),
)

SOFTCAP_GRAD = Op(
    name="softcap_grad",
    doc="dx = dy * (1 - tanh(x / cap)^2), in x's dtype.",
    inputs=(Operand("dy", "[...]"), Operand("x", "[...]")),
    outputs=(Operand("dx", "[...]"),),
    attrs={"cap": CAP},
    infer=lambda inputs, attrs: [TensorType(inputs[1].shape, inputs[1].dtype)],
    reference=lambda inputs, attrs, initial: [inputs["dy"] * (1.0 - np.tanh(inputs["x"] / attrs["cap"]) ** 2)],
    samples=lambda rng: _samples(
        rng, {"cap": 1.5}, ({}, {"dy": "bf16", "x": "bf16", "dx": "bf16"}, {"dy": "bf16"}), ("dy", "x")
    ),
    in_place=0,
)

FILL = Op(
    name="fill",
    doc="Sets every element of y to one value.",
    inputs=(),
    outputs=(Operand("y", "[...], f32, bf16 or i32", inout=True),),
    attrs={"value": Attr(float, 0.0, "the value")},
    infer=lambda inputs, attrs: [None],  # the storage that is filled has a type of its own
    reference=lambda inputs, attrs, initial: [np.full_like(initial["y"], attrs["value"])],
    samples=lambda rng: [
        Sample({}, {"value": 3.0}, ({}, {"y": "bf16"}, {"y": "i32"}), {"y": np.ones(shape)}) for shape in SHAPES
    ],
)

ACCUMULATE = Op(
    name="accumulate",
    doc="y += x, in fp32.",
    inputs=(Operand("x", "[...]"),),
    outputs=(Operand("y", "f32 [...]", inout=True),),
    infer=lambda inputs, attrs: [TensorType(inputs[0].shape, "f32")],
    reference=lambda inputs, attrs, initial: [initial["y"] + inputs["x"]],
    samples=lambda rng: [
        Sample({"x": rng.standard_normal(shape)}, {}, ({}, {"x": "bf16"}), {"y": rng.standard_normal(shape)})
        for shape in SHAPES
    ],
)


def infer_token_sum(inputs, attrs):
    token_loss, token_weights = inputs
    require(
        len(token_loss.shape) == 1 and token_loss.shape == token_weights.shape,
        f"token_sum: token_loss and token_weights are [T], not {token_loss.shape} and {token_weights.shape}",
    )
    return [TensorType((1,), "f32")]


TOKEN_SUM = Op(
    name="token_sum",
    doc="loss += sum over tokens of token_loss * token_weights, in a fixed order. It is the root that gradients start "
    "from, with 1; so the gradient to token_loss is token_weights.",
    inputs=(Operand("token_loss", "f32 [T]"), Operand("token_weights", "f32 [T]")),
    outputs=(Operand("loss", "f32 [1]", inout=True),),
    infer=infer_token_sum,
    reference=lambda inputs, attrs, initial: [
        initial["loss"] + np.sum(inputs["token_loss"] * inputs["token_weights"])
    ],
    vjp=lambda b, node, grads: (node.inputs[1], None),
    samples=lambda rng: [
        Sample(
            {"token_loss": rng.random(n), "token_weights": rng.random(n)}, {}, ({},), {"loss": rng.standard_normal(1)}
        )
        for n in (0, 1, 67, 3001)
    ],
    differentiable=("token_loss",),
)

OPS = (ADD, SCALE, CAST, SOFTCAP, SOFTCAP_GRAD, FILL, ACCUMULATE, TOKEN_SUM)
