"""Embedding, linear, norm and language-model head."""

from __future__ import annotations

import numpy as np

from ..ir.graph import BUFFER
from .module import Module, Parameter
from .tensor import Tensor


class Embedding(Module):
    """Token embedding, weight [vocab, dim]; rows are multiplied by ``scale``. role: None for a table of a layer's own."""

    def __init__(
        self, vocab_size: int, dim: int, scale: float = 1.0, init_std: float = 0.02, role: str | None = "embed"
    ) -> None:
        self.weight = Parameter((vocab_size, dim), role, init_std)
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        return self.context.op("embedding", tokens, self.traced("weight"), scale=self.scale, out_dtype="residual",
                               role="residual", label="embedding")


class Linear(Module):
    """y = x W^T + b, weight [out, in]; ``role`` names the layer to LoRA, quantisation and sharding; None: they let it
    be."""

    def __init__(
        self, in_features: int, out_features: int, role: str | None, bias: bool = False, init_std: float = 0.02
    ) -> None:
        self.weight = Parameter((out_features, in_features), role, init_std)
        self.bias = Parameter((out_features,), "bias", 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.context.op("linear", x, self.traced("weight"), self.traced("bias"), out_dtype="compute",
                               label=self.weight.role)


class RMSNorm(Module):
    """y = x / rms(x) * (weight + unit_offset), computed in fp32 whatever the recipe (role "norm"). weight: whether there is
    one."""

    def __init__(self, dim: int, eps: float, unit_offset: bool = False, weight: bool = True) -> None:
        self.weight = Parameter((dim,), "norm", 0.0 if unit_offset else None) if weight else None
        self.dim, self.eps, self.unit_offset = dim, eps, int(unit_offset)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.traced("weight") or self.context.constant(f"ones_{self.dim}", np.ones(self.dim))
        y, _ = self.context.op("rms_norm", x, weight, eps=self.eps, unit_offset=self.unit_offset,
                               out_dtype="compute", label="norm")
        return y


class Scalar(Module):
    """y = weight * x, weight [1] a number of the checkpoint that is not trained (role "buffer")."""

    def __init__(self) -> None:
        self.weight = Parameter((1,), BUFFER)

    def forward(self, x: Tensor) -> Tensor:
        return self.context.op("scale", x, self.traced("weight"), out_dtype=x.dtype, role=x.value.role, label="scaled")


class LMHead(Module):
    """The output projection, weight [vocab, dim] (role "lm_head"), or the embedding's weight when tied."""

    def __init__(
        self, dim: int, vocab_size: int, tied: Embedding | None = None, softcap: float = 0.0, logit_scale: float = 1.0,
        init_std: float = 0.02,
    ) -> None:
        self.tied_to = [tied] if tied is not None else []  # a list, so that it is no child of this module
        self.weight = None if tied is not None else Parameter((vocab_size, dim), "lm_head", init_std)
        self.softcap, self.logit_scale = softcap, logit_scale

    def _weight(self):
        return self.tied_to[0].traced("weight") if self.tied_to else self.traced("weight")

    def loss(self, hidden: Tensor) -> Tensor:
        """Per-token cross-entropy against input "targets" i32 [T] (negative = ignored): f32 [T]."""
        targets = self.context.input("targets", ("T",))
        return self.context.op("linear_cross_entropy", hidden, self._weight(), targets, softcap=self.softcap,
                               logit_scale=self.logit_scale, label="token_loss")

    def logits(self, hidden: Tensor) -> Tensor:
        """f32 [rows, vocab]."""
        logits = self.context.op("linear", hidden, self._weight(), alpha=self.logit_scale, out_dtype="f32", label="logits")
        return self.context.op("softcap", logits, cap=self.softcap) if self.softcap > 0 else logits
