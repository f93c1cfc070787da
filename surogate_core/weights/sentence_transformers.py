"""What sentence-transformers keeps beside a model: modules.json, a folder for each module, prompts. Read and written.

modules.json lists a Transformer, a Pooling, any number of Dense layers and perhaps Normalize, in this order. Other
modules, and settings that would change the vectors in another way, are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WeightError
from .embedding import Dense, Embedding, Pooling
from .files import read_json, write_json
from .safetensors_file import SINGLE_NAME, SafetensorsFile, write_file
from .tensor import converted

MODULES, PROMPTS, TEXTS = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
_TYPES = "sentence_transformers.models."
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_FLAGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken", "pooling_mode_cls_token": "cls"}
_IDENTITY = "torch.nn.modules.linear.Identity"


def read_modules(folder: Path) -> Embedding | None:
    """What the folder says of vectors; None where it has no modules.json. WeightError for what is not known. (The sizes
    that they may have are no matter of these files.)"""
    path = folder / MODULES
    if not path.exists():
        return None
    modules = [_Module(folder, entry) for entry in _list_of(path)]
    kinds = [module.kind for module in modules]
    dense = [module for module in modules if module.kind == "Dense"]
    normalize = ["Normalize"] if kinds[-1:] == ["Normalize"] else []
    if kinds != ["Transformer", "Pooling", *["Dense"] * len(dense), *normalize]:
        raise WeightError(f"{path}: the modules are {', '.join(kinds)}; known are Transformer, Pooling, Dense layers and "
                          "Normalize, in this order")
    prompts, default = _prompts(folder)
    return Embedding(
        pooling=_pooling(modules[1].config(), modules[1].path, prompts),
        dense=tuple(module.dense() for module in dense),
        normalized=bool(normalize),
        prompts=prompts,
        default_prompt=default,
        max_tokens=_max_tokens(folder),
    )


class _Module:
    """An entry of modules.json. ``kind``: the last part of its type. ``path``: its folder."""

    def __init__(self, folder: Path, entry: Any) -> None:
        where = folder / MODULES
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise WeightError(f"{where}: {str(entry)[:80]} is no module: it needs a type and a path")
        self.kind, name = entry["type"].rsplit(".", 1)[-1], entry["path"]
        if Path(name).name != name:
            raise WeightError(f"{where}: module {name!r} lies outside the folder; only plain names are accepted")
        self.path = folder / name

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json")

    def dense(self) -> Dense:
        config, path = self.config(), self.path / SINGLE_NAME
        if not path.exists():
            raise WeightError(f"{path} is not there; a dense layer's weights are read from safetensors only")
        activation = config.get("activation_function", _IDENTITY)
        if str(activation).rsplit(".", 1)[-1] != "Identity":
            raise WeightError(f"{self.path / 'config.json'}: activation_function is {activation!r}; known is {_IDENTITY}")
        file = SafetensorsFile(path)
        needed = ["linear.weight", *(["linear.bias"] if config.get("bias", True) else [])]
        for name in needed:
            if name not in file.names():
                raise WeightError(f"{path} has no tensor {name!r}, which its config.json asks for")
        return Dense(*(file.get(name) for name in needed))


def _list_of(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"cannot read {path}: {error}") from error
    if not isinstance(entries, list):
        raise WeightError(f"{path} must hold a list of modules, not a {type(entries).__name__}")
    return entries


def _pooling(config: Mapping[str, Any], folder: Path, prompts: Mapping[str, str]) -> Pooling:
    """Of Pooling's config.json, which names the mode, or has a flag for each."""
    where = folder / "config.json"
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [
        _FLAGS.get(key, key) for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise WeightError(f"{where}: pooling is {' and '.join(map(str, modes)) or 'not named'}; known is one of "
                          f"{', '.join(_POOLINGS)}")
    if not config.get("include_prompt", True) and prompts:
        raise WeightError(f"{where}: include_prompt is false; prompts are pooled here as what follows them is")
    return _POOLINGS[modes[0]]


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / PROMPTS
    config = read_json(path) if path.exists() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise WeightError(f"{path}: prompts must be texts by name")
    return prompts, config.get("default_prompt_name")


def _max_tokens(folder: Path) -> int | None:
    path = folder / TEXTS
    config = read_json(path) if path.exists() else {}
    if config.get("do_lower_case"):
        raise WeightError(f"{path}: do_lower_case is true; texts are taken as they are here")
    return config.get("max_seq_length")


def write_modules(folder: Path, embedding: Embedding, hidden_size: int, dtype: str) -> None:
    """Writes what `read_modules` reads, dense layers in ``dtype`` (bf16, f16 or f32)."""
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modes = {key: _POOLINGS[mode] == embedding.pooling for key, mode in _FLAGS.items()}
    pooling = {"word_embedding_dimension": hidden_size, **modes, "include_prompt": True}
    configs: dict[str, dict[str, Any]] = {"1_Pooling": pooling}
    for layer in embedding.dense:
        name = f"{len(modules)}_Dense"
        modules.append(("Dense", name))
        configs[name] = {
            "in_features": layer.shape[1], "out_features": layer.shape[0], "bias": layer.bias is not None,
            "activation_function": _IDENTITY,
        }
        parts = {"linear.weight": layer.weight, "linear.bias": layer.bias}
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_file(folder / name / SINGLE_NAME, [
            converted(tensor.renamed(part), dtype) for part, tensor in parts.items() if tensor is not None])
    for name, config in configs.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / name / "config.json", config)
    if embedding.normalized:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    if embedding.prompts:
        prompts = {"prompts": dict(embedding.prompts), "default_prompt_name": embedding.default_prompt}
        write_json(folder / PROMPTS, prompts)
    if embedding.max_tokens is not None:
        write_json(folder / TEXTS, {"max_seq_length": embedding.max_tokens, "do_lower_case": False})
    write_json(folder / MODULES, [
        {"idx": index, "name": str(index), "path": path, "type": _TYPES + kind} for index, (kind, path) in enumerate(modules)])
