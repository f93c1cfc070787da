"""Tidy's model: a Llama-like decoder whose feed-forward block has no gate and squares its ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core.dsl import Attention, Embedding, Linear, LMHead, Model, Module, RMSNorm, RopeSpec, Stack, Tensor


@dataclass(frozen=True)
class TidyConfig:
    """Hyperparameters, named as in the checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class SquaredReLUMLP(Module):
    """down(max(up(x), 0)^2)."""

    def __init__(self, config: TidyConfig) -> None:
        std = config.initializer_range
        self.up = Linear(config.hidden_size, config.intermediate_size, "mlp.up", init_std=std)
        self.down = Linear(config.intermediate_size, config.hidden_size, "mlp.down", init_std=std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.context.op("relu2", self.up(x), label="relu2"))


class TidyLayer(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TidyConfig) -> None:
        rope = RopeSpec(config.head_dim, config.rope_theta, max_position=config.max_position_embeddings)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim, rope,
            init_std=config.initializer_range,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SquaredReLUMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TidyModel(Model):
    """Embedding, layers, norm, and a head that shares the embedding's weight."""

    def __init__(self, config: TidyConfig) -> None:
        self.embed = Embedding(config.vocab_size, config.hidden_size, init_std=config.initializer_range)
        self.layers = Stack(["decoder"] * config.num_hidden_layers, lambda kind: TidyLayer(config))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=self.embed)
