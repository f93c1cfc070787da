"""`surogate merge` and `surogate export`: whole models in other files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .data import adopt_saved_template
from .model import LoadedModel
from .model.loaded import EMBEDDING_SIZES
from .plugins.manager import get_manager
from .weights.export import write_gguf, write_hf
from .weights.gguf_embedding import write_gguf_embedding
from .weights.merge import Merge, MergeReport
from .weights.peft_adapter import read_adapter
from .weights.sentence_transformers import write_modules
from .weights.tensor import AnyTensor, from_f32
from .weights.tokenizer import Tokenizer


def open_installed(path: str | Path) -> LoadedModel:
    """The checkpoint at ``path``, through the families of all installed plugins."""
    return LoadedModel.open(path, get_manager().families.values())


def merge(base: str | Path, adapter: str | Path, output: str | Path, dtype: str = "bf16") -> MergeReport:
    """Folds a PEFT adapter into its base; writes a Hugging Face folder, or a GGUF file when ``output`` ends in .gguf.

    The sum is taken in fp32 over the dequantised base and rounded once. A chat template beside the adapter is the merged
    model's. WeightError when the adapter does not fit, or when it was not applied exactly once everywhere.
    """
    model = open_installed(base)
    held = read_adapter(adapter, model.family.hf_names(model.hyperparameters), model.family.hf_prefixes)
    merged = Merge(lambda name: model.names.load(model.store, name), dict(model.dsl().parameters()), held)
    tokenizer = model.tokenizer()
    adopt_saved_template(adapter, tokenizer)
    _write(model, merged.tensors(), tokenizer, Path(output), dtype)
    return merged.check()


def export(model: str | Path, output: str | Path, dtype: str | None = "bf16") -> None:
    """Writes the model at ``model`` as a GGUF file when ``output`` ends in .gguf, else as a Hugging Face folder of
    safetensors, with its tokenizer and template. ``dtype`` None: in a GGUF each matrix as it is stored; a folder is bf16."""
    opened = open_installed(model)
    tensors = {name: opened.names.load(opened.store, name) for name, _ in opened.dsl().parameters()}
    _write(opened, tensors, opened.tokenizer(), Path(output), dtype)


def _write(
    model: LoadedModel, parameters: Mapping[str, AnyTensor], tokenizer: Tokenizer, output: Path, dtype: str | None
) -> None:
    family, h = model.family, model.hyperparameters
    if output.suffix == ".gguf":
        tensors: dict[str, Any] = dict(family.gguf_names(h).export(parameters))
        for name, array in family.gguf_extra_tensors(h).items():
            tensors[name] = from_f32(name, array)
        metadata = dict(family.gguf_metadata(h))
        if model.embedding is not None:
            more, dense = write_gguf_embedding(model.embedding, metadata["general.architecture"])
            metadata, tensors = metadata | more, tensors | dense
        write_gguf(output, tensors, metadata, tokenizer, dtype)
        return
    write_folder(model, parameters, output, tokenizer, dtype or "bf16")


def write_folder(
    model: LoadedModel, parameters: Mapping[str, AnyTensor], folder: Path, tokenizer: Tokenizer, dtype: str
) -> None:
    """A Hugging Face folder of ``parameters``, and of what ``model``'s own files say of vectors."""
    family, h, embedding = model.family, model.hyperparameters, model.embedding
    config = dict(family.hf_config(h))
    if embedding is not None:
        write_modules(folder, embedding, h.hidden_size, dtype)
        config |= {EMBEDDING_SIZES: list(embedding.sizes)} if embedding.sizes else {}
    write_hf(folder, family.hf_names(h).export(parameters), config, tokenizer=tokenizer, dtype=dtype)
