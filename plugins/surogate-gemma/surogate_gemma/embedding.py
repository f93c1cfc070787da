"""EmbeddingGemma: Gemma 3 without a head, whose tokens see ahead as far as back. How its vectors are pooled is said beside its
weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surogate_core.errors import WeightError
from surogate_core.families import hf_decoder_names
from surogate_core.weights.name_map import NameMap

from .gemma import HF_POST_NORMS, HF_QK_NORMS, GemmaFamily
from .hyperparameters import GEMMA_3, GemmaHyperparameters

_BOTH_WAYS = "use_bidirectional_attention"
_SIZES = (768, 512, 256, 128)


class EmbeddingGemmaFamily(GemmaFamily):
    """Files give the window as how many tokens wide it is, both ways together; hyperparameters as attention takes it."""

    def __init__(self) -> None:
        super().__init__(replace(GEMMA_3, architectures=("Gemma3TextModel",), gguf="gemma-embedding"))
        self.name, self.hf_prefixes = "gemma-embedding", {"model.": ""}

    def from_hf(self, config: Mapping[str, Any]) -> GemmaHyperparameters:
        if config.get(_BOTH_WAYS) is not True:
            raise WeightError(f"config.json: {_BOTH_WAYS} is {config.get(_BOTH_WAYS)!r}; a Gemma3TextModel here makes vectors "
                              "of texts, and is read where it is true")
        return _both_ways(super().from_hf({**config, _BOTH_WAYS: False}))

    def from_gguf(self, store) -> GemmaHyperparameters:
        return _both_ways(super().from_gguf(store))

    def hf_names(self, hyperparameters: GemmaHyperparameters) -> NameMap:
        return hf_decoder_names({**HF_POST_NORMS, **HF_QK_NORMS}, prefix="")

    def hf_config(self, hyperparameters: GemmaHyperparameters) -> dict[str, Any]:
        return super().hf_config(_as_filed(hyperparameters)) | {_BOTH_WAYS: True, "use_cache": False}

    def gguf_metadata(self, hyperparameters: GemmaHyperparameters) -> dict[str, Any]:
        return super().gguf_metadata(_as_filed(hyperparameters))

    def embedding_sizes(self, hyperparameters: GemmaHyperparameters) -> tuple[int, ...]:
        return _SIZES

    def tiny_configs(self) -> dict[str, dict[str, Any]]:
        return {}  # the parity suite compares logits; its vectors have tests of their own


def _both_ways(h: GemmaHyperparameters) -> GemmaHyperparameters:
    return replace(h, causal=False, window=h.window // 2 + 1 if h.window else 0)


def _as_filed(h: GemmaHyperparameters) -> GemmaHyperparameters:
    return replace(h, window=max(2 * (h.window - 1), 1) if h.window else 0)


FAMILIES = (EmbeddingGemmaFamily(),)
