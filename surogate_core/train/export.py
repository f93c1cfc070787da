"""`surogate merge` and `surogate export`: whole models in other files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WeightError
from ..model import LoadedModel
from ..plugins.manager import get_manager
from ..weights.export import write_gguf, write_hf
from ..weights.merge import Merge, MergeReport
from ..weights.peft_adapter import read_adapter
from ..weights.tensor import AnyTensor, from_f32


def open_installed(path: str | Path) -> LoadedModel:
    """The checkpoint at ``path``, through the families of all installed plugins."""
    manager = get_manager()
    manager.load()
    return LoadedModel.open(path, [family for _, family in manager.families.items()])


def parameter_names(model: LoadedModel) -> list[str]:
    """Every parameter of the model, tied ones once."""
    return [name for name, _ in model.dsl().parameters()]


def merge(base: str | Path, adapter: str | Path, output: str | Path, dtype: str = "bf16") -> MergeReport:
    """Folds a PEFT adapter into its base; writes a Hugging Face folder, or a GGUF file when ``output`` ends in .gguf.

    The sum is taken in fp32 over the dequantised base and rounded once. WeightError when the adapter does not fit, or when
    it was not applied exactly once everywhere.
    """
    model = open_installed(base)
    held = read_adapter(adapter, model.family.hf_names(model.hyperparameters))
    merged = Merge(lambda name: model.names.load(model.store, name), parameter_names(model), held)
    _write(model, merged.tensors(), Path(output), dtype)
    return merged.check()


def export(model: str | Path, output: str | Path, format: str, dtype: str | None = "bf16") -> None:
    """Writes the model at ``model`` as "safetensors" (a folder) or "gguf" (a file), with its tokenizer and template."""
    opened = open_installed(model)
    tensors = {name: opened.names.load(opened.store, name) for name in parameter_names(opened)}
    if (format == "gguf") != (Path(output).suffix == ".gguf"):
        raise WeightError(f"{output} does not fit format {format!r}: gguf is one .gguf file, safetensors a folder")
    _write(opened, tensors, Path(output), dtype)


def _write(model: LoadedModel, parameters: Mapping[str, AnyTensor], output: Path, dtype: str | None) -> None:
    family, h = model.family, model.hyperparameters
    tokenizer = model.tokenizer()
    if output.suffix == ".gguf":
        tensors: dict[str, Any] = dict(family.gguf_names(h).export(parameters))
        for name, array in family.gguf_extra_tensors(h).items():
            tensors[name] = from_f32(name, array)
        write_gguf(output, tensors, family.gguf_metadata(h), tokenizer, dtype)
        return
    write_hf(output, family.hf_names(h).export(parameters), family.hf_config(h), _generation_config(tokenizer), tokenizer,
             dtype or "bf16")


def _generation_config(tokenizer: Any) -> dict[str, Any]:
    stops = list(tokenizer.stop_token_ids)
    config = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": stops[0] if len(stops) == 1 else stops,
              "pad_token_id": tokenizer.pad_token_id}
    return {key: value for key, value in config.items() if value not in (None, [])}
