"""GGUF metadata of the llama architecture <-> hyperparameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from surogate_core.dsl.rope import inverse_frequencies
from surogate_core.errors import WeightError

from .rope_factors import needs_factors

if TYPE_CHECKING:
    from .family import LlamaHyperparameters


def read_gguf_metadata(store) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError naming the key that is missing or cannot be honoured."""
    metadata = store.config
    arch = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise WeightError(f"{store.path}: metadata lacks {arch}.{key}")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = get(key, default)
        if not isinstance(value, int) or value < 1:
            raise WeightError(f"{store.path}: {arch}.{key} is {value!r}, not one number above zero for all layers")
        return value

    if metadata.get(f"{arch}.expert_count", 0):
        raise WeightError(f"{store.path}: a mixture of experts ({arch}.expert_count); this family is dense")
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads)
    dims = count("rope.dimension_count", head_dim)
    if dims != head_dim or count("attention.value_length", head_dim) != head_dim:
        raise WeightError(
            f"{store.path}: {arch}.rope.dimension_count {dims} and {arch}.attention.value_length must both be the head's "
            f"{head_dim}; how rows of q and k are ordered otherwise is not agreed on"
        )
    return {
        "vocab_size": int(store.shape("token_embd.weight")[0]),
        "hidden_size": hidden,
        "num_layers": count("block_count"),
        "max_positions": count("context_length"),
        "tied": "output.weight" not in store,
        "intermediate_size": count("feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in store,
        "mlp_bias": "blk.0.ffn_gate.bias" in store,
        "window": int(get("attention.sliding_window", 0)),
        "rope_base": float(get("rope.freq_base", 10000.0)),
        "rope_dims": dims,
        "rope_scaling": _rope_scaling(store, metadata, arch, dims),
    }


def _rope_scaling(store, metadata, arch: str, dims: int) -> dict[str, Any]:
    prefix = f"{arch}.rope.scaling."
    magnitude = float(metadata.get(prefix + "attn_factor", 1.0))
    if "rope_freqs.weight" in store:
        factors = store.get("rope_freqs.weight").to_f32()
        if factors.shape != (dims // 2,):
            raise WeightError(
                f"{store.path}: rope_freqs.weight has shape {list(factors.shape)}; {dims // 2} pairs of dimensions are rotated"
            )
        scaling = {"rope_type": "factors", "factors": tuple(float(f) for f in factors)}
        return scaling if magnitude == 1.0 else {**scaling, "attention_factor": magnitude}
    kind = metadata.get(prefix + "type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise WeightError(f"{store.path}: {prefix}type {kind!r} is not known; known are none, linear, yarn")
    if prefix + "factor" not in metadata:
        raise WeightError(f"{store.path}: metadata lacks {prefix}factor, which {prefix}type {kind!r} needs")
    scaling = {"rope_type": kind, "factor": float(metadata[prefix + "factor"])}
    if kind == "yarn":
        original = metadata.get(prefix + "original_context_length", metadata[f"{arch}.context_length"])
        scaling["original_max_position_embeddings"] = int(original)
        if magnitude != 1.0:
            scaling["attention_factor"] = magnitude * _usual_yarn_magnitude(scaling["factor"])
    return scaling


def _usual_yarn_magnitude(factor: float) -> float:
    """What llama.cpp multiplies cos and sin by unasked; its attn_factor comes on top."""
    return 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0


def write_gguf_metadata(h: LlamaHyperparameters) -> dict[str, Any]:
    """The file is of architecture "llama" for Mistral too: to GGUF readers they are one, and llama.cpp does not look at the
    window, so there a text longer than it is attended to in full. WeightError for what GGUF cannot say."""
    if h.rope_dims != h.head_dim:
        raise WeightError(f"{h.rope_dims} of {h.head_dim} rotated dimensions: GGUF has no agreed order of rows for that")
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.vocab_size": h.vocab_size,
        "llama.context_length": h.max_positions,
        "llama.embedding_length": h.hidden_size,
        "llama.block_count": h.num_layers,
        "llama.feed_forward_length": h.intermediate_size,
        "llama.attention.head_count": h.num_heads,
        "llama.attention.head_count_kv": h.num_kv_heads,
        "llama.attention.key_length": h.head_dim,
        "llama.attention.value_length": h.head_dim,
        "llama.attention.layer_norm_rms_epsilon": h.norm_eps,
        "llama.rope.dimension_count": h.rope_dims,
        "llama.rope.freq_base": h.rope_base,
    }
    if h.window:
        metadata["llama.attention.sliding_window"] = h.window
    return metadata | _written_scaling(h)


def _written_scaling(h: LlamaHyperparameters) -> dict[str, Any]:
    kind, prefix = h.rope.kind, "llama.rope.scaling."
    magnitude = inverse_frequencies(h.rope)[1]
    metadata: dict[str, Any] = {}
    if not needs_factors(h.rope) and kind != "default":
        factor = float(h.rope_scaling["factor"])
        metadata |= {prefix + "type": kind, prefix + "factor": factor}
        if kind == "yarn":
            metadata[prefix + "original_context_length"] = int(h.rope_scaling["original_max_position_embeddings"])
            magnitude /= _usual_yarn_magnitude(factor)
    if abs(magnitude - 1) > 1e-6:
        metadata[prefix + "attn_factor"] = magnitude
    return metadata
