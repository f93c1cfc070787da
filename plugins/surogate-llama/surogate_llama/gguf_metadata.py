"""GGUF metadata of the llama architecture <-> hyperparameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError

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

    if int(metadata.get(f"{arch}.expert_count", 0)):
        raise WeightError(f"{store.path}: a mixture of experts ({arch}.expert_count); this family is dense")
    hidden, heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", hidden // heads))
    return {
        "vocab_size": int(store.shape("token_embd.weight")[0]),
        "hidden_size": hidden,
        "num_layers": int(get("block_count")),
        "max_positions": int(get("context_length")),
        "tied": "output.weight" not in store,
        "intermediate_size": int(get("feed_forward_length")),
        "num_heads": heads,
        "num_kv_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "norm_eps": float(get("attention.layer_norm_rms_epsilon")),
        "attention_bias": "blk.0.attn_q.bias" in store,
        "mlp_bias": "blk.0.ffn_gate.bias" in store,
        "window": int(get("attention.sliding_window", 0)),
        "rope_base": float(get("rope.freq_base", 10000.0)),
        "rope_dims": int(get("rope.dimension_count", head_dim)),
        "rope_scaling": _rope_scaling(store, metadata, arch),
    }


def _rope_scaling(store, metadata, arch: str) -> dict[str, Any]:
    if "rope_freqs.weight" in store:
        factors = store.get("rope_freqs.weight").data
        return {"rope_type": "factors", "factors": tuple(float(f) for f in factors)}
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise WeightError(f"{store.path}: {arch}.rope.scaling.type {kind!r} is not known; known are none, linear, yarn")
    scaling = {"rope_type": kind, "factor": float(metadata[f"{arch}.rope.scaling.factor"])}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def write_gguf_metadata(h: LlamaHyperparameters) -> dict[str, Any]:
    """The file is of architecture "llama" for Mistral too: to GGUF readers they are one."""
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
    kind = h.rope_scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        metadata["llama.rope.scaling.type"] = kind
        metadata["llama.rope.scaling.factor"] = float(h.rope_scaling["factor"])
        original = h.rope_scaling.get("original_max_position_embeddings")
        if original:
            metadata["llama.rope.scaling.original_context_length"] = int(original)
    return metadata
