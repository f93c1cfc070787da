"""LoRA adapters as PEFT writes them: adapter_config.json beside adapter_model.safetensors.

A module's update is ``scale * B @ A`` with ``scale = alpha / r``, or ``alpha / sqrt(r)`` with ``use_rslora``. Tensors are
named ``base_model.model.<module>.lora_A.weight`` by Hugging Face's module names, which the family's name map gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WeightError
from .files import read_json, write_json
from .name_map import NameMap, with_prefix
from .safetensors_file import SafetensorsFile, write_file
from .tensor import StoredTensor, from_f32
from .transforms import Identity

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")

# Keys that ask for more than `scale * B @ A`, and what they ask for. They, and keys in neither list (of another version of
# PEFT), may only have a value that means "off".
_UNSUPPORTED = {
    "use_dora": "DoRA, whose magnitude vectors are not supported",
    "modules_to_save": "modules trained in full beside the adapter, which are not supported",
    "bias": "trained biases, which are not supported",
    "lora_bias": "biases in the low-rank branch, which are not supported",
    "fan_in_fan_out": "transposed base weights, which are not supported",
    "layer_replication": "repeated layers, which are not supported",
    "trainable_token_indices": "trained token rows, which are not supported",
    "target_parameters": "adapters on bare parameters, which are not supported",
    "use_qalora": "QALoRA, which is not supported",
    "use_bdlora": "block-diagonal LoRA, which is not supported",
    "alora_invocation_tokens": "activated LoRA, which is not supported",
}
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision",
    "rank_pattern", "alpha_pattern", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
_OFF = (None, False, 0, "", "none", [], {})
# Other ways of starting (PiSSA, OLoRA, LoftQ ...) change the base weights too, so the adapter alone says too little.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraPair:
    """The low-rank update of one linear: ``scale * b @ a``. a: f32 ``[r, in]``; b: f32 ``[out, r]``."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def delta(self) -> np.ndarray:
        """The update of the weight, float32 ``[out, in]``."""
        return np.float32(self.scale) * (self.b @ self.a)


@dataclass(frozen=True)
class Adapter:
    """LoRA pairs by the parameter they belong to (``layers.0.attn.q.weight``), and what the adapter says of its base."""

    pairs: dict[str, LoraPair]
    base_model: str | None = None
    use_rslora: bool = False
    dropout: float = 0.0
    config: dict[str, Any] = field(default_factory=dict)


def read_adapter(folder: str | Path, hf_map: NameMap, prefixes: Mapping[str, str] = {}) -> Adapter:
    """Reads a PEFT adapter; ``hf_map``: the family's map to Hugging Face names; ``prefixes``: its `Family.hf_prefixes`.

    Raises WeightError naming the file and key for anything that would have to be applied in another way than
    ``scale * B @ A``, for half pairs, for shapes that do not fit, and for modules the family does not have.
    """
    folder = Path(folder)
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    if not config_path.exists():
        raise WeightError(f"{folder} is not a PEFT adapter: it has no {CONFIG_NAME}")
    config = read_json(config_path)
    _check_config(config_path, config)
    if not weights_path.exists():
        pickled = (
            " (adapter_model.bin is pickled and is never loaded)" if (folder / "adapter_model.bin").exists() else ""
        )
        raise WeightError(f"{folder} has no {WEIGHTS_NAME}{pickled}; save the adapter as safetensors")
    halves = _read_halves(SafetensorsFile(weights_path), weights_path)
    pairs = {}
    for module, found in halves.items():
        missing = [half for half in "AB" if half not in found]
        if missing:
            raise WeightError(f"{weights_path}: module {module!r} has no lora_{missing[0]}; the adapter is not whole")
        a, b = found["A"], found["B"]
        rank = _setting(config, "rank_pattern", module, config.get("r", 8))
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise WeightError(
                f"{weights_path}: module {module!r} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, but "
                f"{CONFIG_NAME} gives it rank {rank}: lora_A must be [{rank}, in] and lora_B [out, {rank}]"
            )
        alpha = _setting(config, "alpha_pattern", module, config.get("lora_alpha", 8))
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        pairs[_param_of(module, hf_map, prefixes, weights_path)] = LoraPair(a, b, scale)
    return Adapter(
        pairs,
        config.get("base_model_name_or_path"),
        bool(config.get("use_rslora")),
        float(config.get("lora_dropout", 0.0)),
        config,
    )


def write_adapter(folder: str | Path, adapter: Adapter, hf_map: NameMap, num_layers: int) -> None:
    """Writes an adapter that PEFT (and the servers that read its format) loads. A and B are stored in float32.

    ``num_layers``: of the whole model, so that the modules can be named shortly only when no layer is left out.
    """
    folder = Path(folder)
    if not adapter.pairs:
        raise WeightError(f"{folder}: there is no LoRA pair to write")
    modules = {_module_of(param, hf_map): pair for param, pair in adapter.pairs.items()}
    tensors: list[StoredTensor] = []
    for module, pair in sorted(modules.items()):
        tensors.append(from_f32(f"{_PREFIX}{module}.lora_A.weight", pair.a))
        tensors.append(from_f32(f"{_PREFIX}{module}.lora_B.weight", pair.b))
    write_file(folder / WEIGHTS_NAME, tensors)
    write_json(folder / CONFIG_NAME, _config_of(adapter, modules, num_layers))


def _check_config(path: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise WeightError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA adapters can be used")
    for key, value in config.items():
        if key in _IGNORED or value in _OFF:
            continue
        if key in _UNSUPPORTED:
            raise WeightError(
                f"{path}: {key} is {value!r}: {_UNSUPPORTED[key]}; train or convert the adapter without it"
            )
        raise WeightError(
            f"{path}: {key} is {value!r}, which this version does not know and so cannot apply; "
            "update Surogate, or save the adapter without it"
        )
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise WeightError(
            f"{path}: init_lora_weights is {config['init_lora_weights']!r}, which also changes the base weights; "
            "save the adapter with PEFT's path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    for key, pattern, kinds in (("r", "rank_pattern", (int,)), ("lora_alpha", "alpha_pattern", (int, float))):
        patterns = config.get(pattern) or {}
        if not isinstance(patterns, dict):
            raise WeightError(f"{path}: {pattern} is {patterns!r}, not an object of patterns and values")
        for value in [config.get(key, 8), *patterns.values()]:
            if type(value) not in kinds or value <= 0:
                raise WeightError(f"{path}: {key} or {pattern} has {value!r}; it must be a number above zero")


def _setting(config: dict[str, Any], key: str, module: str, default: Any) -> Any:
    """A per-module value: PEFT's patterns are regular expressions that match a whole tail of the module's name."""
    for pattern, value in (config.get(key) or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error as error:
            raise WeightError(
                f"{CONFIG_NAME}: {key} has {pattern!r}, which is not a regular expression: {error}"
            ) from error
    return default


def _read_halves(file: SafetensorsFile, path: Path) -> dict[str, dict[str, np.ndarray]]:
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name in file.names():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise WeightError(
                f"{path}: tensor {name!r} is not of the form {_PREFIX}<module>.lora_A.weight or lora_B.weight; "
                "it would be lost, so the adapter is not used"
            )
        halves.setdefault(match["module"], {})[match["half"]] = file.get(name).to_f32()
    if not halves:
        raise WeightError(f"{path} holds no LoRA tensors; the adapter was saved without its weights")
    return halves


def _param_of(module: str, hf_map: NameMap, prefixes: Mapping[str, str], path: Path) -> str:
    params = hf_map.param_names(with_prefix(module + ".weight", prefixes))
    if len(params) != 1 or not isinstance(hf_map.transform_of(params[0]), Identity):
        reason = "is fused from several of this family's linears" if params else "is not one of this family's linears"
        raise WeightError(f"{path}: module {module!r} {reason}; is the adapter made for another model?")
    return params[0]


def _module_of(param: str, hf_map: NameMap) -> str:
    if not isinstance(hf_map.transform_of(param), Identity) or not param.endswith(".weight"):
        raise WeightError(
            f"parameter {param!r} is no module of its own in Hugging Face's model, so PEFT cannot hold its adapter"
        )
    return hf_map.file_names(param)[0].removesuffix(".weight")


def _config_of(adapter: Adapter, modules: Mapping[str, LoraPair], num_layers: int) -> dict[str, Any]:
    """The keys PEFT needs, with the commonest rank and alpha as the defaults and the others as patterns."""
    ranks = {module: pair.rank for module, pair in modules.items()}
    alphas = {module: _alpha(pair, adapter.use_rslora) for module, pair in modules.items()}
    rank, alpha = _commonest(ranks), _commonest(alphas)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.use_rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": _patterns(ranks, rank),
        "alpha_pattern": _patterns(alphas, alpha),
        "target_modules": _target_modules(set(modules), num_layers),
    }


def _alpha(pair: LoraPair, use_rslora: bool) -> float:
    alpha = pair.scale * (math.sqrt(pair.rank) if use_rslora else pair.rank)
    return round(alpha) if abs(alpha - round(alpha)) < 1e-6 * max(1.0, abs(alpha)) else alpha


def _commonest(values: Mapping[str, Any]) -> Any:
    counts: dict[Any, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    return max(counts, key=lambda value: counts[value])


def _patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Patterns for the modules that differ from the default: the last part of their names where all of it agree."""
    kinds: dict[str, dict[str, Any]] = {}
    for module, value in values.items():
        kinds.setdefault(module.rpartition(".")[2], {})[module] = value
    patterns: dict[str, Any] = {}
    for kind, members in kinds.items():
        if len(set(members.values())) == 1:
            members = {kind: next(iter(members.values()))}
        patterns.update({re.escape(name): value for name, value in members.items() if value != default})
    return patterns


def _target_modules(modules: set[str], num_layers: int) -> list[str]:
    """Last parts of the names where those choose exactly these modules; the full names otherwise.

    PEFT gives an adapter to every module whose name ends in a target, so short names are right only when every layer of
    the model has all of them.
    """
    layers: dict[str, set[str]] = {}
    for module in modules:
        number = re.search(r"\.(\d+)\.", module)
        if number is None:
            return sorted(modules)
        layers.setdefault(number[1], set()).add(module.rpartition(".")[2])
    kinds = set().union(*layers.values())
    return sorted(kinds if len(modules) == num_layers * len(kinds) else modules)
