"""GGUF metadata of Gemma 1, 2 and 3 <-> hyperparameters.

Files do not say how queries are scaled, and those of Gemma 3 neither which layers are local nor how these are rotated:
readers know it of the architecture, and of the number of layers.
"""

from __future__ import annotations

from typing import Any

from surogate_core.errors import WeightError
from surogate_core.families import GGUFMetadata, read_gguf_decoder, write_gguf_decoder

from .hf_config import period_of
from .hyperparameters import Generation, GemmaHyperparameters


def read_gguf_metadata(store, generation: Generation) -> dict[str, Any]:
    """Fields of GemmaHyperparameters."""
    metadata = GGUFMetadata(store)
    fields = read_gguf_decoder(metadata)
    fields |= metadata.rope(fields["head_dim"])
    if fields["rope_dims"] != fields["head_dim"]:
        raise WeightError(f"{store.path}: {generation.gguf}.rope.dimension_count is {fields['rope_dims']}; all "
                          f"{fields['head_dim']} dimensions of a Gemma's heads are rotated")
    fields |= {"query_scalar": _query_scalar(fields, generation), "qk_norm": generation.qk_norm,
               "post_norms": generation.post_norms}
    if not generation.period:
        return fields | {"layer_kinds": generation.kinds(fields["num_layers"])}
    period = metadata.count("attention.sliding_window_pattern", generation.period)
    window = metadata.count("attention.sliding_window", generation.defaults["sliding_window"])
    kinds = generation.kinds(fields["num_layers"], period)
    fields |= {
        "layer_kinds": kinds,
        "window": window if "local" in kinds else 0,
        "final_softcap": metadata.number("final_logit_softcapping", _usual_softcap("final", generation)),
        "attn_softcap": metadata.number("attn_logit_softcapping", _usual_softcap("attn", generation)),
    }
    if generation.local_rope_base:
        fields["local_rope_base"] = metadata.number("rope.freq_base_swa", generation.local_rope_base)
    return fields


def _usual_softcap(which: str, generation: Generation) -> float:
    return generation.defaults.get(f"{which}_logit_softcapping", 0.0)


def _query_scalar(fields: dict[str, Any], generation: Generation) -> float:
    if fields["num_layers"] == generation.layers_of_27b:
        return float(fields["hidden_size"] // fields["num_heads"])
    return float(fields["head_dim"])


def write_gguf_metadata(h: GemmaHyperparameters, generation: Generation) -> dict[str, Any]:
    """WeightError for what readers of these files would not see."""
    usual = _query_scalar(vars(h), generation)
    if h.query_scalar != usual:
        raise WeightError(f"queries are scaled for a width of {h.query_scalar:g}; readers of GGUF take {usual:g}")
    if not h.tied and not generation.gguf_untied:
        raise WeightError(f"a head of its own: readers of GGUF give {generation.gguf} models the embedding's weight")
    arch = generation.gguf
    metadata = write_gguf_decoder(h, arch)
    if not generation.period:
        return metadata
    period = period_of(h.layer_kinds, generation)
    if period is None:
        raise WeightError("local and global layers follow no period, which GGUF has for them")
    metadata[f"{arch}.attention.sliding_window_pattern"] = period
    if h.window:
        metadata[f"{arch}.attention.sliding_window"] = h.window
    if generation.softcaps:
        metadata[f"{arch}.attn_logit_softcapping"] = h.attn_softcap
        metadata[f"{arch}.final_logit_softcapping"] = h.final_softcap
    elif h.final_softcap:
        raise WeightError(f"final_logit_softcapping {h.final_softcap:g}: readers of {arch} files in GGUF look for none")
    if generation.local_rope_base:
        metadata[f"{arch}.rope.freq_base_swa"] = h.local_rope_base
    return metadata
