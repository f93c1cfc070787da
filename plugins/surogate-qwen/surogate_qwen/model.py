"""The Qwen decoder in the DSL: generations 2, 2.5 and 3, whose blocks differ by switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.dsl import Attention, Embedding, GatedMLP, LMHead, Model, Module, RMSNorm, Stack, Tensor

if TYPE_CHECKING:
    from .family import QwenHyperparameters


class QwenBlock(Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream. window: of this layer, 0 for none."""

    def __init__(self, h: QwenHyperparameters, window: int) -> None:
        self.attn_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.attn = Attention(
            h.hidden_size, h.num_heads, h.num_kv_heads, h.head_dim, h.rope, window=window,
            qkv_bias=h.qkv_bias, out_bias=h.out_bias, qk_norm_eps=h.norm_eps if h.qk_norm else None,
            init_std=h.init_std,
        )
        self.mlp_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.mlp = GatedMLP(h.hidden_size, h.intermediate_size, "silu", init_std=h.init_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Qwen(Model):
    def __init__(self, h: QwenHyperparameters) -> None:
        self.embed = Embedding(h.vocab_size, h.hidden_size, init_std=h.init_std)
        self.layers = Stack(h.layer_types, lambda kind: QwenBlock(h, h.window if kind == "sliding_attention" else 0))
        self.final_norm = RMSNorm(h.hidden_size, h.norm_eps)
        if h.head:
            self.lm_head = LMHead(h.hidden_size, h.vocab_size, self.embed if h.tied else None, init_std=h.init_std)
