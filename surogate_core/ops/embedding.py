"""embedding: rows of a table picked by token, and the gradient to the table."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

SCALE = Attr(float, 1.0, "factor of every row")
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
PLAIN = ("f32", "f16", "bf16")


def infer_embedding(inputs, attrs):
    tokens, weight = inputs
    require(len(tokens.shape) == 1, "embedding: tokens is [T]")
    require(len(weight.shape) == 2, "embedding: weight is [V, D]")
    stored = weight.dtype if weight.dtype not in QUANTISED and weight.dtype != "f16" else "f32"
    return [TensorType((tokens.shape[0], weight.shape[1]), attrs.get("out_dtype") or stored)]


def vjp_embedding(b, node, grads):
    tokens, weight = node.inputs
    if b.needs_grad(weight):
        b.accumulate(weight, "embedding_weight_grad", tokens, grads[0], scale=node.attrs["scale"])
    return None, None


def samples_embedding(rng):
    cases = []
    for num_tokens, vocabulary, width in ((1, 3, 5), (0, 4, 8), (33, 17, 67), (300, 50, 576)):
        cases.append(Sample(
            {"tokens": rng.integers(0, vocabulary, num_tokens), "weight": rng.standard_normal((vocabulary, width))},
            {"scale": 1.0 if num_tokens < 33 else 7.5},
            tuple({"weight": weight, "y": y} for weight in PLAIN for y in ("f32", "bf16")),
        ))
    cases.append(Sample(
        {"tokens": rng.integers(0, 11, 21), "weight": rng.standard_normal((11, 512))},
        {"scale": 0.5},
        tuple({"weight": weight, "y": y} for weight in QUANTISED for y in ("f32", "bf16")),
    ))
    return cases


EMBEDDING = Op(
    name="embedding",
    doc="y[t] = scale * weight[tokens[t]]. The table may be stored in any dtype; a token outside it is an error.",
    inputs=(Operand("tokens", "i32 [T]"), Operand("weight", "[V, D], plain or quantised along D")),
    outputs=(Operand("y", "[T, D]"),),
    attrs={
        "scale": SCALE,
        "out_dtype": Attr(str, None, "dtype of y; the weight's if it is f32 or bf16, else f32, when not given"),
    },
    infer=infer_embedding,
    reference=lambda inputs, attrs, initial: [attrs["scale"] * inputs["weight"][inputs["tokens"]]],
    vjp=vjp_embedding,
    samples=samples_embedding,
    tolerance=Tolerance(relative={"f32": 1e-7, "bf16": 4e-3}),
    differentiable=("weight",),
)


def infer_weight_grad(inputs, attrs):
    tokens, dy = inputs
    require(len(dy.shape) == 2 and dy.shape[0] == tokens.shape[0], "embedding_weight_grad: dy is [T, D], tokens [T]")
    return [TensorType(("V", dy.shape[1]), "f32")]


def reference_weight_grad(inputs, attrs, initial):
    dweight = np.array(initial["dweight"])
    np.add.at(dweight, inputs["tokens"], attrs["scale"] * inputs["dy"])
    return [dweight]


EMBEDDING_WEIGHT_GRAD = Op(
    name="embedding_weight_grad",
    doc="dweight[tokens[t]] += scale * dy[t], tokens in order, so that the sum is the same in every run.",
    inputs=(Operand("tokens", "i32 [T]"), Operand("dy", "[T, D]")),
    outputs=(Operand("dweight", "f32 [V, D]", inout=True),),
    attrs={"scale": SCALE},
    infer=infer_weight_grad,
    reference=reference_weight_grad,
    samples=lambda rng: [
        Sample(
            {"tokens": rng.integers(0, vocabulary, num_tokens), "dy": rng.standard_normal((num_tokens, width))},
            {"scale": 2.0},
            ({}, {"dy": "bf16"}),
            {"dweight": rng.standard_normal((vocabulary, width))},
        )
        for num_tokens, vocabulary, width in ((1, 3, 5), (0, 3, 16), (40, 4, 67), (300, 50, 576))
    ],
)

OPS = (EMBEDDING, EMBEDDING_WEIGHT_GRAD)
