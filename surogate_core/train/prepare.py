"""From a resolved config to what a run works with: plugins, model, tokenizer, data, plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import Mode, TrainConfig
from ..data import Encoder, Loader, TokenDataset, adopt_choice, build_dataset, load_template, split_validation
from ..errors import ConfigError, DataError
from ..model import FrozenWeights, LoadedModel, TooLarge, TrainPlan, evaluation_bytes, training_program
from ..model.loaded import open_tokenizer
from ..passes import LoraSpec
from ..plugins.manager import PluginManager, get_manager
from ..weights.formats import byte_count
from .checkpoint import list_checkpoints
from .machine import choose_backend
from .memory import memory_budget, too_large
from .schedule import Schedule

QUARANTINE_FILE = "bad_rows.jsonl"
_DTYPES = {"fp32": "f32", "bf16": "bf16"}
"""What a config says -> the engine's name."""


@dataclass
class Prepared:
    """Everything before the first allocation of the engine. ``config`` names the backend that was chosen."""

    config: TrainConfig
    mode: Mode
    manager: PluginManager
    model: LoadedModel
    tokenizer: Any
    loader: Loader
    evaluations: dict[str, Loader]
    recipe: Any
    weights: FrozenWeights
    adapter: LoraSpec | None
    optimizer: Any
    plan: TrainPlan
    total_steps: int
    schedule: Schedule
    threads: int | None
    budget: int | None
    evaluation_bytes: int
    """What evaluating takes beside the training program; part of the budget."""
    backend_reason: str = ""
    """Why it is this backend, where ``backend: auto`` left the choice."""


def prepare(config: TrainConfig, mode: Mode) -> Prepared:
    """Allocates nothing large. Raises ConfigError, DataError, WeightError, PluginError or TrainingError."""
    manager = get_manager()
    manager.load(config.plugins)
    manager.load_kernels()
    config, reason = choose_backend(config, manager)
    model = open_model(config, manager)
    tokenizer = open_tokenizer(config.tokenizer) if config.tokenizer else model.tokenizer()
    choose_template(config, mode, tokenizer, manager)
    weights = FrozenWeights(model, manager.recipes[config.recipe].compute, config.backend, config.device)
    prepared = plan_run(
        config, mode, manager, model, weights, tokenizer, lambda: load_data(config, mode, tokenizer, manager)
    )
    return replace(prepared, backend_reason=reason)


def plan_run(
    config: TrainConfig, mode: Mode, manager: PluginManager, model: LoadedModel, weights: FrozenWeights, tokenizer: Any,
    read_data: Callable[[], tuple[TokenDataset, dict[str, TokenDataset]]],
) -> Prepared:
    """`prepare` with the backend chosen and the model at hand. ``read_data`` is called once the settings are known to be
    good; of the tokenizer only its pad_token_id is read."""
    choices = _choose(config, manager, model)
    train, validation = read_data()
    for data in (train, *validation.values()):
        check_vocabulary(data, model.hyperparameters.vocab_size)
    loader = _loader(config, train, tokenizer, config.gradient_accumulation_steps, shuffle=True)
    evaluations = {name: _loader(config, data, tokenizer, 1, shuffle=False) for name, data in validation.items()}
    documents = max([loader.max_documents, *(e.max_documents for e in evaluations.values())])

    def plan_with(settings: TrainConfig, limit: int | None) -> tuple[TrainPlan, int]:
        return _plan(settings, _choose(settings, manager, model), model, weights, documents, bool(evaluations), limit)

    budget = memory_budget(config)
    try:
        plan, for_evaluation = plan_with(config, budget.bytes)
    except TooLarge as error:
        raise too_large(*plan_with(config, 0), budget, plan_with, config) from error
    total = loader.steps_per_epoch * config.num_epochs
    if config.max_steps is not None:
        total = config.max_steps
    schedule = Schedule(
        config.lr_scheduler_type, config.learning_rate, total, config.warmup(total), config.min_lr_ratio,
        config.wsd_decay_ratio,
    )
    return Prepared(config, mode, manager, model, tokenizer, loader, evaluations, choices.recipe, weights,
                    choices.adapter, choices.optimizer, plan, total, schedule, _threads(config), budget.bytes,
                    for_evaluation)


@dataclass(frozen=True)
class _Choices:
    """What the settings' names stand for."""

    recipe: Any
    adapter: LoraSpec | None
    optimizer: Any
    strategy: Any


def _choose(config: TrainConfig, manager: PluginManager, model: LoadedModel) -> _Choices:
    recipe = manager.recipes[config.recipe]
    if _DTYPES[config.master_dtype] not in ("f32", recipe.compute):
        raise ConfigError(
            f"master_dtype is {config.master_dtype}, and recipe {config.recipe!r} computes in {recipe.compute}",
            "Leave master_dtype out, or choose recipe: bf16 or pure_bf16.",
        )
    return _Choices(
        recipe, lora_spec(config, model) if config.lora else None,
        manager.optimizers[config.optimizer].from_config(config), manager.strategies[config.strategy],
    )


def _threads(config: TrainConfig) -> int | None:
    return None if config.threads == "auto" else config.threads


def _plan(
    config: TrainConfig, choices: _Choices, model: LoadedModel, weights: FrozenWeights, documents: int, evaluates: bool,
    budget: int | None,
) -> tuple[TrainPlan, int]:
    """The training program for ``documents`` in a micro-batch, and the bytes of evaluation, which the budget is shared with;
    0 for the least there is. Raises TooLarge."""
    bindings = {"T": config.per_device_train_batch_size * config.sequence_len, "D": documents + 1}
    machine = {
        "max_positions": config.sequence_len, "adapter": choices.adapter, "backend": config.backend,
        "device": config.device, "threads": _threads(config), "join_projections": config.backend != "cpu",
        "widen": config.backend != "cpu",
    }
    for_evaluation = evaluation_bytes(model, choices.recipe, weights, bindings, **machine) if evaluates else 0
    plan = training_program(
        model, choices.recipe, weights, bindings, optimizer=choices.optimizer,
        strategy_passes=choices.strategy.passes(config), **machine,
        memory_budget=max(budget - for_evaluation, 1) if budget else budget, deterministic=config.deterministic,
        master=_DTYPES[config.master_dtype], states=_DTYPES[config.optimizer_state_dtype],
    )
    return plan, for_evaluation


def open_model(config: TrainConfig, manager: PluginManager) -> LoadedModel:
    """What the config names, through the family it names or any. WeightError, or PluginError for an unknown family."""
    families = manager.families.values() if config.family == "auto" else [manager.families[config.family]]
    if config.from_scratch and config.architecture is not None:
        return LoadedModel.from_architecture(config.architecture, families, config.family)
    model = LoadedModel.open(config.model, families, config.family)
    if not model.writes_text:
        raise ConfigError(
            f"{config.model} has no head that writes text: it makes vectors of texts, and nothing here trains those",
            "Serve it: surogate serve, then POST /v1/embeddings.",
        )
    return model.without_weights() if config.from_scratch else model


def lora_spec(config: TrainConfig, model: LoadedModel) -> LoraSpec:
    """Targets may be roles ("attn.q"), Hugging Face names ("q_proj") or "all"; ConfigError for one that fits nothing."""
    roles = linear_roles(model)
    chosen: set[str] | None = None
    if config.lora_target_modules != ["all"]:
        chosen = set()
        for target in config.lora_target_modules:
            found = {role for role, names in roles.items() if target == role or target in names}
            if not found:
                known = sorted({*roles, *(n for names in roles.values() for n in names)})
                raise ConfigError(
                    f"lora_target_modules: no linear layer is called {target!r}", f"Known: all, {', '.join(known)}."
                )
            chosen |= found
    return LoraSpec(config.lora_rank, config.lora_alpha, None if chosen is None else frozenset(chosen),
                    config.lora_dropout, config.use_rslora)


def linear_roles(model: LoadedModel) -> dict[str, set[str]]:
    """Role of every linear layer of the stack -> the last part of its names in Hugging Face files ("q_proj")."""
    names = model.family.hf_names(model.hyperparameters)
    roles: dict[str, set[str]] = {}
    for name, parameter in model.dsl().parameters():
        is_linear = len(parameter.shape) == 2 and parameter.role is not None
        if is_linear and name.startswith("layers.") and name.endswith(".weight"):
            modules = {file.removesuffix(".weight").rsplit(".", 1)[-1] for file in names.file_names(name)}
            roles.setdefault(parameter.role, set()).update(modules)
    return roles


def choose_template(config: TrainConfig, mode: Mode, tokenizer: Any, manager: PluginManager) -> None:
    """The template that the config names becomes the tokenizer's own, so that whatever is saved with it has it too."""
    if mode != "pt" and config.chat_template is not None:
        adopt_choice(config.chat_template, tokenizer, dict(manager.chat_templates.items()))


def encoder_for(config: TrainConfig, mode: Mode, tokenizer: Any) -> Encoder:
    """What turns rows into tokens and masks, by the tokenizer's template."""
    template = None if mode == "pt" else load_template(None, tokenizer)
    return Encoder(tokenizer, template, config.train_on, config.train_on_empty_think, config.system_prompt)


def load_data(
    config: TrainConfig, mode: Mode, tokenizer: Any, manager: PluginManager
) -> tuple[TokenDataset, dict[str, TokenDataset]]:
    """The training data, and evaluation data by name."""
    encoder = encoder_for(config, mode, tokenizer)
    formats = dict(manager.dataset_formats.items())
    quarantine = Path(config.output_dir) / QUARANTINE_FILE if config.bad_rows == "quarantine" else None

    def build(specs) -> TokenDataset:
        return build_dataset(specs, encoder, config.sequence_len, config.overlong, seed=config.seed, formats=formats,
                             quarantine=quarantine)

    train = build(config.datasets)
    validation: dict[str, TokenDataset] = {}
    if config.validation_datasets:
        for spec in config.validation_datasets:
            name = Path(str(spec.path)).stem
            validation[name if name not in validation else f"{name}_{len(validation)}"] = build([spec])
    elif config.validation_split:
        train, validation["validation"] = split_validation(train, config.validation_split, config.seed)
    return train, validation


def check_vocabulary(data: TokenDataset, vocab_size: int) -> None:
    """DataError for a token that the model has no row for: the tokenizer is of another model."""
    beyond = np.flatnonzero(data.tokens >= vocab_size)
    if beyond.size:
        row = data.rows[int(np.searchsorted(data.offsets, beyond[0], side="right")) - 1]
        raise DataError(
            f"{row}: token {int(data.tokens[beyond[0]])} is outside the model's vocabulary of {vocab_size}",
            "The tokenizer is of another model: leave `tokenizer` out, or name the model's own.",
        )


def _loader(config: TrainConfig, data: TokenDataset, tokenizer: Any, accumulation: int, shuffle: bool) -> Loader:
    return Loader(
        data, sequence_len=config.sequence_len, per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation, sample_packing=config.sample_packing, seed=config.seed, shuffle=shuffle,
        pad_token_id=tokenizer.pad_token_id,
    )


def checkpoint_bytes(prepared: Prepared) -> int:
    """Size of one checkpoint on disk, about."""
    layout, types = prepared.plan.layout, prepared.plan.layout.types
    states = len(prepared.optimizer.states) * byte_count(types.states, (1,))
    masters = {True: byte_count(types.master, (1,)), False: 4}
    return (1 << 20) + sum(p.size * (masters[len(p.shape) >= 2] + states) for p in layout.parameters.values())


def check_disk(prepared: Prepared) -> None:
    """ConfigError for a run whose folder cannot be made, or whose first checkpoint could not be written."""
    folder = Path(prepared.config.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be made: {error.strerror or error}", "Choose another.") from error
    # A new checkpoint is whole before an old one goes, so two stand side by side; a resumed run has one of them already.
    missing = 1 if list_checkpoints(folder) else 2
    free, needed = shutil.disk_usage(folder).free, missing * checkpoint_bytes(prepared)
    if free < needed:
        raise ConfigError(
            f"output_dir {folder} has {free / 2**20:,.0f} MiB free; its checkpoints need {needed / 2**20:,.0f} MiB more",
            "Free space there, or choose another output_dir.",
        )


