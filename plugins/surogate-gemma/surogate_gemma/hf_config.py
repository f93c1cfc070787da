"""config.json of Gemma 1, 2 and 3 <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.errors import WeightError
from surogate_core.families import HFConfig, read_hf_decoder, write_hf_decoder, write_hf_rope

from .hyperparameters import Generation, GemmaHyperparameters

ACTIVATION = "gelu_pytorch_tanh"
_KINDS = {"sliding_attention": "local", "full_attention": "global"}
_TYPES = {kind: layer_type for layer_type, kind in _KINDS.items()}


def read_hf_config(config: Mapping[str, Any], generation: Generation) -> dict[str, Any]:
    """Fields of GemmaHyperparameters. A model with a vision tower has those of its text in "text_config"."""
    text = HFConfig(text_of(config), generation.name, generation.defaults)
    text.only("hidden_activation", None, ACTIVATION)
    text.only("attention_bias", None, False)
    text.only("use_bidirectional_attention", None, False)
    # "gelu" is what the first files of Gemma 1 said, and they meant the approximation.
    fields = read_hf_decoder(text, (ACTIVATION, "gelu"), tied=True)
    kinds = _kinds(text, generation, fields["num_layers"])
    fields |= {
        "layer_kinds": kinds,
        "window": text.count("sliding_window") if "local" in kinds else 0,
        "query_scalar": fields["head_dim"],
        "qk_norm": generation.qk_norm,
        "post_norms": generation.post_norms,
    }
    if generation.period:
        fields["query_scalar"] = text.number("query_pre_attn_scalar")
        fields["final_softcap"] = text.number("final_logit_softcapping", 0.0)
    if generation.softcaps:
        fields["attn_softcap"] = text.number("attn_logit_softcapping", 0.0)
    else:
        text.only("attn_logit_softcapping", None)
    return fields | _rope(text, generation, fields)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    if text is None:
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    return {**text, **outer}


def _kinds(text: HFConfig, generation: Generation, num_layers: int) -> tuple[str, ...]:
    if not generation.period:
        return generation.kinds(num_layers)
    if generation.local_rope_base:
        period = text.count("sliding_window_pattern", generation.period)
    else:
        text.only("sliding_window_pattern", None, generation.period)
        period = generation.period
    default = [_TYPES[kind] for kind in generation.kinds(num_layers, period)]
    return tuple(_KINDS[each] for each in text.layer_types(tuple(_KINDS), num_layers, default))


def _rope(text: HFConfig, generation: Generation, fields: Mapping[str, Any]) -> dict[str, Any]:
    size = fields["head_dim"], fields["max_positions"]
    if not generation.local_rope_base:
        return text.rope(*size)
    by_type = text.get("rope_parameters") or {"full_attention": text.get("rope_scaling")}
    if unknown := by_type.keys() - _KINDS.keys():
        raise WeightError(
            f"config.json: rope_parameters has {', '.join(sorted(unknown))}; a {generation.name} model's are by layer "
            f"type: {', '.join(_KINDS)}"
        )
    both = {
        kind: HFConfig({"rope_parameters": by_type.get(layer_type), "rope_theta": text.get(key)}, generation.name)
        for layer_type, kind, key in (("full_attention", "global", "rope_theta"),
                                      ("sliding_attention", "local", "rope_local_base_freq"))
    }
    local = both["local"].rope(*size, base=generation.local_rope_base)
    if local["rope_scaling"] or local["rope_dims"] != fields["head_dim"]:
        given = by_type["sliding_attention"]
        raise WeightError(f"config.json: rope_parameters of sliding_attention are {given!r}; local layers are rotated "
                          "whole and unscaled here")
    return {**both["global"].rope(*size, base=1e6), "local_rope_base": local["rope_base"]}


def write_hf_config(h: GemmaHyperparameters, generation: Generation) -> dict[str, Any]:
    """Readable by transformers 4 and 5."""
    config = write_hf_decoder(h, generation.name, generation.architectures[0], ACTIVATION)
    config |= {"hidden_activation": ACTIVATION, "attention_bias": False, **write_hf_rope(h.rope)}
    if not generation.period:
        return config
    config |= {
        "layer_types": [_TYPES[kind] for kind in h.layer_kinds],
        "sliding_window": h.window or None,
        "query_pre_attn_scalar": int(h.query_scalar) if h.query_scalar == int(h.query_scalar) else h.query_scalar,
        "final_logit_softcapping": h.final_softcap or None,
        "attn_logit_softcapping": h.attn_softcap or None,
    }
    if generation.local_rope_base:
        period = period_of(h.layer_kinds, generation)
        config |= {"rope_local_base_freq": h.local_rope_base} | ({"sliding_window_pattern": period} if period else {})
    return config


def period_of(kinds: tuple[str, ...], generation: Generation) -> int | None:
    """Every how many layers one is global; None where they follow no such rule. What the generation usually has comes
    first: few layers may fit several."""
    for period in (generation.period, *range(1, len(kinds) + 2)):
        if generation.kinds(len(kinds), period) == kinds:
            return period
    return None
