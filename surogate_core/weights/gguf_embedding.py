"""What a GGUF file says of vectors: <architecture>.pooling_type, and the tensors of two dense layers. Read and written.

The format has no word for a model whose vectors are not normalised, nor for prompts: readers normalise, and whoever asks
writes the prompt.
"""

from __future__ import annotations

from typing import Any

from ..errors import WeightError
from .embedding import Dense, Embedding, Pooling
from .store import WeightStore
from .tensor import AnyTensor

_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_TOKENS = 0  # every token's vector: nothing is said of whole texts
_DENSE = ("dense_2", "dense_3")


def read_gguf_embedding(store: WeightStore) -> Embedding | None:
    """None for a file that says nothing of pooling."""
    key = f"{store.config['general.architecture']}.pooling_type"
    kind = store.config.get(key, _TOKENS)
    if kind == _TOKENS:
        return None
    if kind not in _POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise WeightError(f"{store.path}: {key} is {kind!r}; known are {known}")
    layers = [
        Dense(store.get(f"{name}.weight"), store.get(f"{name}.bias") if f"{name}.bias" in store else None)
        for name in _DENSE if f"{name}.weight" in store
    ]
    return Embedding(_POOLINGS[kind], tuple(layers))


def write_gguf_embedding(embedding: Embedding, arch: str) -> tuple[dict[str, Any], dict[str, AnyTensor]]:
    """(metadata, tensors) of a file of architecture ``arch``. WeightError for what readers of it would not do."""
    if not embedding.normalized:
        raise WeightError("this model's vectors are not normalised, and readers of GGUF files normalise them")
    if embedding.default_prompt is not None:
        raise WeightError(f"texts of this model begin with its prompt {embedding.default_prompt!r}; GGUF has no place for it")
    with_bias = any(layer.bias is not None for layer in embedding.dense)
    if embedding.dense and (len(embedding.dense) != len(_DENSE) or with_bias):
        raise WeightError("GGUF has names for two dense layers without biases, or none")
    kind = next(number for number, name in _POOLINGS.items() if name == embedding.pooling)
    metadata: dict[str, Any] = {f"{arch}.pooling_type": kind}
    tensors: dict[str, AnyTensor] = {}
    for name, layer in zip(_DENSE, embedding.dense):
        metadata |= {f"{arch}.{name}_feat_in": layer.shape[1], f"{arch}.{name}_feat_out": layer.shape[0]}
        tensors[f"{name}.weight"] = layer.weight.renamed(f"{name}.weight")
    return metadata, tensors
