"""The Llama architecture and its files: Llama 2 and 3.x, SmolLM2, and Mistral as its sliding-window sibling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate_core.dsl import Family, Model
from surogate_core.families import DecoderHyperparameters, gguf_decoder_names, hf_decoder_names, rope_factor_tensors
from surogate_core.weights.name_map import NameMap
from surogate_core.weights.transforms import PermuteRope

from .model import Llama
from .settings import read_gguf, read_hf, write_gguf, write_hf
from .tiny import LLAMA_VARIANTS, MISTRAL_VARIANTS


@dataclass(frozen=True)
class LlamaHyperparameters(DecoderHyperparameters):
    """window: 0, or how many tokens back (itself included) a token of a sliding layer sees."""

    attention_bias: bool = False
    mlp_bias: bool = False
    window: int = 0


class LlamaFamily(Family):
    """``name`` is also the model_type of the config.json that it reads."""

    def __init__(self, name: str, hf_architecture: str, gguf_architectures: tuple[str, ...]) -> None:
        self.name = name
        self.architectures, self.gguf_architectures = (hf_architecture,), gguf_architectures

    def from_hf(self, config: Mapping[str, Any]) -> LlamaHyperparameters:
        return LlamaHyperparameters(**read_hf(config, self.name))

    def from_gguf(self, store) -> LlamaHyperparameters:
        return LlamaHyperparameters(**read_gguf(store))

    def model(self, hyperparameters: LlamaHyperparameters) -> Model:
        return Llama(hyperparameters)

    def hf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        return hf_decoder_names()

    def gguf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        """GGUF stores q and k with the two halves of each rotated pair side by side; rows are moved back on reading."""
        h = hyperparameters
        return gguf_decoder_names(transforms={"attn.q": PermuteRope(h.num_heads, h.head_dim),
                                              "attn.k": PermuteRope(h.num_kv_heads, h.head_dim)})

    def hf_config(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        config = write_hf(hyperparameters, self.name)
        if self.name not in ("llama", "mistral"):  # a plugin's relative of Llama goes by its own name
            config |= {"model_type": self.name, "architectures": list(self.architectures)}
        return config

    def gguf_metadata(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        return write_gguf(hyperparameters)

    def gguf_extra_tensors(self, hyperparameters: LlamaHyperparameters) -> dict[str, np.ndarray]:
        return rope_factor_tensors(hyperparameters.rope)

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        return MISTRAL_VARIANTS if self.name == "mistral" else LLAMA_VARIANTS


FAMILIES = (LlamaFamily("llama", "LlamaForCausalLM", ("llama",)), LlamaFamily("mistral", "MistralForCausalLM", ("mistral",)))
