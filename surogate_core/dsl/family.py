"""Family: what a model-family plugin registers. From a checkpoint's metadata to a DSL model, and back to files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import WeightError
from .model import Model

if TYPE_CHECKING:
    from ..weights.name_map import NameMap
    from ..weights.store import WeightStore


@dataclass(frozen=True)
class Hyperparameters:
    """What every family's hyperparameters have; families add their own fields.

    max_positions: the longest context the checkpoint was made for. tied: the head shares the embedding's weight.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    tied: bool


class Family(ABC):
    """A family of models that share one definition.

    name: what `surogate plugins` shows. architectures: values of "architectures" in config.json that this family reads.
    gguf_architectures: values of "general.architecture". hf_prefixes: how names of tensors may begin in safetensors -> how they
    do in `hf_names`, for checkpoints that hold this model inside of another or its body alone.
    """

    name: str
    architectures: tuple[str, ...] = ()
    gguf_architectures: tuple[str, ...] = ()
    hf_prefixes: Mapping[str, str] = {}

    @abstractmethod
    def from_hf(self, config: Mapping[str, Any]) -> Hyperparameters:
        """Hyperparameters from a config.json mapping. WeightError naming the key for anything it cannot honour: a setting
        is used or refused, never ignored."""

    def from_folder(self, store: WeightStore) -> Hyperparameters:
        """Hyperparameters from an opened Hugging Face folder. Of a family whose files differ in what config.json does not say
        (whether they hold a head), it asks the tensors too."""
        return self.from_hf(store.config)

    def from_gguf(self, store: WeightStore) -> Hyperparameters:
        """Hyperparameters from an opened GGUF file's metadata (``store.config``) and tensors."""
        raise WeightError(f"family {self.name} reads no GGUF files", "Give a Hugging Face folder.")

    @abstractmethod
    def model(self, hyperparameters: Any) -> Model:
        """The DSL model."""

    @abstractmethod
    def hf_names(self, hyperparameters: Any) -> NameMap:
        """Parameter names <-> tensors of safetensors files."""

    def gguf_names(self, hyperparameters: Any) -> NameMap:
        """Parameter names <-> tensors of GGUF files."""
        raise WeightError(f"family {self.name} has no names for GGUF files", "Use Hugging Face safetensors.")

    @abstractmethod
    def hf_config(self, hyperparameters: Any) -> dict[str, Any]:
        """The config.json that `transformers` loads the exported weights with."""

    def gguf_metadata(self, hyperparameters: Any) -> dict[str, Any]:
        """Metadata of an exported GGUF file, tokenizer apart; keys as GGUF spells them."""
        raise WeightError(f"family {self.name} writes no GGUF files", "Export as safetensors.")

    def gguf_extra_tensors(self, hyperparameters: Any) -> dict[str, np.ndarray]:
        """Float32 tensors that GGUF readers expect beside the weights (rotary frequency factors, say)."""
        return {}

    def embedding_sizes(self, hyperparameters: Any) -> tuple[int, ...]:
        """Lengths that vectors of texts may be cut to, where the family's checkpoints were trained for some and do not say
        which (Kusupati et al., 2022); () for any. How texts become vectors otherwise is read beside the weights."""
        return ()

    def tiny_configs(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> tiny config.json mapping (with "model_type"), one for each variant of the architecture, that the parity
        harness of `surogate_core.testing.parity` makes random models of `transformers` from. Empty for a family that
        `transformers` does not have."""
        return {}

    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Name -> config.json mapping of public models that `surogate bench` and `surogate profile` know by name."""
        return {}
