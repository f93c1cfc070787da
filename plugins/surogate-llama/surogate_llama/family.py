"""Families of Llama's architecture: a name, what their files say, and switches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from surogate_core.dsl import Family, Model, RopeSpec
from surogate_core.families import DecoderHyperparameters, gguf_decoder_names, hf_decoder_names, rope_factor_tensors
from surogate_core.weights.name_map import NameMap
from surogate_core.weights.transforms import PermuteRope

from .model import Llama
from .settings import read_gguf, read_hf, write_gguf, write_hf
from .switches import PUBLISHED, Switches
from .tiny import VARIANTS


@dataclass(frozen=True)
class LlamaHyperparameters(DecoderHyperparameters):
    """kinds: of each layer, see `layers`. window: how many tokens back (itself included) a token of a sliding layer sees;
    0 where no layer slides. embed_scale and residual_scale: factors of the embedding's rows and of what each half of a
    layer adds. logit_divisor: of the logits. attention_scale: of the attention's logits, None for 1 / sqrt(head_dim).
    interleaved: rotated pairs are neighbours, which is also how GGUF files of this kind have them, for every family.
    query_growth: of queries with their position, see `RopeSpec`; steps are as long as the original context."""

    kinds: tuple[str, ...] = ()
    window: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    attention_scale: float | None = None
    interleaved: bool = False
    query_growth: float = 0.0

    @property
    def query_rope(self) -> RopeSpec:
        if not self.query_growth:
            return self.rope
        step = int(self.rope_scaling["original_max_position_embeddings"])
        return replace(self.rope, growth=self.query_growth, growth_step=step)


class LlamaFamily(Family):
    """``name`` is also the model_type of the config.json that it reads. hf_architecture: the one that is written, or several,
    of which it is the first."""

    def __init__(
        self, name: str, hf_architecture: str | tuple[str, ...], gguf_architectures: tuple[str, ...],
        switches: Switches = Switches(),
    ) -> None:
        self.name, self.switches = name, switches
        self.architectures = (hf_architecture,) if isinstance(hf_architecture, str) else hf_architecture
        self.gguf_architectures = gguf_architectures

    def from_hf(self, config: Mapping[str, Any]) -> LlamaHyperparameters:
        return LlamaHyperparameters(**read_hf(config, self.name, self.switches))

    def from_gguf(self, store) -> LlamaHyperparameters:
        return LlamaHyperparameters(**read_gguf(store, self.switches))

    def model(self, hyperparameters: LlamaHyperparameters) -> Model:
        return Llama(hyperparameters)

    def hf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        return hf_decoder_names()

    def gguf_names(self, hyperparameters: LlamaHyperparameters) -> NameMap:
        """GGUF stores q and k with the two halves of each rotated pair side by side; where the model does not, rows are moved
        back on reading."""
        h = hyperparameters
        if h.interleaved:
            return gguf_decoder_names()
        return gguf_decoder_names(transforms={"attn.q": PermuteRope(h.num_heads, h.head_dim),
                                              "attn.k": PermuteRope(h.num_kv_heads, h.head_dim)})

    def hf_config(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        """A GGUF file of architecture "llama" with a window is Mistral's again."""
        mistral = self.name == "llama" and hyperparameters.window > 0
        return write_hf(hyperparameters, published("mistral") if mistral else self)

    def gguf_metadata(self, hyperparameters: LlamaHyperparameters) -> dict[str, Any]:
        return write_gguf(hyperparameters, self.switches)

    def gguf_extra_tensors(self, hyperparameters: LlamaHyperparameters) -> dict[str, np.ndarray]:
        return rope_factor_tensors(hyperparameters.rope)

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        return VARIANTS.get(self.name, {})

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        from .presets import PRESETS

        return PRESETS if self.name == "llama" else {}


def published(name: str) -> LlamaFamily:
    """The family of one of ``PUBLISHED``."""
    architecture, gguf_architectures, switches = PUBLISHED[name]
    return LlamaFamily(name, architecture, gguf_architectures, switches)
