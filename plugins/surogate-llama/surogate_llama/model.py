"""The Llama decoder in the DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.dsl import Attention, Embedding, GatedMLP, LMHead, Model, Module, RMSNorm, Stack, Tensor

if TYPE_CHECKING:
    from .family import LlamaHyperparameters


class LlamaBlock(Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, h: LlamaHyperparameters) -> None:
        self.attn_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.attn = Attention(
            h.hidden_size, h.num_heads, h.num_kv_heads, h.head_dim, h.rope, window=h.window,
            qkv_bias=h.attention_bias, out_bias=h.attention_bias, init_std=h.init_std,
        )
        self.mlp_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.mlp = GatedMLP(h.hidden_size, h.intermediate_size, "silu", h.mlp_bias, h.init_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(Model):
    def __init__(self, h: LlamaHyperparameters) -> None:
        self.embed = Embedding(h.vocab_size, h.hidden_size, init_std=h.init_std)
        self.layers = Stack(["block"] * h.num_layers, lambda kind: LlamaBlock(h))
        self.final_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.lm_head = LMHead(h.hidden_size, h.vocab_size, self.embed if h.tied else None, init_std=h.init_std)
