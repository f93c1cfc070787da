"""config.json of Llama and Mistral <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.dsl.rope import RopeSpec, inverse_frequencies
from surogate_core.errors import WeightError

from .rope_factors import llama3_of_factors

if TYPE_CHECKING:
    from .family import LlamaHyperparameters

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# What transformers takes for a key that a config.json leaves out. A model_type that is not here is one of Llama's relatives.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "sliding_window": None, "attention_bias": False, "mlp_bias": False},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}
# Keys that change the arithmetic in a way this architecture does not have, and the values that mean "not so".
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (None, 1),
    "attention_dropout": (None, 0, 0.0),
    "quantization_config": (None,),
}
_ONLY_OF = {
    "llama": {"sliding_window": (None,)},
    "mistral": {"attention_bias": (None, False), "mlp_bias": (None, False)},
}


def read_hf_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError for a missing key or a setting that this family does not have."""

    def count(key: str, default: int | None = None) -> int:
        value = default if settings.get(key) is None else settings[key]
        if value is None:
            raise WeightError(f"config.json lacks {key!r}, which a {model_type} model needs")
        if type(value) is not int or value < 1:
            raise WeightError(f"config.json: {key} is {value!r}, not a whole number above zero")
        return value

    settings = {**_DEFAULTS.get(model_type, _DEFAULTS["llama"]), **config}
    for key, values in {**_ONLY, **_ONLY_OF.get(model_type, _ONLY_OF["llama"])}.items():
        if key in config and config[key] not in values:
            expected = " or ".join(repr(value) for value in values)
            raise WeightError(f"config.json: {key} is {config[key]!r}; a {model_type} model here can only have {expected}")
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    head_dim = count("head_dim", hidden // heads)
    num_kv_heads = count("num_key_value_heads", heads)
    if heads % num_kv_heads:
        raise WeightError(f"config.json: {heads} num_attention_heads cannot share {num_kv_heads} num_key_value_heads evenly")
    max_positions = count("max_position_embeddings")
    rope = _rope(config, max_positions)
    partial = float(rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0)
    fields = {
        "vocab_size": count("vocab_size"),
        "hidden_size": hidden,
        "num_layers": count("num_hidden_layers"),
        "max_positions": max_positions,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "intermediate_size": count("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "window": int(settings["sliding_window"] or 0),
        "rope_base": float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0),
        "rope_dims": int(head_dim * partial),
        "rope_scaling": rope if rope["rope_type"] != "default" else {},
        "init_std": float(config.get("initializer_range", 0.02)),
    }
    _check_rope(fields)
    return fields


def _rope(config: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """"rope_parameters" (transformers 5) or "rope_scaling" (before), with "rope_type" spelled so."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(key) or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise WeightError(f"config.json: {key} differs by layer ({', '.join(rope)}), which this architecture does not have")
    older = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or older or "default"
    if rope["rope_type"] not in ROPE_TYPES:
        raise WeightError(
            f"config.json: {key} has rope_type {rope['rope_type']!r}, which is not known here; known are {', '.join(ROPE_TYPES)}"
        )
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", max_positions)
    return rope


def _check_rope(fields: Mapping[str, Any]) -> None:
    if fields["head_dim"] % 2 or fields["rope_dims"] % 2 or not 0 < fields["rope_dims"] <= fields["head_dim"]:
        raise WeightError(f"config.json: {fields['rope_dims']} of {fields['head_dim']} dimensions cannot be rotated in pairs")
    spec = RopeSpec(fields["head_dim"], fields["rope_base"], fields["rope_dims"], fields["rope_scaling"], fields["max_positions"])
    try:
        inverse_frequencies(spec)
    except (ValueError, TypeError) as error:
        raise WeightError(f"config.json: {error}") from error


def write_hf_config(h: LlamaHyperparameters, model_type: str) -> dict[str, Any]:
    """Readable by transformers 4 and 5: "rope_theta" and "rope_scaling" are the spelling that both know. A model with a
    sliding window is written as Mistral, which has one. WeightError for what neither architecture can say."""
    if h.window and (h.attention_bias or h.mlp_bias):
        raise WeightError("a model with both a sliding window and biases is neither LlamaForCausalLM nor MistralForCausalLM")
    is_mistral = model_type == "mistral" or h.window > 0
    model_type, architecture = ("mistral", "MistralForCausalLM") if is_mistral else ("llama", "LlamaForCausalLM")
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
    if is_mistral:
        config["sliding_window"] = h.window or None
    else:
        config |= {"attention_bias": h.attention_bias, "mlp_bias": h.mlp_bias}
    if h.rope_dims != h.head_dim:
        config["partial_rotary_factor"] = h.rope_dims / h.head_dim
    if h.rope_scaling:
        config["rope_scaling"] = _rope_scaling(h)
    return config


def _rope_scaling(h: LlamaHyperparameters) -> dict[str, Any]:
    if h.rope_scaling["rope_type"] != "factors":
        return dict(h.rope_scaling)
    found = llama3_of_factors(h.rope)
    if found is None:
        raise WeightError(
            "the rotary frequency factors of this model (rope_freqs.weight in its GGUF) are not those of a Llama 3 scaling, "
            "so config.json cannot name them",
            "Export it to GGUF, which keeps the factors.",
        )
    return found
