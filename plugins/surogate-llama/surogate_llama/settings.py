"""config.json and GGUF metadata of Llama and Mistral <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError
from surogate_core.families import (
    GGUFMetadata, HFConfig, read_gguf_decoder, read_hf_decoder, write_gguf_decoder, write_hf_decoder, write_hf_rope,
)

if TYPE_CHECKING:
    from .family import LlamaHyperparameters

# What transformers takes for a key that a config.json leaves out. A model_type that is not here is one of Llama's relatives.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}


def read_hf(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError for a missing key or a setting that this family does not have."""
    settings = HFConfig(config, model_type, _DEFAULTS.get(model_type, _DEFAULTS["llama"]))
    if model_type == "mistral":
        settings.only("attention_bias", None, False)
        settings.only("mlp_bias", None, False)
    else:
        settings.only("sliding_window", None)
    fields = read_hf_decoder(settings)
    return {
        **fields,
        **settings.rope(fields["head_dim"], fields["max_positions"]),
        "attention_bias": settings.flag("attention_bias"),
        "mlp_bias": settings.flag("mlp_bias"),
        "window": settings.count("sliding_window") if settings.get("sliding_window") else 0,
    }


def write_hf(h: LlamaHyperparameters, model_type: str) -> dict[str, Any]:
    """A model with a sliding window is written as Mistral, which has one. WeightError for what neither architecture can say."""
    if h.window and (h.attention_bias or h.mlp_bias):
        raise WeightError("a model with both a sliding window and biases is neither LlamaForCausalLM nor MistralForCausalLM")
    if model_type == "mistral" or h.window > 0:
        own = {**write_hf_decoder(h, "mistral", "MistralForCausalLM"), "sliding_window": h.window or None}
    else:
        biases = {"attention_bias": h.attention_bias, "mlp_bias": h.mlp_bias}
        own = {**write_hf_decoder(h, "llama", "LlamaForCausalLM"), **biases}
    return {**own, **write_hf_rope(h.rope)}


def read_gguf(store) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError naming the key that is missing or cannot be honoured."""
    metadata = GGUFMetadata(store)
    fields = read_gguf_decoder(metadata)
    rope = metadata.rope(fields["head_dim"])
    if rope["rope_dims"] != fields["head_dim"]:
        raise WeightError(
            f"{store.path}: {metadata.arch}.rope.dimension_count {rope['rope_dims']} must be the head's {fields['head_dim']}; "
            "how rows of q and k are ordered otherwise is not agreed on"
        )
    return {
        **fields,
        **rope,
        "attention_bias": "blk.0.attn_q.bias" in store,
        "mlp_bias": "blk.0.ffn_gate.bias" in store,
        "window": int(metadata.get("attention.sliding_window", 0)),
    }


def write_gguf(h: LlamaHyperparameters) -> dict[str, Any]:
    """The file is of architecture "llama" for Mistral too: to GGUF readers they are one, and llama.cpp does not look at the
    window, so there a text longer than it is attended to in full. WeightError for what GGUF cannot say."""
    if h.rope_dims != h.head_dim:
        raise WeightError(f"{h.rope_dims} of {h.head_dim} rotated dimensions: GGUF has no agreed order of rows for that")
    metadata = write_gguf_decoder(h, "llama")
    if h.window:
        metadata["llama.attention.sliding_window"] = h.window
    return metadata
