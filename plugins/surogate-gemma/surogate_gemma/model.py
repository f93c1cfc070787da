"""The Gemma decoder in the DSL: generations 1 to 3, whose blocks differ by switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.dsl import Attention, Embedding, GatedMLP, LMHead, Model, Module, RMSNorm, Stack, Tensor

if TYPE_CHECKING:
    from .hyperparameters import GemmaHyperparameters


class GemmaBlock(Module):
    """Attention and GeGLU, each normed before and, where the model has it, once more before it joins the residual
    stream.

    kind: "local" (a sliding window) or "global".
    """

    def __init__(self, h: GemmaHyperparameters, kind: str) -> None:
        self.attn_norm = self._norm(h)
        self.attn = Attention(
            h.hidden_size, h.num_heads, h.num_kv_heads, h.head_dim, h.rope_of(kind),
            causal=h.causal, window=h.window if kind == "local" else 0, softcap=h.attn_softcap,
            softmax_scale=h.query_scalar**-0.5, qk_norm_eps=h.norm_eps if h.qk_norm else None, qk_norm_unit_offset=True,
            init_std=h.init_std,
        )
        self.mlp_norm = self._norm(h)
        self.mlp = GatedMLP(h.hidden_size, h.intermediate_size, "gelu_tanh", init_std=h.init_std)
        if h.post_norms:
            self.attn_post_norm, self.mlp_post_norm = self._norm(h), self._norm(h)

    @staticmethod
    def _norm(h: GemmaHyperparameters) -> RMSNorm:
        return RMSNorm(h.hidden_size, h.norm_eps, unit_offset=True)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.attn_norm(x))
        x = x + (self.attn_post_norm(attended) if hasattr(self, "attn_post_norm") else attended)
        fed = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(fed) if hasattr(self, "mlp_post_norm") else fed)


class Gemma(Model):
    """Embeddings are multiplied by the root of their width, a float32. (`transformers` rounds that root to the weights'
    dtype; llama.cpp does not.)"""

    def __init__(self, h: GemmaHyperparameters) -> None:
        self.embed = Embedding(h.vocab_size, h.hidden_size, h.hidden_size**0.5, h.init_std)
        self.layers = Stack(h.layer_kinds, lambda kind: GemmaBlock(h, kind))
        self.final_norm = RMSNorm(h.hidden_size, h.norm_eps, unit_offset=True)
        if h.causal:
            tied = self.embed if h.tied else None
            self.lm_head = LMHead(h.hidden_size, h.vocab_size, tied, h.final_softcap, init_std=h.init_std)
