"""LoadedModel: files + family + hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..dsl import Family, Hyperparameters, Model
from ..errors import WeightError
from ..weights.embedding import Embedding
from ..weights.gguf_embedding import read_gguf_embedding
from ..weights.gguf_file import GGUFFile
from ..weights.name_map import NameMap
from ..weights.sentence_transformers import read_modules
from ..weights.store import WeightStore
from ..weights.tokenizer import Tokenizer

EMBEDDING_SIZES = "matryoshka_dimensions"
"""Key of config.json: what vectors may be cut to."""


@dataclass
class LoadedModel:
    """A checkpoint ready to be traced. ``store`` and ``names`` are None for a model that starts from random weights.
    ``embedding``: how its files say that texts become vectors, or None."""

    family: Family
    hyperparameters: Hyperparameters
    store: WeightStore | None
    names: NameMap | None
    embedding: Embedding | None = None

    @classmethod
    def open(cls, path: str | Path, families: Iterable[Family], family: str = "auto") -> LoadedModel:
        """Opens a Hugging Face folder or GGUF file. WeightError: not a model, of an architecture nobody here reads, or with
        tensors that do not fit its configuration: some missing, or some that the configuration has no place for."""
        store = WeightStore.open(path)
        if store.kind == "gguf":
            chosen = _by_gguf(store, list(families), family)
            hyperparameters = chosen.from_gguf(store)
            model = cls(chosen, hyperparameters, store, chosen.gguf_names(hyperparameters))
        else:
            chosen = _by_config(store.config, str(path), list(families), family)
            store.rename(chosen.hf_prefixes)
            hyperparameters = chosen.from_folder(store)
            model = cls(chosen, hyperparameters, store, chosen.hf_names(hyperparameters))
        model._check_tensors()
        model.embedding = _embedding(store, chosen, hyperparameters)
        return model

    def _check_tensors(self) -> None:
        """Tensors of names that the family does not know are let be: old checkpoints hold buffers and the like. A head
        beside a tied embedding is let be too, as it is where these files come from."""
        params = [name for name, _ in self.dsl().parameters()]
        found = set(self.names.resolve(self.store, params))
        for name in params:
            if name not in found:
                raise WeightError(self.store.missing(self.names.file_names(name)[0]))
        known = {*params, *self.names.tied}
        for tensor in self.names.unused(self.store, params):
            surplus = [name for name in self.names.param_names(tensor) if name not in known]
            if surplus:
                raise WeightError(
                    f"{self.store.path}: tensor {tensor!r} has no place in the model that the configuration describes; "
                    "weights and configuration do not belong together"
                )

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any], families: Iterable[Family], family: str = "auto") -> LoadedModel:
        """A model of random weights, from a config.json-like mapping."""
        chosen = _by_config(architecture, "architecture", list(families), family)
        return cls(chosen, chosen.from_hf(architecture), None, None)

    def without_weights(self) -> LoadedModel:
        """The same architecture, to be initialised at random."""
        return LoadedModel(self.family, self.hyperparameters, None, None)

    def dsl(self) -> Model:
        return self.family.model(self.hyperparameters)

    @property
    def writes_text(self) -> bool:
        """Whether it has a head; a model without one makes vectors only."""
        return self.dsl().lm_head is not None

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's own tokenizer. WeightError when there is none."""
        if self.store is None:
            raise WeightError("a model from random weights has no tokenizer of its own; name one with `tokenizer`")
        return open_tokenizer(self.store.path if self.store.gguf is None else self.store.gguf)


def open_tokenizer(source: str | Path | GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face folder. What ends the turns of its chat template ends answers."""
    from ..data.adopted import adopt_own_template

    is_folder = not isinstance(source, GGUFFile) and Path(source).is_dir()
    tokenizer = Tokenizer.from_hf_folder(source) if is_folder else Tokenizer.from_gguf(source)
    adopt_own_template(tokenizer)
    return tokenizer


def _embedding(store: WeightStore, family: Family, h: Hyperparameters) -> Embedding | None:
    found = read_gguf_embedding(store) if store.kind == "gguf" else read_modules(store.path)
    sizes = store.config.get(EMBEDDING_SIZES) or family.embedding_sizes(h)
    if not isinstance(sizes, (list, tuple)) or not all(type(size) is int and size > 0 for size in sizes):
        raise WeightError(f"{store.path}: {EMBEDDING_SIZES} is {sizes!r}, no list of sizes")
    if found is None and not sizes:
        return None
    checked = (found or Embedding()).checked(h.hidden_size, str(store.path))
    return checked.with_sizes(sizes, h.hidden_size) if sizes else checked


def _by_gguf(store: WeightStore, families: list[Family], family: str) -> Family:
    architecture = store.config.get("general.architecture")
    if architecture is None:
        raise WeightError(f"{store.path}: metadata lacks general.architecture, so nothing says what model this is")
    found = [f for f in families if family in ("auto", f.name) and architecture in f.gguf_architectures]
    if not found:
        raise WeightError(_unknown(str(store.path), architecture, families, "gguf_architectures"), _INSTALL)
    return _only(found, str(store.path), architecture)


def _by_config(config: Mapping[str, Any], where: str, families: list[Family], family: str) -> Family:
    named = list(config.get("architectures") or [])
    if not named and config.get("model_type"):
        named = [a for f in families if f.name == config["model_type"] for a in f.architectures]
    found = [f for f in families if family in ("auto", f.name) and set(named) & set(f.architectures)]
    if not found and family != "auto":
        found = [f for f in families if f.name == family and not named]
    if not found:
        what = ", ".join(named) or str(config.get("model_type") or "(no architectures key)")
        raise WeightError(_unknown(where, what, families, "architectures"), _INSTALL)
    return _only(found, where, ", ".join(named))


def _only(found: list[Family], where: str, architecture: str) -> Family:
    """The one family that reads this architecture. Which of two is meant is not for us to guess."""
    if len(found) > 1:
        names = " and ".join(repr(f.name) for f in found)
        raise WeightError(f"{where}: architecture {architecture!r} is claimed by the families {names}",
                          "Set `family` to one of them, or uninstall the plugin that should not have it.")
    return found[0]


_INSTALL = "Install the plugin of its family (surogate plugins lists what is installed)."


def _unknown(where: str, architecture: str, families: list[Family], attribute: str) -> str:
    known = sorted({name for f in families for name in getattr(f, attribute)})
    return f"{where}: architecture {architecture!r} belongs to no installed family; known: {', '.join(known) or 'none'}"
