"""Tidy's model: a Llama-like decoder whose feed-forward block has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core.dsl import (
    Attention,
    Embedding,
    Hyperparameters,
    Linear,
    LMHead,
    Model,
    Module,
    RMSNorm,
    RopeSpec,
    Stack,
    Tensor,
)


@dataclass(frozen=True)
class TidyHyperparameters(Hyperparameters):
    """Adds to every family's: the shapes of attention and MLP, and the usual constants."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class SquaredReLUMLP(Module):
    """down(max(up(x), 0)^2)."""

    def __init__(self, hyperparameters: TidyHyperparameters) -> None:
        width, inner = hyperparameters.hidden_size, hyperparameters.intermediate_size
        std = hyperparameters.initializer_range
        self.up = Linear(width, inner, "mlp.up", init_std=std)
        self.down = Linear(inner, width, "mlp.down", init_std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.context.op("relu2", self.up(x), label="relu2"))


class TidyLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hyperparameters: TidyHyperparameters) -> None:
        head_dim, longest = hyperparameters.head_dim, hyperparameters.max_positions
        rope = RopeSpec(head_dim, hyperparameters.rope_theta, max_position=longest)
        self.attn_norm = RMSNorm(hyperparameters.hidden_size, hyperparameters.rms_norm_eps)
        self.attn = Attention(
            hyperparameters.hidden_size,
            hyperparameters.num_attention_heads,
            hyperparameters.num_key_value_heads,
            head_dim,
            rope,
            init_std=hyperparameters.initializer_range,
        )
        self.mlp_norm = RMSNorm(hyperparameters.hidden_size, hyperparameters.rms_norm_eps)
        self.mlp = SquaredReLUMLP(hyperparameters)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TidyModel(Model):
    """Embedding, layers, norm, head."""

    def __init__(self, hyperparameters: TidyHyperparameters) -> None:
        std = hyperparameters.initializer_range
        self.embed = Embedding(hyperparameters.vocab_size, hyperparameters.hidden_size, init_std=std)
        self.layers = Stack(["decoder"] * hyperparameters.num_layers, lambda kind: TidyLayer(hyperparameters))
        self.final_norm = RMSNorm(hyperparameters.hidden_size, hyperparameters.rms_norm_eps)
        tied = self.embed if hyperparameters.tied else None
        self.lm_head = LMHead(hyperparameters.hidden_size, hyperparameters.vocab_size, tied)
