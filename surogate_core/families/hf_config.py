"""config.json of a decoder <-> hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dsl.rope import KINDS, RopeSpec, inverse_frequencies
from ..errors import WeightError
from .decoder import DecoderHyperparameters
from .rope_factors import llama3_of_factors

ROPE_TYPES = tuple(kind for kind in KINDS if kind != "factors")
"""Kinds of scaling that config.json has a name for."""


class HFConfig:
    """A config.json being read. Every method raises WeightError naming the key that is missing or says what the family does
    not have.

    config: the mapping. model_type: what errors call the model. defaults: what `transformers` takes for a key that is left
    out. A key that is null counts as left out.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.config, self.model_type, self.defaults = config, model_type, defaults or {}

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, else that of ``defaults``, else ``default``."""
        for found in (self.config.get(key), None if key in self.config else self.defaults.get(key)):
            if found is not None:
                return found
        return default

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above zero. The key must be there where ``default`` is None."""
        value = self.get(key, default)
        if value is None:
            raise WeightError(f"config.json lacks {key!r}, which a {self.model_type} model needs")
        if type(value) is not int or value < 1:
            raise WeightError(f"config.json: {key} is {value!r}, not a whole number above zero")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise WeightError(f"config.json lacks {key!r}, which a {self.model_type} model needs")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WeightError(f"config.json: {key} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise WeightError(f"config.json: {key} is {value!r}, neither true nor false")
        return value

    def only(self, key: str, *values: Any) -> None:
        """The key changes the arithmetic in a way that the family does not have: it may be left out, or say one of ``values``,
        which mean "not so"."""
        if key in self.config and self.config[key] not in values:
            expected = " or ".join(repr(value) for value in values)
            raise WeightError(
                f"config.json: {key} is {self.config[key]!r}; a {self.model_type} model here can only have {expected}"
            )

    def layer_types(self, known: tuple[str, ...], num_layers: int, default: list[str]) -> list[str]:
        """The kind of each layer, "layer_types", or ``default`` where that is left out."""
        types = self.get("layer_types", default)
        if len(types) != num_layers:
            raise WeightError(f"config.json: layer_types names {len(types)} layers, num_hidden_layers {num_layers}")
        for each in types:
            if each not in known:
                raise WeightError(f"config.json: layer_types has {each!r}; a {self.model_type} model here has {', '.join(known)}")
        return list(types)

    def rope(self, head_dim: int, max_positions: int, layer_type: str | None = None, base: float = 10000.0) -> dict[str, Any]:
        """Fields rope_base, rope_dims and rope_scaling, from "rope_parameters" (transformers 5) or "rope_scaling" and
        "rope_theta" (before). layer_type: whose parameters, where they may differ by layer. base: where none is given."""
        key = "rope_parameters" if self.config.get("rope_parameters") else "rope_scaling"
        rope = dict(self.config.get(key) or {})
        if any(isinstance(value, Mapping) for value in rope.values()):
            if layer_type is None:
                raise WeightError(
                    f"config.json: {key} differs by layer ({', '.join(rope)}), which this architecture does not have"
                )
            rope = dict(rope.get(layer_type) or {})
        older = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or older or "default"
        if rope["rope_type"] not in ROPE_TYPES:
            raise WeightError(
                f"config.json: {key} has rope_type {rope['rope_type']!r}, which is not known here; known are "
                f"{', '.join(ROPE_TYPES)}"
            )
        if rope["rope_type"] in ("llama3", "yarn", "longrope"):
            rope.setdefault("original_max_position_embeddings", max_positions)
            if self.config.get("original_max_position_embeddings"):  # where some families say it, which then holds
                rope["original_max_position_embeddings"] = self.config["original_max_position_embeddings"]
        partial = float(rope.pop("partial_rotary_factor", None) or self.config.get("partial_rotary_factor") or 1.0)
        if rope["rope_type"] == "proportional":  # every pair has its place, also those that do not turn
            rope["partial_rotary_factor"], partial = partial, 1.0
        base = float(rope.pop("rope_theta", None) or self.config.get("rope_theta") or base)
        fields = {"rope_base": base, "rope_dims": int(head_dim * partial),
                  "rope_scaling": rope if rope["rope_type"] != "default" else {}}
        _check_rope(fields, head_dim, max_positions)
        return fields


def _check_rope(fields: Mapping[str, Any], head_dim: int, max_positions: int) -> None:
    dims = fields["rope_dims"]
    if head_dim % 2 or dims % 2 or not 0 < dims <= head_dim:
        raise WeightError(f"config.json: {dims} of {head_dim} dimensions cannot be rotated in pairs")
    try:
        inverse_frequencies(RopeSpec(head_dim, fields["rope_base"], dims, fields["rope_scaling"], max_positions))
    except (ValueError, TypeError) as error:
        raise WeightError(f"config.json: {error}") from error


def read_hf_decoder(config: HFConfig, activation: tuple[str, ...] = ("silu",), tied: bool = False) -> dict[str, Any]:
    """Fields of `DecoderHyperparameters`, rotary ones apart (see `HFConfig.rope`). activation: what hidden_act may be. tied: what
    is meant where tie_word_embeddings is left out."""
    config.only("hidden_act", *activation)
    config.only("attention_dropout", None, 0, 0.0)
    config.only("quantization_config", None)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", heads)
    if heads % num_kv_heads:
        raise WeightError(f"config.json: {heads} num_attention_heads cannot share {num_kv_heads} num_key_value_heads evenly")
    return {
        "vocab_size": config.count("vocab_size"),
        "hidden_size": hidden,
        "num_layers": config.count("num_hidden_layers"),
        "max_positions": config.count("max_position_embeddings"),
        "tied": config.flag("tie_word_embeddings", tied),
        "intermediate_size": config.count("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": config.count("head_dim", hidden // heads),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "init_std": config.number("initializer_range", 0.02),
    }


def write_hf_decoder(
    h: DecoderHyperparameters, model_type: str, architecture: str, activation: str = "silu"
) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read, rotary settings apart (see `write_hf_rope`)."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": h.vocab_size,
        "hidden_size": h.hidden_size,
        "intermediate_size": h.intermediate_size,
        "num_hidden_layers": h.num_layers,
        "num_attention_heads": h.num_heads,
        "num_key_value_heads": h.num_kv_heads,
        "head_dim": h.head_dim,
        "hidden_act": activation,
        "max_position_embeddings": h.max_positions,
        "rms_norm_eps": h.norm_eps,
        "tie_word_embeddings": h.tied,
        "initializer_range": h.init_std,
        "use_cache": True,
    }


def write_hf_rope(spec: RopeSpec) -> dict[str, Any]:
    """The rotary keys in the spelling that transformers 4 and 5 both know. WeightError for factors of a GGUF file that
    config.json has no name for."""
    config: dict[str, Any] = {"rope_theta": spec.base}
    if spec.dims != spec.head_dim:
        config["partial_rotary_factor"] = spec.dims / spec.head_dim
    if spec.kind == "factors":
        found = llama3_of_factors(spec)
        if found is None:
            raise WeightError(
                "the rotary frequency factors of this model (rope_freqs.weight in its GGUF) are not those of a Llama 3 "
                "scaling, so config.json cannot name them",
                "Export it to GGUF, which keeps the factors.",
            )
        config["rope_scaling"] = found
    elif spec.scaling:
        config["rope_scaling"] = dict(spec.scaling)
    return config
