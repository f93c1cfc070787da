"""The gated feed-forward block."""

from __future__ import annotations

from .layers import Linear
from .module import Module
from .tensor import Tensor


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)); activation is "silu" (SwiGLU), "gelu_tanh" or "gelu" (GeGLU)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str = "silu", bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        self.gate = Linear(hidden_size, intermediate_size, "mlp.gate", bias, init_std)
        self.up = Linear(hidden_size, intermediate_size, "mlp.up", bias, init_std)
        self.down = Linear(intermediate_size, hidden_size, "mlp.down", bias, init_std)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.context.op("glu", self.gate(x), self.up(x), activation=self.activation, label="glu")
        return self.down(hidden)
