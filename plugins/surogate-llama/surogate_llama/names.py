"""Weight names of Llama in safetensors and in GGUF files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.weights.name_map import NameMap, Rule
from surogate_core.weights.transforms import PermuteRope

if TYPE_CHECKING:
    from .family import LlamaHyperparameters

LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
HF_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
              "mlp.down_proj")
GGUF_LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def hf_names(h: LlamaHyperparameters) -> NameMap:
    rules = [
        Rule("embed.weight", "model.embed_tokens.weight"),
        Rule("layers.{layer}.attn_norm.weight", "model.layers.{layer}.input_layernorm.weight"),
        Rule("layers.{layer}.mlp_norm.weight", "model.layers.{layer}.post_attention_layernorm.weight"),
        Rule("final_norm.weight", "model.norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
    ]
    for ours, theirs in zip(LINEARS, HF_LINEARS, strict=True):
        rules.append(Rule(f"layers.{{layer}}.{ours}.weight", f"model.layers.{{layer}}.{theirs}.weight"))
        rules.append(Rule(f"layers.{{layer}}.{ours}.bias", f"model.layers.{{layer}}.{theirs}.bias", optional=True))
    return NameMap(rules, tied={"lm_head.weight": "embed.weight"})


def gguf_names(h: LlamaHyperparameters) -> NameMap:
    """GGUF stores q and k with the two halves of each rotated pair side by side; rows are moved back on reading."""
    rules = [
        Rule("embed.weight", "token_embd.weight"),
        Rule("layers.{layer}.attn_norm.weight", "blk.{layer}.attn_norm.weight"),
        Rule("layers.{layer}.mlp_norm.weight", "blk.{layer}.ffn_norm.weight"),
        Rule("final_norm.weight", "output_norm.weight"),
        Rule("lm_head.weight", "output.weight"),
    ]
    permuted = {"attn.q": PermuteRope(h.num_heads, h.head_dim), "attn.k": PermuteRope(h.num_kv_heads, h.head_dim)}
    for ours, theirs in zip(LINEARS, GGUF_LINEARS, strict=True):
        transform = (permuted[ours],) if ours in permuted else ()
        for part in ("weight", "bias"):
            rules.append(Rule(f"layers.{{layer}}.{ours}.{part}", f"blk.{{layer}}.{theirs}.{part}", *transform,
                              optional=part == "bias"))
    return NameMap(rules, tied={"lm_head.weight": "embed.weight"})
