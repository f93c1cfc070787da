"""config.json of Llama and Mistral <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError

if TYPE_CHECKING:
    from .family import LlamaHyperparameters


def read_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError for a missing key or a setting that this family does not have."""

    def need(key: str) -> Any:
        if config.get(key) is None:
            raise WeightError(f"config.json lacks {key!r}, which a Llama model needs")
        return config[key]

    if config.get("hidden_act", "silu") != "silu":
        raise WeightError(f"config.json: hidden_act {config['hidden_act']!r} is not a Llama activation; expected 'silu'")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise WeightError("config.json: pretraining_tp other than 1 changes the arithmetic and is not supported")
    hidden, heads = need("hidden_size"), need("num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    rope = _rope(config)
    partial = float(rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    return {
        "vocab_size": need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": need("num_hidden_layers"),
        "max_positions": config.get("max_position_embeddings", 2048),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "intermediate_size": need("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "window": int(config.get("sliding_window") or 0),
        "rope_base": float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0),
        "rope_dims": int(head_dim * partial),
        "rope_scaling": rope if rope.get("rope_type", rope.get("type", "default")) != "default" else {},
        "init_std": float(config.get("initializer_range", 0.02)),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """"rope_parameters" (transformers 5) or "rope_scaling" (before), with "rope_type" spelled so."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    return rope


def write_hf_config(h: LlamaHyperparameters, model_type: str, architecture: str) -> dict[str, Any]:
    """Readable by transformers 4 and 5: the rotary base is given in both spellings."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": h.vocab_size,
        "hidden_size": h.hidden_size,
        "intermediate_size": h.intermediate_size,
        "num_hidden_layers": h.num_layers,
        "num_attention_heads": h.num_heads,
        "num_key_value_heads": h.num_kv_heads,
        "head_dim": h.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": h.max_positions,
        "rms_norm_eps": h.norm_eps,
        "rope_theta": h.rope_base,
        "tie_word_embeddings": h.tied,
        "initializer_range": h.init_std,
        "use_cache": True,
    }
    if model_type == "llama":
        config |= {"attention_bias": h.attention_bias, "mlp_bias": h.mlp_bias}
    else:
        config["sliding_window"] = h.window or None
    if h.rope_scaling:
        config["rope_scaling"] = dict(h.rope_scaling)
    return config
