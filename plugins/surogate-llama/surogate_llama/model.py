"""The Llama decoder in the DSL, with the switches of its relatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.dsl import Attention, Embedding, GatedMLP, LMHead, Model, Module, RMSNorm, Stack, Tensor

from .layers import is_nope, is_sliding

if TYPE_CHECKING:
    from .family import LlamaHyperparameters


class LlamaBlock(Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream, times a constant."""

    def __init__(self, h: LlamaHyperparameters, kind: str) -> None:
        self.attn_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.attn = Attention(
            h.hidden_size, h.num_heads, h.num_kv_heads, h.head_dim, None if is_nope(kind) else h.rope,
            query_rope=None if is_nope(kind) else h.query_rope,
            window=h.window if is_sliding(kind) else 0, softmax_scale=h.attention_scale, rope_interleaved=h.interleaved,
            qkv_bias=h.qkv_bias, out_bias=h.out_bias, init_std=h.init_std,
        )
        self.mlp_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.mlp = GatedMLP(h.hidden_size, h.intermediate_size, "silu", h.mlp_bias, h.init_std)
        self.residual_scale = h.residual_scale

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x)) * self.residual_scale
        return x + self.mlp(self.mlp_norm(x)) * self.residual_scale


class Llama(Model):
    def __init__(self, h: LlamaHyperparameters) -> None:
        self.embed = Embedding(h.vocab_size, h.hidden_size, h.embed_scale, h.init_std)
        self.layers = Stack(h.kinds, lambda kind: LlamaBlock(h, kind))
        self.final_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.lm_head = LMHead(h.hidden_size, h.vocab_size, self.embed if h.tied else None,
                              logit_scale=1 / h.logit_divisor, init_std=h.init_std)
