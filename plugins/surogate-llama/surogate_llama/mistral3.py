"""Ministral 3, and Mistral 3's text: what Mistral published beside a tower for images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.errors import WeightError
from surogate_core.families import GGUFMetadata

from .family import LlamaFamily, LlamaHyperparameters, published
from .switches import Switches

if TYPE_CHECKING:
    from surogate_core.weights.store import WeightStore

GROWTH, _GGUF_GROWTH = "llama_4_scaling_beta", "attention.temperature_scale"
_ROPE = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
         "mscale": 1.0, "mscale_all_dim": 1.0, GROWTH: 0.1}
_SWITCHES = Switches(
    {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
     "rope_scaling": _ROPE},
    (None, None, None), windows="all", rope_base=1e6, gguf="mistral3")


class Mistral3Family(LlamaFamily):
    """A model that sees is read as its text, Ministral 3 or the Mistral in its "text_config", and is written as that."""

    def __init__(self) -> None:
        architectures = ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration")
        super().__init__("ministral3", architectures, ("mistral3",), _SWITCHES)
        self.hf_prefixes = {"language_model.model.": "model.", "model.language_model.": "model.",
                            "language_model.lm_head.": "lm_head."}

    def from_hf(self, config: Mapping[str, Any]) -> LlamaHyperparameters:
        text = config.get("text_config") or config
        kind = text.get("model_type", self.name)
        if kind == "mistral":
            return published("mistral").from_hf({"sliding_window": None, "head_dim": 128, **text})
        if kind != self.name:
            raise WeightError(f"config.json: text_config is of model_type {kind!r}; known here are mistral and {self.name}")
        h = super().from_hf(text)
        if not h.rope_scaling.get(GROWTH):
            raise WeightError(f"config.json: the rotary settings lack {GROWTH!r}, which a {self.name} model needs")
        return replace(h, query_growth=float(h.rope_scaling[GROWTH]))

    def from_folder(self, store: WeightStore) -> LlamaHyperparameters:
        """Whether the head of a text inside is tied is said in one of two places, or in none: the tensors know."""
        h = self.from_hf(store.config)
        return replace(h, tied="lm_head.weight" not in store) if store.config.get("text_config") else h

    def hf_config(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        h = hyperparameters
        return super().hf_config(h) if h.query_growth else published("mistral").hf_config(h)

    def from_gguf(self, store: WeightStore) -> LlamaHyperparameters:
        h = super().from_gguf(store)
        growth = GGUFMetadata(store).number(_GGUF_GROWTH, 0.0)
        return replace(h, query_growth=growth, rope_scaling={**h.rope_scaling, GROWTH: growth}) if growth else h

    def gguf_metadata(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        h = hyperparameters
        return super().gguf_metadata(h) | ({f"mistral3.{_GGUF_GROWTH}": h.query_growth} if h.query_growth else {})
