"""Weight names that decoders share, in safetensors and in GGUF files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..weights.name_map import NameMap, Rule
from ..weights.transforms import Transform

LINEARS = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
_HF_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
               "mlp.up_proj", "mlp.down_proj")
_GGUF_LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

HF_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""A block's norms -> their names in a layer. Families with others give a mapping of their own."""
GGUF_NORMS: Mapping[str, str] = {"attn_norm": "attn_norm", "mlp_norm": "ffn_norm"}


def hf_decoder_names(
    norms: Mapping[str, str] = HF_NORMS, prefix: str = "model.", more: Iterable[Rule] = ()
) -> NameMap:
    """norms: of a block. prefix: of everything but the head. more: rules that come first."""
    layer = f"{prefix}layers.{{layer}}."
    rules = [
        *more,
        Rule("embed.weight", f"{prefix}embed_tokens.weight"),
        Rule("final_norm.weight", f"{prefix}norm.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
        *(Rule(f"layers.{{layer}}.{ours}.weight", f"{layer}{theirs}.weight") for ours, theirs in norms.items()),
    ]
    for ours, theirs in zip(LINEARS, _HF_LINEARS, strict=True):
        rules.append(Rule(f"layers.{{layer}}.{ours}.weight", f"{layer}{theirs}.weight"))
        rules.append(Rule(f"layers.{{layer}}.{ours}.bias", f"{layer}{theirs}.bias", optional=True))
    return NameMap(rules, tied={"lm_head.weight": "embed.weight"})


def gguf_decoder_names(
    norms: Mapping[str, str] = GGUF_NORMS, transforms: Mapping[str, Transform] | None = None,
    norm_transform: Transform | None = None, more: Iterable[Rule] = (),
) -> NameMap:
    """transforms: of linears ("attn.q": PermuteRope(...)). norm_transform: of every norm. more: rules that come first."""
    normed = () if norm_transform is None else (norm_transform,)
    rules = [
        *more,
        Rule("embed.weight", "token_embd.weight"),
        Rule("final_norm.weight", "output_norm.weight", *normed),
        Rule("lm_head.weight", "output.weight"),
        *(Rule(f"layers.{{layer}}.{ours}.weight", f"blk.{{layer}}.{theirs}.weight", *normed) for ours, theirs in norms.items()),
    ]
    for ours, theirs in zip(LINEARS, _GGUF_LINEARS, strict=True):
        transform = (transforms[ours],) if transforms and ours in transforms else ()
        for part in ("weight", "bias"):
            rules.append(Rule(f"layers.{{layer}}.{ours}.{part}", f"blk.{{layer}}.{theirs}.{part}", *transform,
                              optional=part == "bias"))
    return NameMap(rules, tied={"lm_head.weight": "embed.weight"})
