"""What is measured: a real training run, planned and opened as `surogate sft` does, of a configuration file or of a preset
with random weights and random tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from ..config import Mode, TrainConfig, resolve
from ..config.explain_errors import config_error
from ..config.overrides import apply_override
from ..config.resolve import ignore
from ..config.tree import settle_model
from ..config.vocabulary import translate
from ..config.yaml_file import parse_yaml
from ..data import TokenDataset
from ..errors import ConfigError
from ..model import FrozenWeights
from ..plugins.manager import get_manager
from ..train.machine import choose_backend
from ..train.prepare import Prepared, plan_run, prepare
from ..train.session import TrainSession
from .presets import architecture
from .random_model import random_model

STEPS_OF_DATA = 4
"""Steps that random data has before it goes round."""


@dataclass
class Workload:
    """name: the preset's, or the configuration file."""

    name: str
    prepared: Prepared
    session: TrainSession

    @property
    def full(self) -> bool:
        """Whether every weight is trained."""
        return self.prepared.adapter is None


def from_config(path: Path, overrides: Sequence[str], mode: Mode) -> Prepared:
    """A run of a configuration file, on its model and its data."""
    return prepare(resolve(path, overrides, mode=mode), mode)


def from_preset(
    name: str, keys: Mapping[str, Any], overrides: Sequence[str], weights_dtype: str = "bf16", documents: int = 1
) -> Prepared:
    """A run of a preset's architecture. ``keys``: of a configuration; ``overrides``: the same as `--set` takes them.
    ``weights_dtype``: what the checkpoint is stored in. ``documents``: in one sequence, of random lengths."""
    config = _config(name, keys, overrides)
    manager = get_manager()
    manager.load(config.plugins)
    manager.load_kernels()
    config, _ = choose_backend(config, manager)
    model = random_model(architecture(name), manager.families.values(), weights_dtype, config.seed)
    vocabulary = model.hyperparameters.vocab_size
    weights = FrozenWeights(model, manager.recipes[config.recipe].compute, config.backend, config.device)
    tokenizer = SimpleNamespace(pad_token_id=0)
    return plan_run(config, "sft", manager, model, weights, tokenizer, lambda: (_tokens(config, vocabulary, documents), {}))


def open_workload(name: str, prepared: Prepared) -> Workload:
    """Allocates what the plan says and fills it, as a run does."""
    return Workload(name, prepared, TrainSession.of(prepared))


def _config(name: str, keys: Mapping[str, Any], overrides: Sequence[str]) -> TrainConfig:
    """The configuration of a preset's run. ConfigError as for a file."""
    given = {"model": name, "datasets": "random", **keys}
    document = translate(parse_yaml(yaml.safe_dump(given), f"preset {name}", {}, lines=False), ignore)
    for override in overrides:
        apply_override(document, override, {}, ignore)
    try:
        return TrainConfig.model_validate(settle_model(document, TrainConfig))
    except ValidationError as error:
        raise config_error(error, TrainConfig, document) from None


def _tokens(config: TrainConfig, vocabulary: int, documents: int) -> TokenDataset:
    """Sequences of random tokens, all of which carry loss, each cut into so many documents of random lengths."""
    generator = np.random.default_rng(config.seed)
    sequences, length = STEPS_OF_DATA * config.effective_batch_size, config.sequence_len
    if not 1 <= documents <= length // 2:
        raise ConfigError(f"a sequence of {length} tokens cannot hold {documents} documents of two tokens or more")
    ends = []
    for number in range(sequences):
        cuts = 2 * np.sort(generator.choice(np.arange(1, length // 2), documents - 1, replace=False))
        ends += [number * length + int(cut) for cut in cuts] + [(number + 1) * length]
    count = sequences * length
    names = [f"random:{i + 1}" for i in range(len(ends))]
    tokens = generator.integers(0, vocabulary, count).astype(np.int32)
    return TokenDataset(tokens, np.ones(count, np.float32), np.array([0, *ends], np.int64), names, ["random"] * len(names))
