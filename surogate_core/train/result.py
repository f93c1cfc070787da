"""What a run leaves behind: an adapter as PEFT reads it, or a whole model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from ..export import write_folder
from ..passes.lora import adapter_names
from ..weights.peft_adapter import Adapter, LoraPair, write_adapter
from ..weights.tensor import StoredTensor
from . import ADAPTER_FOLDER, MODEL_FOLDER
from .prepare import Prepared
from .session import TrainSession


def save_result(prepared: Prepared, session: TrainSession, folder: Path) -> Path:
    """Writes adapter/ or model/; returns its path."""
    if prepared.adapter is not None:
        return _save_adapter(prepared, session, folder / ADAPTER_FOLDER)
    model = prepared.model
    parameters = {
        name: StoredTensor(name, "f32", p.shape, session.parameter(name)) for name, p in session.layout.parameters.items()
    }
    for name, parameter in model.dsl().parameters():
        if name not in parameters:
            parameters[name] = prepared.weights.stored(name, parameter.shape)
    write_folder(model, parameters, folder / MODEL_FOLDER, prepared.tokenizer, prepared.recipe.compute)
    return folder / MODEL_FOLDER


def trained_adapter(prepared: Prepared, session: TrainSession) -> Adapter:
    """The adapter that the session has trained so far."""
    spec, config = prepared.adapter, prepared.config
    trained = session.layout.parameters
    pairs = {}
    for name in dict(prepared.model.dsl().parameters()):
        name_a, name_b = adapter_names(name)
        if name_a in trained:
            pairs[name] = LoraPair(session.parameter(name_a), session.parameter(name_b), spec.scale)
    return Adapter(pairs, str(config.model), spec.rank_stabilised, config.lora_dropout)


def _save_adapter(prepared: Prepared, session: TrainSession, folder: Path) -> Path:
    model = prepared.model
    adapter = trained_adapter(prepared, session)
    write_adapter(folder, adapter, model.family.hf_names(model.hyperparameters), model.hyperparameters.num_layers)
    prepared.tokenizer.save_hf(folder)
    return folder
