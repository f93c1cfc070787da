"""The Llama architecture and its files: Llama 2 and 3.x, SmolLM2, and Mistral as its sliding-window sibling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surogate_core.dsl import Family, Hyperparameters, Model, RopeSpec
from surogate_core.weights.name_map import NameMap

from .hf_config import read_hf_config, write_hf_config
from .model import Llama
from .names import gguf_names, hf_names
from .rope_factors import frequency_factors, needs_factors


@dataclass(frozen=True)
class LlamaHyperparameters(Hyperparameters):
    """window: 0, or how many tokens back (itself included) a token of a sliding layer sees."""

    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    window: int = 0
    rope_base: float = 10000.0
    rope_dims: int = 0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    init_std: float = 0.02

    @property
    def rope(self) -> RopeSpec:
        return RopeSpec(self.head_dim, self.rope_base, self.rope_dims, self.rope_scaling, self.max_positions)


class LlamaFamily(Family):
    """``name`` is also the model_type of the config.json that it reads."""

    def __init__(self, name: str, hf_architecture: str, gguf_architectures: tuple[str, ...]) -> None:
        self.name = name
        self.architectures, self.gguf_architectures = (hf_architecture,), gguf_architectures

    def from_hf(self, config: Mapping[str, Any]) -> LlamaHyperparameters:
        return LlamaHyperparameters(**read_hf_config(config, self.name))

    def from_gguf(self, store) -> LlamaHyperparameters:
        from .gguf_metadata import read_gguf_metadata

        return LlamaHyperparameters(**read_gguf_metadata(store))

    def model(self, hyperparameters: LlamaHyperparameters) -> Model:
        return Llama(hyperparameters)

    def hf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        return hf_names(hyperparameters)

    def gguf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        return gguf_names(hyperparameters)

    def hf_config(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        config = write_hf_config(hyperparameters, self.name)
        if self.name not in ("llama", "mistral"):  # a plugin's relative of Llama goes by its own name
            config |= {"model_type": self.name, "architectures": list(self.architectures)}
        return config

    def gguf_metadata(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        from .gguf_metadata import write_gguf_metadata

        return write_gguf_metadata(hyperparameters)

    def gguf_extra_tensors(self, hyperparameters: LlamaHyperparameters) -> dict[str, np.ndarray]:
        spec = hyperparameters.rope
        if not needs_factors(spec):
            return {}
        return {"rope_freqs.weight": frequency_factors(spec)}

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        from .tiny import LLAMA_VARIANTS, MISTRAL_VARIANTS

        return MISTRAL_VARIANTS if self.name == "mistral" else LLAMA_VARIANTS


FAMILIES = (LlamaFamily("llama", "LlamaForCausalLM", ("llama",)), LlamaFamily("mistral", "MistralForCausalLM", ("mistral",)))
