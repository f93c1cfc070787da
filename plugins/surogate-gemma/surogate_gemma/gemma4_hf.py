"""config.json of Gemma 4 <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.errors import WeightError
from surogate_core.families import HFConfig, read_hf_decoder, write_hf_decoder

from .gemma4_model import Gemma4Hyperparameters
from .hf_config import ACTIVATION, text_of

_TYPES = {"local": "sliding_attention", "global": "full_attention"}
_KINDS = {layer_type: kind for kind, layer_type in _TYPES.items()}
_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
         "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}
# What transformers takes for a key that a config.json leaves out.
_COMMON: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "rope_parameters": _ROPE,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_text": {**_COMMON, "max_position_embeddings": 131072, "sliding_window": 512, "vocab_size_per_layer_input": 262144,
                    "hidden_size_per_layer_input": 256},
    "gemma4_unified_text": {**_COMMON, "max_position_embeddings": 262144, "sliding_window": 1024},
}
_OF_LAYERS = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
"""Keys that a unified model doesn't have."""


def read_hf_config(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of Gemma4Hyperparameters. A model that sees and hears has those of its text in "text_config"."""
    text = HFConfig(text_of(config), model_type, _DEFAULTS[model_type])
    text.only("hidden_activation", None, ACTIVATION)
    text.only("attention_bias", None, False)
    text.only("use_bidirectional_attention", None, "vision")  # which is of tokens of images
    text.only("enable_moe_block", None, False)
    if "hidden_size_per_layer_input" not in text.defaults:
        text.only("hidden_size_per_layer_input", None, 0)
    fields = read_hf_decoder(text, (ACTIVATION,), tied=True)
    types = _layer_types(text, fields["num_layers"])
    size = text.get("hidden_size_per_layer_input")
    fields |= {
        "layer_types": types,
        "window": text.count("sliding_window") if "local" in types else 0,
        "value_is_key": text.flag("attention_k_eq_v"),
        "shared_layers": _shared_layers(text, types),
        "shared_width": 2 if text.flag("use_double_wide_mlp") else 1,
        "per_layer_size": text.count("hidden_size_per_layer_input") if size else 0,
        "per_layer_vocab": text.count("vocab_size_per_layer_input") if size else 0,
        "final_softcap": text.number("final_logit_softcapping", 0.0),
    }
    if size and fields["per_layer_vocab"] < fields["vocab_size"]:
        raise WeightError(f"config.json: vocab_size_per_layer_input {fields['per_layer_vocab']} is less than vocab_size")
    fields |= _global_heads(text, fields)
    return fields | _rope(text, fields)


def _layer_types(text: HFConfig, num_layers: int) -> tuple[str, ...]:
    default = [_TYPES["global" if (i + 1) % 6 == 0 else "local"] for i in range(num_layers)]
    types = [_KINDS[each] for each in text.layer_types(tuple(_KINDS), num_layers, default)]
    return (*types[:-1], "global")  # whatever the file says of the last one


def _shared_layers(text: HFConfig, types: tuple[str, ...]) -> int:
    shared = text.get("num_kv_shared_layers", 0)
    own = types[:len(types) - shared] if type(shared) is int and 0 <= shared <= len(types) else ()
    if not set(types) <= set(own):
        raise WeightError(f"config.json: num_kv_shared_layers is {shared!r}: of each type of layer, one at least must be before "
                          "those that share its keys and values")
    return shared


def _global_heads(text: HFConfig, fields: Mapping[str, Any]) -> dict[str, int]:
    """Head width and key heads of global layers: by name, or as transformers 5 writes them, by layer."""
    local = fields["head_dim"], fields["num_kv_heads"]
    if text.get("per_layer_config") is not None:
        width, heads = _of_global_layers(text.get("per_layer_config"), fields["layer_types"], local)
    else:
        width = text.count("global_head_dim")
        heads = text.count("num_global_key_value_heads", local[1]) if fields["value_is_key"] else local[1]
    if fields["num_heads"] % heads:
        raise WeightError(f"config.json: {fields['num_heads']} heads cannot share {heads} key heads of global layers evenly")
    return {"global_head_dim": width, "global_kv_heads": heads}


def _of_global_layers(
    by_layer: Mapping[str, Mapping[str, int]], types: tuple[str, ...], local: tuple[int, int]
) -> tuple[int, int]:
    """Head width and key heads, where layers that nothing is said of have the ``local`` ones. Layers are numbered "5" or "05"."""
    by_number = {int(number): each for number, each in by_layer.items() if str(number).isdecimal()}
    said = [by_number.get(i, {}) for i in range(len(types))]
    found = {kind: {(each.get("head_dim", local[0]), each.get("num_key_value_heads", local[1]))
                    for each, own in zip(said, types) if own == kind} for kind in _TYPES}
    known = all(set(each) <= {"head_dim", "num_key_value_heads"} for each in said) and len(by_layer) == sum(map(bool, said))
    if not known or not found["local"] <= {local} or len(found["global"]) > 1:
        raise WeightError("config.json: per_layer_config may say head_dim and num_key_value_heads of all full_attention layers "
                          "alike, and nothing else")
    return found["global"].pop()


def _rope(text: HFConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    by_type = text.get("rope_parameters")
    found = {}
    for kind, width in (("local", fields["head_dim"]), ("global", fields["global_head_dim"])):
        if not isinstance(by_type.get(_TYPES[kind]), Mapping):
            raise WeightError(f"config.json: rope_parameters says nothing of {_TYPES[kind]}")
        own = HFConfig({"rope_parameters": by_type[_TYPES[kind]]}, text.model_type)
        found[kind] = own.rope(width, fields["max_positions"])
    plain = {kind: each["rope_scaling"].get("rope_type", "default") for kind, each in found.items()}
    if plain["local"] != "default" or plain["global"] not in ("default", "proportional"):
        raise WeightError(f"config.json: rope_parameters has rope_type {plain['local']!r} and {plain['global']!r}; here local "
                          "layers have 'default' and global ones 'default' or 'proportional'")
    if found["local"]["rope_dims"] != fields["head_dim"] or found["global"]["rope_dims"] != fields["global_head_dim"]:
        raise WeightError("config.json: partial_rotary_factor is of rope_type 'proportional' alone")
    return {**found["global"], "local_rope_base": found["local"]["rope_base"]}


def write_hf_config(h: Gemma4Hyperparameters, model_type: str, architecture: str) -> dict[str, Any]:
    """Readable by transformers 5. WeightError for what it has no words for."""
    if h.global_kv_heads != h.num_kv_heads and not h.value_is_key:
        raise WeightError("key heads of global layers differ in number, which config.json can only say where keys are values")
    plain = {"rope_type": "default", **h.rope_scaling}
    config = {
        **write_hf_decoder(h, model_type, architecture, ACTIVATION),
        "hidden_activation": ACTIVATION,
        "attention_bias": False,
        "layer_types": [_TYPES[each] for each in h.layer_types],
        "sliding_window": h.window or _DEFAULTS[model_type]["sliding_window"],
        "global_head_dim": h.global_head_dim,
        "num_global_key_value_heads": h.global_kv_heads if h.value_is_key else None,
        "attention_k_eq_v": h.value_is_key,
        "num_kv_shared_layers": h.shared_layers,
        "use_double_wide_mlp": h.shared_width == 2,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": h.per_layer_size,
        "vocab_size_per_layer_input": h.per_layer_vocab,
        "final_logit_softcapping": h.final_softcap or None,
        "rope_parameters": {_TYPES["local"]: {"rope_type": "default", "rope_theta": h.local_rope_base},
                            _TYPES["global"]: {**plain, "rope_theta": h.rope_base}},
    }
    known = _DEFAULTS[model_type]
    return {key: value for key, value in config.items() if key not in _OF_LAYERS or "hidden_size_per_layer_input" in known}
