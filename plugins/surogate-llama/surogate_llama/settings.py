"""config.json and GGUF metadata of Llama and its relatives <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError
from surogate_core.families import (
    GGUFMetadata, HFConfig, read_gguf_decoder, read_hf_decoder, write_gguf_decoder, write_hf_decoder, write_hf_rope,
)

from .layers import gguf_kinds, read_layers, write_layers
from .switches import Switches

if TYPE_CHECKING:
    from .family import LlamaFamily, LlamaHyperparameters

BIASES = ("qkv_bias", "out_bias", "mlp_bias")


def read_hf(config: Mapping[str, Any], model_type: str, switches: Switches) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError for a missing key or a setting that this family does not have."""
    settings = HFConfig({**switches.defaults, **config}, model_type)
    for key in ("attention_bias", "mlp_bias"):
        if key not in switches.biases:
            settings.only(key, None, False)
    for key, values in switches.only.items():
        settings.only(key, *values)
    fields = read_hf_decoder(settings)
    scales = switches.multipliers.read(settings, fields) if switches.multipliers else {}
    biases = {name: key is not None and settings.flag(key) for name, key in zip(BIASES, switches.biases, strict=True)}
    return {
        **fields,
        **settings.rope(fields["head_dim"], fields["max_positions"], base=switches.rope_base),
        **read_layers(settings, switches, fields["num_layers"]),
        **biases,
        **scales,
        "interleaved": switches.interleaved,
    }


def write_hf(h: LlamaHyperparameters, family: LlamaFamily) -> dict[str, Any]:
    """WeightError for what the family's architecture cannot say."""
    switches = family.switches
    config = write_hf_decoder(h, family.name, family.architectures[0])
    said: dict[str, bool] = {}
    for name, key in zip(BIASES, switches.biases, strict=True):
        if said.setdefault(key, getattr(h, name)) != getattr(h, name) or (key is None and getattr(h, name)):
            raise WeightError(f"{family.architectures[0]} has no setting for a model with this {name}")
    config |= {key: value for key, value in said.items() if key is not None}
    if switches.multipliers:
        config |= switches.multipliers.write(h)
    if "rope_scaling" in switches.defaults:  # so that leaving it out would mean something else
        config["rope_scaling"] = {"rope_type": "default"}
    return {**config, **write_layers(h, family), **write_hf_rope(h.rope)}


def read_gguf(store, switches: Switches) -> dict[str, Any]:
    """Fields of LlamaHyperparameters. WeightError naming the key that is missing or cannot be honoured."""
    metadata = GGUFMetadata(store)
    fields = read_gguf_decoder(metadata)
    rope = metadata.rope(fields["head_dim"])
    if rope["rope_dims"] != fields["head_dim"]:
        raise WeightError(
            f"{store.path}: {metadata.arch}.rope.dimension_count {rope['rope_dims']} must be the head's "
            f"{fields['head_dim']}; how rows of q and k are ordered otherwise is not agreed on"
        )
    if switches.gguf == "granite" and not metadata.get("rope.scaling.finetuned", True):
        raise WeightError(f"{store.path}: granite.rope.scaling.finetuned is false: a model without positions")
    window = int(metadata.get("attention.sliding_window", 0))
    scales = switches.multipliers.gguf if switches.multipliers else {}
    return {
        **fields,
        **rope,
        **{field: metadata.number(key) for field, key in scales.items()},
        "qkv_bias": "blk.0.attn_q.bias" in store,
        "out_bias": "blk.0.attn_output.bias" in store,
        "mlp_bias": "blk.0.ffn_gate.bias" in store,
        "interleaved": switches.interleaved,
        "window": window,
        "kinds": gguf_kinds(switches, window, fields["num_layers"]),
    }


def write_gguf(h: LlamaHyperparameters, switches: Switches) -> dict[str, Any]:
    """The file is of architecture "llama" for Mistral too: to GGUF readers they are one, and llama.cpp does not look at the
    window, so there a text longer than it is attended to in full. WeightError for what GGUF cannot say."""
    arch = switches.gguf
    if h.rope_dims != h.head_dim:
        raise WeightError(f"{h.rope_dims} of {h.head_dim} rotated dimensions: GGUF has no agreed order of rows for that")
    if h.kinds != gguf_kinds(switches, h.window, h.num_layers) or (h.window and arch != "llama"):
        raise WeightError(
            f"GGUF files of architecture {arch!r} cannot say which layers have a window or no positions; this model has "
            f"{', '.join(h.kinds)}",
            "Export as safetensors.",
        )
    metadata = write_gguf_decoder(h, arch)
    if h.window:
        metadata[f"{arch}.attention.sliding_window"] = h.window
    for name, key in (switches.multipliers.gguf if switches.multipliers else {}).items():
        metadata[f"{arch}.{key}"] = getattr(h, name)
    return metadata
