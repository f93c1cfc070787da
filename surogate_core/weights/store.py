"""The weight store: one face over the files that hold a model's tensors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WeightError
from .files import read_json
from .gguf_file import GGUFFile
from .name_map import with_prefix
from .safetensors_file import SafetensorsFile, open_folder
from .tensor import StoredTensor


class WeightStore:
    """The tensors of one model, mapped from its files, under the names the files give them.

    ``kind``: ``"hf"`` (a folder with config.json and safetensors) or ``"gguf"``. ``config``: the dict of config.json, or
    the GGUF's metadata. ``path``: the folder or file. ``gguf``: the GGUFFile behind it, or None.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        config: dict[str, Any],
        files: dict[str, SafetensorsFile] | dict[str, GGUFFile],
        gguf: GGUFFile | None = None,
    ) -> None:
        self.path, self.kind, self.config, self.gguf = path, kind, config, gguf
        self._files = files
        self._stored: dict[str, str] = {}  # names that the files give otherwise -> how they give them

    @classmethod
    def open(cls, path: str | Path) -> WeightStore:
        """Opens a Hugging Face folder or a .gguf file; raises WeightError saying what was found there instead."""
        path = Path(path).expanduser()
        if path.is_dir():
            return cls._open_folder(path)
        if not path.exists():
            raise WeightError(f"{path} does not exist; give a .gguf file or a folder with config.json and safetensors")
        if path.suffix == ".safetensors":
            raise WeightError(
                f"{path} is one file of a model; give its folder {path.parent}, which holds config.json too"
            )
        file = GGUFFile(path)
        split = file.metadata.get("split.count", 0)
        if split and split > 1:
            raise WeightError(
                f"{path} is one of {split} parts of a split GGUF; join them first with llama-gguf-split --merge"
            )
        return cls(path, "gguf", file.metadata, dict.fromkeys(file.names(), file), file)

    @classmethod
    def _open_folder(cls, folder: Path) -> WeightStore:
        files = open_folder(folder)
        if not files:
            raise WeightError(f"{folder} holds no model: {_what_a_folder_holds(folder)}")
        config_path = folder / "config.json"
        if not config_path.exists():
            raise WeightError(
                f"{folder} has weights but no config.json, which says what model they are; copy it beside them"
            )
        return cls(folder, "hf", read_json(config_path), files)

    def rename(self, prefixes: Mapping[str, str]) -> None:
        """Names that begin with a key of ``prefixes`` begin with its value from now on. WeightError when a name then stands
        for two tensors."""
        files: dict[str, Any] = {}
        for stored, file in self._files.items():
            name = with_prefix(stored, prefixes)
            if name in files:
                raise WeightError(f"{self.path}: both {self.stored_name(name)!r} and {stored!r} are the tensor {name!r}")
            files[name] = file
            if name != stored:
                self._stored[name] = stored
        self._files = files

    def names(self) -> list[str]:
        return list(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of(name).shape(self.stored_name(name))

    def get(self, name: str) -> StoredTensor:
        """The tensor, a view into its mapped file; raises WeightError with the nearest names when there is none."""
        return self._file_of(name).get(self.stored_name(name))

    def stored_name(self, name: str) -> str:
        """The name that the files themselves give it."""
        return self._stored.get(name, name)

    def _file_of(self, name: str) -> SafetensorsFile | GGUFFile:
        try:
            return self._files[name]
        except KeyError:
            raise WeightError(self.missing(name)) from None

    def missing(self, name: str) -> str:
        """The message for a tensor that is not there: the nearest names, and what the files hold."""
        near = difflib.get_close_matches(name, self._files, n=3, cutoff=0.6)
        nearest = f"nearest: {', '.join(near)}" if near else f"it begins with {', '.join(list(self._files)[:3])}"
        return f"{self.path} has no tensor {name!r} ({len(self._files)} tensors; {nearest})"


def _what_a_folder_holds(folder: Path) -> str:
    """Why a folder without model.safetensors cannot be opened, from what lies in it."""
    present = {entry.name for entry in folder.iterdir()}
    if "adapter_config.json" in present:
        return "it is a LoRA adapter; name its base model, and give this folder as the adapter"
    if "metrics.jsonl" in present:
        made = [name for name in ("model", "adapter") if name in present]
        return f"it is a run's folder; what the run made is {made[0]}/ in it" if made else "it is of a run that is not done"
    ggufs = sorted(name for name in present if name.endswith(".gguf"))
    if ggufs:
        return f"it holds GGUF files; give one of them: {', '.join(ggufs[:5])}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in present):
        return (
            "its weights are pickled (.bin, .pt), which can run code and are never loaded; convert them to safetensors"
        )
    loose = sorted(name for name in present if name.endswith(".safetensors"))
    if loose:
        return f"{loose[0]} is neither model.safetensors nor named by model.safetensors.index.json; copy the index too"
    return "no model.safetensors, no model.safetensors.index.json and no .gguf file"
