"""GGUF metadata of Gemma 4 <-> hyperparameters, and the frequency factors that say how global layers are rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from surogate_core.errors import WeightError
from surogate_core.families import GGUFMetadata, write_gguf_decoder

from .gemma4_model import Gemma4Hyperparameters

ARCH = "gemma4"
FACTORS = "rope_freqs.weight"
_STILL = 1e30
"""The factor of a frequency that turns nothing."""


def read_gguf_metadata(store) -> dict[str, Any]:
    """Fields of Gemma4Hyperparameters. WeightError naming the key that is missing or cannot be honoured."""
    metadata = GGUFMetadata(store)
    if store.config.get(f"{ARCH}.expert_count", 0):
        raise WeightError(f"{store.path}: a mixture of experts ({ARCH}.expert_count); this family is dense")
    layers = metadata.count("block_count")
    pattern = _by_layer(metadata, "attention.sliding_window_pattern", layers)
    types = tuple("local" if is_local else "global" for is_local in pattern)
    size = int(metadata.get("embedding_length_per_layer_input"))
    vocab = int(store.shape("token_embd.weight")[0])
    fields = {
        "vocab_size": vocab,
        "hidden_size": metadata.count("embedding_length"),
        "num_layers": layers,
        "max_positions": metadata.count("context_length"),
        "tied": "output.weight" not in store,
        "num_heads": metadata.count("attention.head_count"),
        "head_dim": metadata.count("attention.key_length_swa"),
        "global_head_dim": metadata.count("attention.key_length"),
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": types,
        "window": metadata.count("attention.sliding_window") if "local" in types else 0,
        "shared_layers": int(metadata.get("attention.shared_kv_layers", 0)),
        "per_layer_size": size,
        "per_layer_vocab": vocab if size else 0,
        "final_softcap": metadata.number("final_logit_softcapping", 0.0),
    }
    _check_shared(fields, str(store.path))
    return fields | _widths(metadata, fields) | _rope(metadata, fields)


def _by_layer(metadata: GGUFMetadata, key: str, layers: int) -> list[Any]:
    value = metadata.get(key)
    values = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value] * layers
    if len(values) != layers:
        raise WeightError(f"{metadata.store.path}: {ARCH}.{key} has {len(values)} values for {layers} layers")
    return values


def _widths(metadata: GGUFMetadata, fields: dict[str, Any]) -> dict[str, Any]:
    """What is said by layer: width of the MLP, and key heads."""
    types, own = fields["layer_types"], fields["num_layers"] - fields["shared_layers"]
    widths = _by_layer(metadata, "feed_forward_length", len(types))
    heads = _by_layer(metadata, "attention.head_count_kv", len(types))
    found = {kind: {int(n) for n, each in zip(heads, types) if each == kind} for kind in ("local", "global")}
    plain, shared = set(widths[:own]), set(widths[own:])
    fit = len(plain) == 1 and shared in (set(), plain, {2 * width for width in plain})
    if not fit or any(len(each) > 1 for each in found.values()):
        raise WeightError(f"{metadata.store.path}: {ARCH}.feed_forward_length may be twice as much in layers that share keys, "
                          f"and {ARCH}.attention.head_count_kv another number in global layers; they are {widths} and {heads}")
    kv_heads = (found["local"] or found["global"]).pop()
    return {
        "intermediate_size": int(widths[0]),
        "shared_width": 2 if shared - plain else 1,
        "num_kv_heads": kv_heads,
        "global_kv_heads": found["global"].pop() if found["global"] else kv_heads,
        "value_is_key": "global" in types and f"blk.{types.index('global')}.attn_v.weight" not in metadata.store,
    }


def _rope(metadata: GGUFMetadata, fields: dict[str, Any]) -> dict[str, Any]:
    store, width = metadata.store, fields["global_head_dim"]
    for key, whole in (("rope.dimension_count", width), ("rope.dimension_count_swa", fields["head_dim"])):
        if metadata.count(key, whole) != whole:
            raise WeightError(f"{store.path}: {ARCH}.{key} is {metadata.get(key)}, not the head's {whole}")
    bases = {"rope_base": metadata.number("rope.freq_base", 1e6), "local_rope_base": metadata.number("rope.freq_base_swa", 1e4)}
    factors = store.get(FACTORS).to_f32() if FACTORS in store else np.ones(width // 2, np.float32)
    turned = int((factors < _STILL / 10).sum())
    factor = float(factors[0]) if turned else 1.0
    share = 2 * turned / width
    if factors.shape != (width // 2,) or (factors[:turned] != factor).any() or int(share * width // 2) != turned:
        raise WeightError(f"{store.path}: {FACTORS} is not one factor of the first of {width // 2} frequencies and "
                          f"{_STILL:g} of the others")
    if share == 1 and factor == 1:
        return {**bases, "rope_dims": width, "rope_scaling": {}}
    more = {} if factor == 1 else {"factor": factor}
    return {**bases, "rope_dims": width,
            "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": share, **more}}


def _check_shared(h: dict[str, Any], where: str) -> None:
    """Readers take it that the last layers with keys of their own are a local and then a global one."""
    own = h["layer_types"][:h["num_layers"] - h["shared_layers"]]
    if h["shared_layers"] and own[-2:] != ("local", "global"):
        raise WeightError(f"{where}: the last two layers with keys of their own are {' and '.join(own[-2:])}; where layers share "
                          "keys, GGUF has a local and then a global one there")


def write_gguf_metadata(h: Gemma4Hyperparameters) -> dict[str, Any]:
    """WeightError for what readers of these files would not see."""
    _check_shared(vars(h), "this model")
    if h.per_layer_size and h.per_layer_vocab != h.vocab_size:
        raise WeightError(f"tables of {h.per_layer_vocab} tokens by layer, and {h.vocab_size} in all: GGUF has one number")
    own = h.intermediate_size
    shared = own * h.shared_width
    heads = {"local": h.num_kv_heads, "global": h.global_kv_heads}
    return {
        **write_gguf_decoder(replace(h, rope_scaling={}), ARCH),
        f"{ARCH}.feed_forward_length": [own] * h.own_layers + [shared] * h.shared_layers if shared != own else own,
        f"{ARCH}.attention.head_count_kv": [heads[each] for each in h.layer_types],
        f"{ARCH}.attention.key_length": h.global_head_dim,
        f"{ARCH}.attention.value_length": h.global_head_dim,
        f"{ARCH}.attention.key_length_swa": h.head_dim,
        f"{ARCH}.attention.value_length_swa": h.head_dim,
        f"{ARCH}.attention.sliding_window": h.window,
        f"{ARCH}.attention.sliding_window_pattern": [each == "local" for each in h.layer_types],
        f"{ARCH}.attention.shared_kv_layers": h.shared_layers,
        f"{ARCH}.embedding_length_per_layer_input": h.per_layer_size,
        f"{ARCH}.final_logit_softcapping": h.final_softcap,
        f"{ARCH}.rope.dimension_count_swa": h.head_dim,
        f"{ARCH}.rope.freq_base_swa": h.local_rope_base,
    }


def rope_factors(h: Gemma4Hyperparameters) -> np.ndarray:
    """float32 [global_head_dim / 2]: what each frequency of global layers is divided by."""
    pairs = h.global_head_dim // 2
    turned = int(float(h.rope_scaling.get("partial_rotary_factor", 1.0)) * h.global_head_dim // 2)
    factor = float(h.rope_scaling.get("factor") or 1.0)
    return np.where(np.arange(pairs) < turned, factor, _STILL).astype(np.float32)
