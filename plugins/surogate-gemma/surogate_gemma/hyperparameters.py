"""What a Gemma of generations 1 to 3 is made of, and what sets each generation apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surogate_core.dsl import RopeSpec
from surogate_core.families import DecoderHyperparameters


@dataclass(frozen=True)
class GemmaHyperparameters(DecoderHyperparameters):
    """layer_kinds: "local" or "global", by layer. window: how many tokens back (itself included) a token of local layers
    sees. causal: False for a model that makes vectors of texts: tokens see as far ahead as back, and there is no head.
    local_rope_base: of local layers; 0 where they are rotated as the global ones. query_scalar: queries are multiplied
    by query_scalar^-0.5. attn_softcap, final_softcap: 0 for none. post_norms: attention and feed-forward are normed
    before they are added too."""

    layer_kinds: tuple[str, ...] = ()
    window: int = 0
    causal: bool = True
    local_rope_base: float = 0.0
    query_scalar: float = 256.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False

    def rope_of(self, kind: str) -> RopeSpec:
        if kind == "global" or not self.local_rope_base:
            return self.rope
        return RopeSpec(self.head_dim, self.local_rope_base, max_position=self.max_positions)


@dataclass(frozen=True)
class Generation:
    """One generation of Gemma.

    name: its model_type. architectures: names in config.json, the text model first. gguf: architecture of GGUF files.
    period: the last layer of every so many is global, the others local; 0 where all are global. local_rope_base: 0, or
    that of local layers where a file does not say. softcaps: whether attention has one. layers_of_27b: how many layers
    the size has whose queries are scaled by hidden_size / heads and not by the head's width: GGUF readers know it by
    that. gguf_untied: whether GGUF readers look for a head of its own. defaults: what `transformers` takes for keys
    that config.json leaves out.
    """

    name: str
    architectures: tuple[str, ...]
    gguf: str
    period: int = 0
    qk_norm: bool = False
    post_norms: bool = True
    local_rope_base: float = 0.0
    softcaps: bool = False
    layers_of_27b: int = 0
    gguf_untied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def kinds(self, num_layers: int, period: int | None = None) -> tuple[str, ...]:
        period = self.period if period is None else period
        return tuple("local" if period and (i + 1) % period else "global" for i in range(num_layers))


_COMMON = {"head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
           "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256}

GEMMA_1 = Generation(
    "gemma", ("GemmaForCausalLM",), "gemma", post_norms=False,
    defaults={"vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
              "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192},
)
GEMMA_2 = Generation(
    "gemma2", ("Gemma2ForCausalLM",), "gemma2", period=2, softcaps=True, layers_of_27b=46,
    defaults={**_COMMON, "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
              "final_logit_softcapping": 30.0},
)
GEMMA_3 = Generation(
    "gemma3_text", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), "gemma3", period=6, qk_norm=True,
    local_rope_base=10000.0, layers_of_27b=62, gguf_untied=True,
    defaults={**_COMMON, "vocab_size": 262208, "max_position_embeddings": 131072},
)
