"""The family of Gemma 4, text, dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate_core.dsl import Family, Model
from surogate_core.families import GGUF_NORMS, gguf_decoder_names, hf_decoder_names
from surogate_core.weights.name_map import NameMap, Rule
from surogate_core.weights.transforms import Split

from .gemma import GGUF_POST_NORMS, GGUF_QK_NORMS, HF_POST_NORMS, HF_QK_NORMS, TEXT_PREFIXES
from .gemma4_model import Gemma4, Gemma4Hyperparameters

_OWN = ("attn.k.", "attn.v.", "attn.k_norm.")


class Gemma4Family(Family):
    """``name`` is also the model_type of the config.json that it reads. GGUF files are of one architecture, whichever it was."""

    def __init__(self, name: str, architecture: str, gguf_architectures: tuple[str, ...]) -> None:
        self.name, self.gguf_architectures = name, gguf_architectures
        self.architectures = (f"{architecture}ForCausalLM", f"{architecture}ForConditionalGeneration")
        # A model that sees and hears is read as its text: other tensors are let be, and what is written is a text model.
        self.hf_prefixes = {prefix: "model." for prefix in TEXT_PREFIXES}

    def from_hf(self, config: Mapping[str, Any]) -> Gemma4Hyperparameters:
        from .gemma4_hf import read_hf_config

        return Gemma4Hyperparameters(**read_hf_config(config, self.name))

    def from_gguf(self, store) -> Gemma4Hyperparameters:
        from .gemma4_gguf import read_gguf_metadata

        return Gemma4Hyperparameters(**read_gguf_metadata(store))

    def model(self, hyperparameters: Gemma4Hyperparameters) -> Model:
        return Gemma4(hyperparameters)

    def hf_names(self, hyperparameters: Gemma4Hyperparameters) -> NameMap:
        norms = {**HF_POST_NORMS, **HF_QK_NORMS, "per_layer.norm": "post_per_layer_input_norm"}
        return _of_own_layers(hyperparameters, hf_decoder_names(norms, more=[
            *_whole_tables(hyperparameters, "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection.weight"),
            Rule("per_layer_norm.weight", "model.per_layer_projection_norm.weight"),
            Rule("layers.{layer}.per_layer.gate.weight", "model.layers.{layer}.per_layer_input_gate.weight"),
            Rule("layers.{layer}.per_layer.out.weight", "model.layers.{layer}.per_layer_projection.weight"),
            Rule("layers.{layer}.scalar.weight", "model.layers.{layer}.layer_scalar"),
        ]))

    def gguf_names(self, hyperparameters: Gemma4Hyperparameters) -> NameMap:
        norms = {**GGUF_NORMS, **GGUF_POST_NORMS, **GGUF_QK_NORMS, "per_layer.norm": "post_norm"}
        return _of_own_layers(hyperparameters, gguf_decoder_names(norms, more=[
            *_whole_tables(hyperparameters, "per_layer_token_embd.weight", "per_layer_model_proj.weight"),
            Rule("per_layer_norm.weight", "per_layer_proj_norm.weight"),
            Rule("layers.{layer}.per_layer.gate.weight", "blk.{layer}.inp_gate.weight"),
            Rule("layers.{layer}.per_layer.out.weight", "blk.{layer}.proj.weight"),
            Rule("layers.{layer}.scalar.weight", "blk.{layer}.layer_output_scale.weight"),
        ]))

    def hf_config(self, hyperparameters: Gemma4Hyperparameters) -> dict[str, Any]:
        from .gemma4_hf import write_hf_config

        return write_hf_config(hyperparameters, self.name, self.architectures[0])

    def gguf_metadata(self, hyperparameters: Gemma4Hyperparameters) -> dict[str, Any]:
        from .gemma4_gguf import write_gguf_metadata

        return write_gguf_metadata(hyperparameters)

    def gguf_extra_tensors(self, hyperparameters: Gemma4Hyperparameters) -> dict[str, np.ndarray]:
        from .gemma4_gguf import FACTORS, rope_factors

        return {FACTORS: rope_factors(hyperparameters)}

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        from .gemma4_tiny import VARIANTS

        return VARIANTS[self.name]


def _whole_tables(h: Gemma4Hyperparameters, embed: str, mix: str) -> list[Rule]:
    """Files hold what the layers have of their own side by side: columns of one table, rows of one matrix."""
    if not h.per_layer_size:
        return []
    sizes = (h.per_layer_size,) * h.num_layers
    return [Rule(tuple(f"layers.{i}.per_layer.{part}.weight" for i in range(h.num_layers)), file, Split(axis, sizes))
            for part, file, axis in (("embed", embed, 1), ("mix", mix, 0))]


def _of_own_layers(h: Gemma4Hyperparameters, names: NameMap) -> NameMap:
    """Files may hold keys and values for layers that have none, left from before these were shared: no rule knows them."""
    rules = []
    for rule in names.rules:
        if any(own in rule.params[0] for own in _OWN):
            layers = [str(i) for i in range(h.own_layers)]
            rules += [Rule(rule.param_names({"layer": i}), rule.file_names({"layer": i}), rule.transform, rule.optional)
                      for i in layers]
        else:
            rules.append(rule)
    return NameMap(rules, names.tied)


FAMILIES = (Gemma4Family("gemma4_text", "Gemma4", ("gemma4",)), Gemma4Family("gemma4_unified_text", "Gemma4Unified", ()))
