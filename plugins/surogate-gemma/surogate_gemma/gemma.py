"""The families of Gemma 1, 2 and 3, text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate_core.dsl import Family, Model
from surogate_core.families import GGUF_NORMS, HF_NORMS, gguf_decoder_names, hf_decoder_names, rope_factor_tensors
from surogate_core.weights.name_map import NameMap
from surogate_core.weights.transforms import AddOne

from .hyperparameters import GEMMA_1, GEMMA_2, GEMMA_3, Generation, GemmaHyperparameters
from .model import Gemma

HF_POST_NORMS = {"attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm",
                  "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
HF_QK_NORMS = {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
GGUF_POST_NORMS = {"attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"}
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
GGUF_QK_NORMS = {"attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}


class GemmaFamily(Family):
    """``name`` is also the model_type of the config.json that it reads."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.name = generation, generation.name
        self.architectures, self.gguf_architectures = generation.architectures, (generation.gguf,)
        # A model with a vision tower is read as its text, and its other tensors are let be; written is a text model.
        self.hf_prefixes = {prefix: "model." for prefix in TEXT_PREFIXES} | {"language_model.lm_head.": "lm_head."}

    def from_hf(self, config: Mapping[str, Any]) -> GemmaHyperparameters:
        from .hf_config import read_hf_config

        return GemmaHyperparameters(**read_hf_config(config, self.generation))

    def from_gguf(self, store) -> GemmaHyperparameters:
        from .gguf_metadata import read_gguf_metadata

        return GemmaHyperparameters(**read_gguf_metadata(store, self.generation))

    def model(self, hyperparameters: GemmaHyperparameters) -> Model:
        return Gemma(hyperparameters)

    def hf_names(self, hyperparameters: GemmaHyperparameters) -> NameMap:
        norms = HF_POST_NORMS if hyperparameters.post_norms else HF_NORMS
        return hf_decoder_names({**norms, **(HF_QK_NORMS if hyperparameters.qk_norm else {})})

    def gguf_names(self, hyperparameters: GemmaHyperparameters) -> NameMap:
        post_norms = GGUF_POST_NORMS if hyperparameters.post_norms else {}
        qk_norms = GGUF_QK_NORMS if hyperparameters.qk_norm else {}
        return gguf_decoder_names({**GGUF_NORMS, **post_norms, **qk_norms}, norm_transform=AddOne())

    def hf_config(self, hyperparameters: GemmaHyperparameters) -> dict[str, Any]:
        from .hf_config import write_hf_config

        return write_hf_config(hyperparameters, self.generation)

    def gguf_metadata(self, hyperparameters: GemmaHyperparameters) -> dict[str, Any]:
        from .gguf_metadata import write_gguf_metadata

        return write_gguf_metadata(hyperparameters, self.generation)

    def gguf_extra_tensors(self, hyperparameters: GemmaHyperparameters) -> dict[str, np.ndarray]:
        return rope_factor_tensors(hyperparameters.rope)

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        from .tiny import VARIANTS

        return VARIANTS[self.name]

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        from .presets import PRESETS

        return PRESETS.get(self.name, {})


FAMILIES = tuple(GemmaFamily(generation) for generation in (GEMMA_1, GEMMA_2, GEMMA_3))
