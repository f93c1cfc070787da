"""Writing a whole model: a Hugging Face folder, or a GGUF. The family gives names and metadata, this gives files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WeightError
from .files import write_json
from .formats import FLOAT_FORMATS, FORMATS
from .gguf_file import write_gguf_file
from .safetensors_file import MAX_SHARD_BYTES, write_model
from .tensor import AnyTensor, converted
from .tokenizer import Tokenizer

HF_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
GGUF_DTYPES = tuple(name for name, form in FORMATS.items() if form.gguf_file_type is not None)
# Matrices that a token's whole row, or every logit, depends on: llama.cpp keeps them finer than the others too.
_FINER = ("token_embd.weight", "output.weight")


def write_hf(
    folder: str | Path,
    tensors: Mapping[str, AnyTensor],
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: str = "bf16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Writes a folder that `transformers` loads: weights in ``dtype`` (bf16, f16 or f32), configuration, tokenizer.

    ``tensors``: by Hugging Face's names (a name map's ``export``). ``config``: of config.json; its dtype is set here.
    ``generation_config``: of the file of that name; None takes the tokens that begin and end a text from the tokenizer. The
    configuration is written last, so a folder that has one is whole. Returns the weight files.
    """
    if dtype not in HF_DTYPES:
        raise WeightError(f"safetensors cannot hold {dtype!r} for {folder}; choose one of {', '.join(HF_DTYPES)}")
    folder = Path(folder)
    files = write_model(folder, [_as_float(tensor, dtype) for tensor in tensors.values()], max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save_hf(folder)
    if generation_config is None and tokenizer is not None:
        generation_config = _generation_config(tokenizer)
    if generation_config is not None:
        write_json(folder / "generation_config.json", dict(generation_config))
    # A padding id that is left out is one of the published vocabulary to transformers, and may be outside of this one.
    ids = {"pad_token_id": None, **(_generation_config(tokenizer) if tokenizer is not None else {})}
    # "dtype" is what transformers 5 reads, "torch_dtype" what everything older does
    write_json(folder / "config.json", {**ids, **config, "dtype": HF_DTYPES[dtype], "torch_dtype": HF_DTYPES[dtype]})
    return files


def write_gguf(
    path: str | Path,
    tensors: Mapping[str, AnyTensor],
    metadata: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
    dtype: str | None = "bf16",
) -> dict[str, str]:
    """Writes a GGUF that llama.cpp loads; returns the format each tensor got.

    ``tensors``: by GGUF names (a name map's ``export``). ``metadata``: ``general.architecture`` and the architecture's
    keys. ``dtype``: of the matrices, one of GGUF_DTYPES, or None to keep each as it is. Vectors are f32. Below 8 bits the
    embedding and the head are q8_0; a matrix whose rows are not whole blocks is q8_0, or f16 where even that does not fit.
    """
    if dtype is not None and dtype not in GGUF_DTYPES:
        raise WeightError(f"{path}: a GGUF cannot be written in {dtype!r}; choose one of {', '.join(GGUF_DTYPES)}")
    formats = {name: _gguf_format(tensor, dtype) for name, tensor in tensors.items()}
    matrices = [formats[name] for name, tensor in tensors.items() if len(tensor.shape) > 1]
    main = dtype or max(sorted(set(matrices)), key=matrices.count, default="f32")
    values: dict[str, Any] = {**metadata, "general.file_type": np.uint32(FORMATS[main].gguf_file_type or 0)}
    if any(FORMATS[name].is_block for name in matrices):
        values["general.quantization_version"] = np.uint32(2)
    if tokenizer is not None:
        embedding = tensors.get("token_embd.weight")
        values.update(tokenizer.gguf_metadata(embedding.shape[0] if embedding is not None else None))
    write_gguf_file(path, values, [converted(tensor, formats[name]) for name, tensor in tensors.items()])
    return formats


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    stops = list(tokenizer.stop_token_ids)
    config = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stops[0] if len(stops) == 1 else stops,
              "pad_token_id": tokenizer.pad_token_id}
    return {key: value for key, value in config.items() if value not in (None, [])}


def _as_float(tensor: AnyTensor, dtype: str) -> AnyTensor:
    is_number = tensor.dtype in FLOAT_FORMATS or FORMATS[tensor.dtype].is_block
    return converted(tensor, dtype) if is_number else tensor


def _gguf_format(tensor: AnyTensor, dtype: str | None) -> str:
    if len(tensor.shape) < 2:
        return "f32"
    if dtype is None:
        return tensor.dtype
    if FORMATS[dtype].is_block and tensor.name in _FINER and dtype != "q6_k":
        dtype = "q8_0"
    fitting = [name for name in (dtype, "q8_0", "f16") if tensor.shape[-1] % FORMATS[name].block == 0]
    return fitting[0]
