"""linear: y = alpha * x @ weight.T + bias + addend, and its three gradients."""

from __future__ import annotations

from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require

ALPHA = Attr(float, 1.0, "factor of the product (not of bias and addend)")
OUT_DTYPE = Attr(str, None, "dtype of the result; the addend's, else x's, when not given")

# Dot products of length K in fp32 over bf16 operands; the harness feeds the reference the same rounded operands.
GEMM_TOLERANCE = Tolerance(relative={"f32": 3e-6, "bf16": 4e-3}, absolute=1e-6)

FLOAT_DTYPES = (
    {},
    {"x": "bf16", "weight": "bf16", "y": "bf16", "addend": "bf16"},
    {"x": "bf16", "weight": "bf16", "y": "f32", "addend": "f32"},
)
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")


def _out_dtype(attrs, addend, x) -> str:
    if addend is not None:
        return addend.dtype
    return attrs.get("out_dtype") or x.dtype


def infer_linear(inputs, attrs):
    x, weight, bias, addend = inputs
    require(len(x.shape) == 2 and len(weight.shape) == 2, "linear: x is [T, K] and weight [N, K]")
    require(x.shape[1] == weight.shape[1], f"linear: x has {x.shape[1]} features, weight takes {weight.shape[1]}")
    shape = (x.shape[0], weight.shape[0])
    require(bias is None or bias.shape == shape[1:], f"linear: bias must have shape {shape[1:]}")
    require(addend is None or addend.shape == shape, f"linear: addend must have shape {shape}")
    return [TensorType(shape, _out_dtype(attrs, addend, x))]


def reference_linear(inputs, attrs, initial):
    y = attrs["alpha"] * (inputs["x"] @ inputs["weight"].T)
    if inputs["bias"] is not None:
        y = y + inputs["bias"]
    if inputs["addend"] is not None:
        y = y + inputs["addend"]
    return [y]


def vjp_linear(b, node, grads):
    (dy,) = grads
    x, weight, bias, addend = node.inputs
    alpha = node.attrs["alpha"]
    # What reads x comes first: its memory is free before that of its gradient is needed.
    if b.needs_grad(weight):
        b.accumulate(weight, "linear_weight_grad", dy, x, alpha=alpha)
    if bias is not None and b.needs_grad(bias):
        b.accumulate(bias, "bias_grad", dy)
    dx = None
    if b.needs_grad(x):
        dx = b.op("linear_input_grad", dy, weight, None, alpha=alpha, out_dtype=x.dtype)
    return dx, None, None, dy if addend is not None else None


def samples_linear(rng):
    cases = []
    for tokens, out_features, in_features, extras in (
        (1, 64, 32, ""), (7, 33, 65, "bias"), (64, 96, 64, "addend"), (130, 257, 300, "bias addend"), (0, 16, 8, ""),
    ):
        cases.append(Sample(
            {
                "x": rng.standard_normal((tokens, in_features)),
                "weight": rng.standard_normal((out_features, in_features)),
                "bias": rng.standard_normal(out_features) if "bias" in extras else None,
                "addend": rng.standard_normal((tokens, out_features)) if "addend" in extras else None,
            },
            {"alpha": 0.5 if "addend" in extras else 1.0},
            FLOAT_DTYPES,
        ))
    for tokens, width in ((1, 512), (5, 1792), (11, 512), (48, 512)):
        cases.append(Sample(
            {"x": rng.standard_normal((tokens, width)), "weight": rng.standard_normal((72, width)), "bias": None,
             "addend": None},
            {},
            tuple({"x": x, "weight": q, "y": y} for q in QUANTISED for x, y in (("f32", "f32"), ("bf16", "bf16"))),
        ))
    return cases


LINEAR = Op(
    name="linear",
    doc="y[T,N] = alpha * x[T,K] @ weight[N,K].T + bias[N] + addend[T,N]. The weight may be stored in any dtype.",
    inputs=(
        Operand("x", "[T, K]"),
        Operand("weight", "[N, K], plain or quantised along K"),
        Operand("bias", "[N]", optional=True),
        Operand("addend", "[T, N], in the result's dtype", optional=True),
    ),
    outputs=(Operand("y", "[T, N]"),),
    attrs={"alpha": ALPHA, "out_dtype": OUT_DTYPE},
    infer=infer_linear,
    reference=reference_linear,
    vjp=vjp_linear,
    flops=lambda inputs, attrs: 2.0 * inputs[0].shape[0] * inputs[1].shape[0] * inputs[1].shape[1],
    samples=samples_linear,
    tolerance=GEMM_TOLERANCE,
    in_place=3,
    rows_apart=("x", "addend", "y"),
    compute_inputs=("x",),
    differentiable=("x", "weight", "bias", "addend"),
)


def infer_input_grad(inputs, attrs):
    dy, weight, addend = inputs
    require(dy.shape[1] == weight.shape[0], f"linear_input_grad: dy has {dy.shape[1]} columns, weight {weight.shape[0]} rows")
    shape = (dy.shape[0], weight.shape[1])
    require(addend is None or addend.shape == shape, f"linear_input_grad: addend must have shape {shape}")
    return [TensorType(shape, _out_dtype(attrs, addend, dy))]


def reference_input_grad(inputs, attrs, initial):
    dx = attrs["alpha"] * (inputs["dy"] @ inputs["weight"])
    return [dx if inputs["addend"] is None else dx + inputs["addend"]]


def samples_input_grad(rng):
    cases = []
    dtypes = tuple({("dx" if k == "y" else "dy" if k == "x" else k): v for k, v in d.items()} for d in FLOAT_DTYPES)
    for tokens, out_features, in_features, addend in ((1, 64, 32, 0), (7, 33, 65, 1), (130, 257, 300, 1)):
        cases.append(Sample(
            {
                "dy": rng.standard_normal((tokens, out_features)),
                "weight": rng.standard_normal((out_features, in_features)),
                "addend": rng.standard_normal((tokens, in_features)) if addend else None,
            },
            {"alpha": 2.0 if addend else 1.0},
            dtypes,
        ))
    cases.append(Sample(
        {"dy": rng.standard_normal((48, 72)), "weight": rng.standard_normal((72, 512)), "addend": None},
        {},
        tuple({"dy": x, "weight": q, "dx": x} for q in QUANTISED for x in ("f32", "bf16")),
    ))
    return cases


LINEAR_INPUT_GRAD = Op(
    name="linear_input_grad",
    doc="dx[T,K] = alpha * dy[T,N] @ weight[N,K] + addend[T,K]: the gradient of `linear` to its input.",
    inputs=(
        Operand("dy", "[T, N]"),
        Operand("weight", "[N, K], plain or quantised along K"),
        Operand("addend", "[T, K], in the result's dtype", optional=True),
    ),
    outputs=(Operand("dx", "[T, K]"),),
    attrs={"alpha": ALPHA, "out_dtype": OUT_DTYPE},
    infer=infer_input_grad,
    reference=reference_input_grad,
    flops=lambda inputs, attrs: 2.0 * inputs[0].shape[0] * inputs[1].shape[0] * inputs[1].shape[1],
    samples=samples_input_grad,
    tolerance=GEMM_TOLERANCE,
    in_place=2,
    rows_apart=("dy", "weight", "addend", "dx"),
    compute_inputs=("dy",),
)


def infer_weight_grad(inputs, attrs):
    dy, x = inputs
    require(dy.shape[0] == x.shape[0], "linear_weight_grad: dy and x have different numbers of tokens")
    return [TensorType((dy.shape[1], x.shape[1]), "f32")]


def samples_weight_grad(rng):
    return [
        Sample(
            {"dy": rng.standard_normal((tokens, n)), "x": rng.standard_normal((tokens, k))},
            {"alpha": 0.5},
            ({}, {"dy": "bf16", "x": "bf16"}),
            {"dweight": rng.standard_normal((n, k))},
        )
        for tokens, n, k in ((1, 8, 16), (65, 33, 17), (300, 96, 130), (512, 16, 576))
    ]


LINEAR_WEIGHT_GRAD = Op(
    name="linear_weight_grad",
    doc="dweight[N,K] += alpha * dy[T,N].T @ x[T,K]: the gradient of `linear` to its weight, accumulated in fp32.",
    inputs=(Operand("dy", "[T, N]"), Operand("x", "[T, K]")),
    outputs=(Operand("dweight", "f32 [N, K]", inout=True),),
    attrs={"alpha": ALPHA},
    infer=infer_weight_grad,
    reference=lambda inputs, attrs, initial: [initial["dweight"] + attrs["alpha"] * inputs["dy"].T @ inputs["x"]],
    flops=lambda inputs, attrs: 2.0 * inputs[0].shape[0] * inputs[0].shape[1] * inputs[1].shape[1],
    samples=samples_weight_grad,
    tolerance=GEMM_TOLERANCE,
    rows_apart=("dy", "x"),
    compute_inputs=("dy", "x"),
)


BIAS_GRAD = Op(
    name="bias_grad",
    doc="dbias[N] += sum over tokens of dy[T,N].",
    inputs=(Operand("dy", "[T, N]"),),
    outputs=(Operand("dbias", "f32 [N]", inout=True),),
    infer=lambda inputs, attrs: [TensorType((inputs[0].shape[1],), "f32")],
    reference=lambda inputs, attrs, initial: [initial["dbias"] + inputs["dy"].sum(axis=0)],
    samples=lambda rng: [
        Sample({"dy": rng.standard_normal((t, n))}, {}, ({}, {"dy": "bf16"}), {"dbias": rng.standard_normal(n)})
        for t, n in ((1, 5), (37, 64), (1000, 33))
    ],
    tolerance=Tolerance(absolute=1e-6),
)

OPS = (LINEAR, LINEAR_INPUT_GRAD, LINEAR_WEIGHT_GRAD, BIAS_GRAD)
