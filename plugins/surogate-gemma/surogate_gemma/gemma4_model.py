"""The Gemma 4 decoder in the DSL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from surogate_core.dsl import (
    Attention, Embedding, GatedMLP, Linear, LMHead, Model, Module, RMSNorm, RopeSpec, Scalar, Stack, Tensor,
)
from surogate_core.families import DecoderHyperparameters

SHARED = "_shared"


@dataclass(frozen=True)
class Gemma4Hyperparameters(DecoderHyperparameters):
    """What is said of heads and rotation holds for global layers, but for head_dim and num_kv_heads: these are the local ones'.

    layer_types: "local" or "global", by layer. window: how many tokens back (itself included) a token of a local layer sees.
    shared_layers: how many of the last layers attend to keys and values of the last layer of their type before them.
    shared_width: of their MLP, as a multiple of intermediate_size. value_is_key: global layers project keys and values at
    once. per_layer_size: width of what each layer looks up for itself; 0 for none. per_layer_vocab: tokens of these tables.
    final_softcap: 0 for none.
    """

    layer_types: tuple[str, ...] = ()
    window: int = 0
    global_head_dim: int = 0
    global_kv_heads: int = 0
    local_rope_base: float = 10000.0
    shared_layers: int = 0
    shared_width: int = 1
    value_is_key: bool = False
    per_layer_size: int = 0
    per_layer_vocab: int = 0
    final_softcap: float = 0.0

    @property
    def rope(self) -> RopeSpec:
        return RopeSpec(self.global_head_dim, self.rope_base, self.rope_dims, self.rope_scaling, self.max_positions)

    @property
    def local_rope(self) -> RopeSpec:
        return RopeSpec(self.head_dim, self.local_rope_base, max_position=self.max_positions)

    @property
    def own_layers(self) -> int:
        """The first layers, which have keys and values of their own."""
        return self.num_layers - self.shared_layers

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(t + SHARED * (i >= self.own_layers) for i, t in enumerate(self.layer_types))


def _attention(h: Gemma4Hyperparameters, layer_type: str, shared: bool) -> Attention:
    own: Mapping[str, object] = {"kv_from": layer_type} if shared else {"kv_to": layer_type, "v_norm_eps": h.norm_eps}
    common = {"softmax_scale": 1.0, "qk_norm_eps": h.norm_eps, "init_std": h.init_std, **own}
    if layer_type == "local":
        return Attention(h.hidden_size, h.num_heads, h.num_kv_heads, h.head_dim, h.local_rope, window=h.window, **common)
    return Attention(h.hidden_size, h.num_heads, h.global_kv_heads, h.global_head_dim, h.rope,
                     value_is_key=h.value_is_key, **common)


class PerLayerInput(Module):
    """What a layer adds for itself: of the token, looked up in a table of its own and mixed with a projection of the token's
    embedding, as much as a gate lets through.

    `transformers` multiplies the projection by hidden_size^-0.5 before its norm, and the mixture by 2^-0.5; here the first is
    in the norm's epsilon. norm: that norm, which the layers share.
    """

    def __init__(self, h: Gemma4Hyperparameters, norm: RMSNorm) -> None:
        self.embed = Embedding(h.per_layer_vocab, h.per_layer_size, h.per_layer_size**0.5, h.init_std, None)
        self.mix = Linear(h.hidden_size, h.per_layer_size, None, init_std=h.init_std)
        self.gate = Linear(h.hidden_size, h.per_layer_size, "per_layer.gate", init_std=h.init_std)
        self.out = Linear(h.per_layer_size, h.hidden_size, "per_layer.out", init_std=h.init_std)
        self.norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.shared_norm = [norm]  # a list, so that it is no child of this module

    def forward(self, x: Tensor) -> Tensor:
        flow = self.context.flow
        mixed = self.embed(flow["tokens"]) + self.shared_norm[0](self.mix(flow["embeddings"]))
        own = self.context.op("scale", mixed, factor=2**-0.5, out_dtype="compute", label="per_layer")
        gated = self.context.op("glu", self.gate(x), own, activation="gelu_tanh", label="per_layer.glu")
        return self.norm(self.out(gated))


class Gemma4Block(Module):
    """Attention, GeGLU and what the layer has of its own, each normed before it joins the residual stream; and a factor of the
    sum."""

    def __init__(self, h: Gemma4Hyperparameters, kind: str, per_layer_norm: RMSNorm | None) -> None:
        shared = kind.endswith(SHARED)
        width = h.intermediate_size * (h.shared_width if shared else 1)
        self.attn_norm, self.attn_post_norm = RMSNorm(h.hidden_size, h.norm_eps), RMSNorm(h.hidden_size, h.norm_eps)
        self.attn = _attention(h, kind.removesuffix(SHARED), shared)
        self.mlp_norm, self.mlp_post_norm = RMSNorm(h.hidden_size, h.norm_eps), RMSNorm(h.hidden_size, h.norm_eps)
        self.mlp = GatedMLP(h.hidden_size, width, "gelu_tanh", init_std=h.init_std)
        if per_layer_norm is not None:
            self.per_layer = PerLayerInput(h, per_layer_norm)
        self.scalar = Scalar()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_post_norm(self.attn(self.attn_norm(x)))
        x = x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))
        if hasattr(self, "per_layer"):
            x = x + self.per_layer(x)
        return self.scalar(x)


class Gemma4(Model):
    def __init__(self, h: Gemma4Hyperparameters) -> None:
        self.embed = Embedding(h.vocab_size, h.hidden_size, h.hidden_size**0.5, h.init_std)
        if h.per_layer_size:
            self.per_layer_norm = RMSNorm(h.per_layer_size, h.norm_eps * h.hidden_size)
        norm = self.per_layer_norm if h.per_layer_size else None
        self.layers = Stack(h.kinds, lambda kind: Gemma4Block(h, kind, norm))
        self.final_norm = RMSNorm(h.hidden_size, h.norm_eps)
        self.lm_head = LMHead(h.hidden_size, h.vocab_size, self.embed if h.tied else None, h.final_softcap,
                              init_std=h.init_std)

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if hasattr(self, "per_layer_norm"):
            flow = self.context.flow
            flow["tokens"], flow["embeddings"] = tokens, self.context.op("cast", x, out_dtype="compute", label="embeddings")
        return self.final_norm(self.layers(x))
