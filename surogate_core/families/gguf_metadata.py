"""GGUF metadata of a decoder <-> hyperparameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..dsl.rope import RopeSpec, inverse_frequencies
from ..errors import WeightError
from .decoder import DecoderHyperparameters
from .rope_factors import LONGROPE_TENSORS, needs_factors

if TYPE_CHECKING:
    from ..weights.store import WeightStore


class GGUFMetadata:
    """The metadata of an opened GGUF file, keys below its architecture's prefix. Every method raises WeightError naming the key
    that is missing or cannot be honoured."""

    def __init__(self, store: WeightStore) -> None:
        self.store, self.arch = store, store.config["general.architecture"]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<key>``, which must be there where ``default`` is None."""
        value = self.store.config.get(f"{self.arch}.{key}", default)
        if value is None:
            raise WeightError(f"{self.store.path}: metadata lacks {self.arch}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero, one for all layers."""
        value = self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise WeightError(
                f"{self.store.path}: {self.arch}.{key} is {value!r}, not one number above zero for all layers"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.get(key, default))

    def rope(self, head_dim: int) -> dict[str, Any]:
        """Fields rope_base, rope_dims and rope_scaling."""
        dims = self.count("rope.dimension_count", head_dim)
        return {"rope_base": self.number("rope.freq_base", 10000.0), "rope_dims": dims, "rope_scaling": self._scaling(dims)}

    def _scaling(self, dims: int) -> dict[str, Any]:
        store, prefix = self.store, f"{self.arch}.rope.scaling."
        magnitude = float(store.config.get(prefix + "attn_factor", 1.0))
        if "rope_freqs.weight" in store:
            factors = store.get("rope_freqs.weight").to_f32()
            if factors.shape != (dims // 2,):
                raise WeightError(
                    f"{store.path}: rope_freqs.weight has shape {list(factors.shape)}; {dims // 2} pairs of dimensions are "
                    "rotated"
                )
            scaling = {"rope_type": "factors", "factors": tuple(float(f) for f in factors)}
            return scaling if magnitude == 1.0 else {**scaling, "attention_factor": magnitude}
        kind = store.config.get(prefix + "type", "none")
        original = int(store.config.get(prefix + "original_context_length", store.config[f"{self.arch}.context_length"]))
        if kind == "longrope" or any(name in store for name in LONGROPE_TENSORS.values()):
            sets = {key: tuple(store.get(name).to_f32().tolist()) for key, name in LONGROPE_TENSORS.items()}
            return {"rope_type": "longrope", **sets, "original_max_position_embeddings": original, "attention_factor": magnitude}
        if kind == "none":
            return {}
        if kind not in ("linear", "yarn"):
            raise WeightError(f"{store.path}: {prefix}type {kind!r} is not known; known are none, linear, yarn, longrope")
        if prefix + "factor" not in store.config:
            raise WeightError(f"{store.path}: metadata lacks {prefix}factor, which {prefix}type {kind!r} needs")
        scaling = {"rope_type": kind, "factor": float(store.config[prefix + "factor"])}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
            weight = float(store.config.get(prefix + "yarn_log_multiplier", 0.0))
            if magnitude != 1.0 or weight:
                usual, factor = _usual_yarn_magnitude, scaling["factor"]
                scaling["attention_factor"] = magnitude * usual(factor) / (usual(factor, weight) if weight else 1.0)
        return scaling


def read_gguf_decoder(metadata: GGUFMetadata) -> dict[str, Any]:
    """Fields of `DecoderHyperparameters`, rotary ones apart (see `GGUFMetadata.rope`)."""
    store, arch = metadata.store, metadata.arch
    if store.config.get(f"{arch}.expert_count", 0):
        raise WeightError(f"{store.path}: a mixture of experts ({arch}.expert_count); this family is dense")
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise WeightError(f"{store.path}: {arch}.attention.value_length differs from the keys' {head_dim}")
    return {
        "vocab_size": int(store.shape("token_embd.weight")[0]),
        "hidden_size": hidden,
        "num_layers": metadata.count("block_count"),
        "max_positions": metadata.count("context_length"),
        "tied": "output.weight" not in store,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_heads": heads,
        "num_kv_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
    }


def _usual_yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What llama.cpp multiplies cos and sin by unasked; its attn_factor comes on top, and a yarn_log_multiplier divides by the
    same with that weight."""
    return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0


def write_gguf_decoder(h: DecoderHyperparameters, arch: str) -> dict[str, Any]:
    """Metadata of a file of architecture ``arch``; frequencies that it has no words for are `rope_factor_tensors`."""
    return {
        "general.architecture": arch,
        f"{arch}.vocab_size": h.vocab_size,
        f"{arch}.context_length": h.max_positions,
        f"{arch}.embedding_length": h.hidden_size,
        f"{arch}.block_count": h.num_layers,
        f"{arch}.feed_forward_length": h.intermediate_size,
        f"{arch}.attention.head_count": h.num_heads,
        f"{arch}.attention.head_count_kv": h.num_kv_heads,
        f"{arch}.attention.key_length": h.head_dim,
        f"{arch}.attention.value_length": h.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": h.norm_eps,
        f"{arch}.rope.dimension_count": h.rope_dims,
        f"{arch}.rope.freq_base": h.rope_base,
        **_written_scaling(h.rope, f"{arch}.rope.scaling."),
    }


def _written_scaling(spec: RopeSpec, prefix: str) -> dict[str, Any]:
    magnitude = inverse_frequencies(spec)[1]
    metadata: dict[str, Any] = {}
    if spec.kind == "longrope":
        original = int(spec.scaling["original_max_position_embeddings"])
        metadata = {prefix + "type": spec.kind, prefix + "original_context_length": original}
    elif not needs_factors(spec) and spec.kind != "default":
        if spec.kind not in ("linear", "yarn"):
            raise WeightError(f"GGUF has no name for rotary scaling of type {spec.kind!r}")
        factor = float(spec.scaling["factor"])
        metadata |= {prefix + "type": spec.kind, prefix + "factor": factor}
        if spec.kind == "yarn":
            metadata[prefix + "original_context_length"] = int(spec.scaling["original_max_position_embeddings"])
            magnitude /= _usual_yarn_magnitude(factor)
    if abs(magnitude - 1) > 1e-6:
        metadata[prefix + "attn_factor"] = magnitude
    return metadata
