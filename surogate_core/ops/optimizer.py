"""The update of a step: global_norm of the gradients, and AdamW with clipping by that norm."""

from __future__ import annotations

import numpy as np

from ..weights.quants import bf16_to_f32, f32_to_bf16
from .dropout import philox
from .record import Attr, Op, Operand, Sample, TensorType, Tolerance, require


def infer_global_norm(inputs, attrs):
    require(len(inputs[0].shape) == 1, f"global_norm: grad is [n], not {inputs[0].shape}")
    return [TensorType((1,), "f32")]


GLOBAL_NORM = Op(
    name="global_norm",
    doc="norm = sqrt(sum of squares of grad), summed in float64 over blocks of fixed size, in a fixed order.",
    inputs=(Operand("grad", "[n], f32 or bf16"),),
    outputs=(Operand("norm", "f32 [1]"),),
    infer=infer_global_norm,
    reference=lambda inputs, attrs, initial: [np.sqrt(np.sum(inputs["grad"] ** 2, keepdims=True))],
    samples=lambda rng: [
        Sample({"grad": 0.01 * rng.standard_normal(n)}, {}, ({}, {"grad": "bf16"})) for n in (0, 1, 67, 16384, 70001)
    ],
    tolerance=Tolerance(relative={"f32": 1e-7}),
)


ROUNDINGS = ("nearest", "stochastic")


def infer_adamw(inputs, attrs):
    grad, norm, hyper = inputs
    require(len(grad.shape) == 1, f"adamw: grad is [n], not {grad.shape}")
    require(hyper.shape == (4,), f"adamw: hyper must have shape (4,), not {hyper.shape}")
    if attrs.get("max_grad_norm", 0.0) > 0.0:
        require(norm is not None, "adamw: max_grad_norm needs the norm of the gradients")
    require(norm is None or norm.shape == (1,), "adamw: norm must have shape (1,)")
    rounding = attrs.get("rounding", "nearest")
    require(rounding in ROUNDINGS, f"adamw: rounding must be one of {', '.join(ROUNDINGS)}, not {rounding!r}")
    return [TensorType(grad.shape, "f32")] * 3  # written where they lie, so stored as they are there: f32 or bf16


def reference_adamw(inputs, attrs, initial):
    grad, (learning_rate, step) = inputs["grad"], inputs["hyper"][:2]
    norm = None if inputs["norm"] is None else inputs["norm"][0]
    if norm is not None and not np.isfinite(norm):
        return [initial["param"], initial["m"], initial["v"]]
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    if attrs["max_grad_norm"] > 0.0:
        grad = grad * min(1.0, attrs["max_grad_norm"] / (norm + 1e-6))
    m = beta1 * initial["m"] + (1.0 - beta1) * grad
    v = beta2 * initial["v"] + (1.0 - beta2) * grad * grad
    param = initial["param"] * (1.0 - learning_rate * attrs["weight_decay"])
    denominator = np.sqrt(v / (1.0 - beta2**step)) + attrs["eps"]
    return [param - learning_rate / (1.0 - beta1**step) * m / denominator, m, v]


def store_adamw(outputs, dtypes, inputs, attrs):
    """bf16 outputs as they read back. An update that was left out changes nothing here: its values are bf16 already."""
    return [
        _round_to_bf16(values, tensor, inputs["hyper"][1], attrs) if dtype == "bf16" else values
        for tensor, (values, dtype) in enumerate(zip(outputs, dtypes, strict=True))
    ]


def _round_to_bf16(values: np.ndarray, tensor: int, step: float, attrs) -> np.ndarray:
    single = values.astype(np.float32)
    if attrs["rounding"] == "nearest":
        return bf16_to_f32(f32_to_bf16(single)).astype(np.float64)
    seed = np.array([attrs["seed"] & 0xFFFFFFFF, attrs["seed"] >> 32 & 0xFFFFFFFF])
    words = philox(np.arange((values.size + 7) // 8), int(step), seed, last_word=tensor)
    noise = np.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(-1)[: values.size]
    noise = np.where(np.isnan(single), 0, noise).astype(np.uint32)
    return ((single.view(np.uint32) + noise) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def samples_adamw(rng):
    half = {"param": "bf16", "m": "bf16", "v": "bf16"}
    mixed = ({"m": "bf16", "v": "bf16"}, {"grad": "bf16", "param": "bf16"}, {"grad": "bf16", "v": "bf16"})
    combinations = ({}, half, half | {"grad": "bf16"}, *mixed)
    cases = []
    for n, norm, step, dtypes in (
        (1, None, 1, ({}, half)), (67, 0.5, 2, combinations), (0, 1.0, 1, ({}, half)), (70001, 12.5, 100, combinations),
        (260, np.nan, 3, ({}, half)), (260, np.inf, 3, ({}, half)),
    ):
        for rounding, seed in (("nearest", 0), ("stochastic", 0x1234_5678_9ABC_DEF0)):
            inputs = {
                "grad": rng.standard_normal(n), "norm": None if norm is None else np.array([norm]),
                "hyper": np.array([1e-3, step, 0.0, 0.0]),
            }
            attrs = {"weight_decay": 0.1, "max_grad_norm": 0.0 if norm is None else 1.0, "beta2": 0.95,
                     "rounding": rounding, "seed": seed}
            initial = {"param": rng.standard_normal(n), "m": 0.1 * rng.standard_normal(n), "v": 0.1 * rng.random(n)}
            cases.append(Sample(inputs, attrs, dtypes, initial))
    return cases


ADAMW = Op(
    name="adamw",
    doc="One step of AdamW (https://arxiv.org/abs/1711.05101; decoupled weight decay) over a flat group of parameters, "
    "on the gradient scaled by min(1, max_grad_norm / (norm + 1e-6)). A norm that is not finite leaves everything as "
    "it is. Stochastic rounding to bf16 adds 16 random bits below the mantissa and cuts: element i of tensor k (param 0, "
    "m 1, v 2) takes half-word i % 8, low halves first, of Philox4x32-10 at counter (i / 8, step, k), key the seed.",
    inputs=(
        Operand("grad", "[n], f32 or bf16"),
        Operand("norm", "f32 [1]; not needed without clipping", optional=True),
        Operand("hyper", "f32 [4]: learning rate, step counted from 1, 0, 0"),
    ),
    outputs=(
        Operand("param", "[n], f32 or bf16", inout=True),
        Operand("m", "[n], f32 or bf16, mean of the gradients", inout=True),
        Operand("v", "[n], f32 or bf16, mean of their squares", inout=True),
    ),
    attrs={
        "beta1": Attr(float, 0.9, "decay of m"),
        "beta2": Attr(float, 0.999, "decay of v"),
        "eps": Attr(float, 1e-8, "added to the root of v"),
        "weight_decay": Attr(float, 0.0, "share of the learning rate by which parameters shrink"),
        "max_grad_norm": Attr(float, 0.0, "norm above which gradients are scaled down; 0 for no clipping"),
        "rounding": Attr(str, "nearest", "of what is stored as bf16: nearest or stochastic"),
        "seed": Attr(int, 0, "key of the random bits, 64 bits"),
    },
    infer=infer_adamw,
    reference=reference_adamw,
    store=store_adamw,
    samples=samples_adamw,
    tolerance=Tolerance(relative={"f32": 2e-6, "bf16": 1e-3}),  # one bf16 in 67 may round the other way
)

OPS = (GLOBAL_NORM, ADAMW)
