"""The Tidy family: from a checkpoint's config.json to the model, and names of its weights in safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from surogate_core.dsl import Family
from surogate_core.errors import WeightError
from surogate_core.weights.name_map import NameMap, Rule

from .model import TidyHyperparameters, TidyModel

# config.json's name of each hyperparameter whose name differs.
HF_KEYS = {"num_layers": "num_hidden_layers", "max_positions": "max_position_embeddings", "tied": "tie_word_embeddings"}
# What any config.json may say beside the hyperparameters, without a bearing on the model.
IGNORED = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id",
           "eos_token_id", "pad_token_id", "_name_or_path"}  # fmt: skip


class TidyFamily(Family):
    """Llama-like decoders whose MLP is down(max(up(x), 0)^2)."""

    name = "tidy"
    architectures = ("TidyForCausalLM",)

    def from_hf(self, config: Mapping[str, Any]) -> TidyHyperparameters:
        names = {HF_KEYS.get(field.name, field.name): field.name for field in fields(TidyHyperparameters)}
        for key in config:
            if key not in names and key not in IGNORED:
                raise WeightError(f"config.json: a Tidy model has no setting {key!r}", f"It has {', '.join(names)}.")
        for field in fields(TidyHyperparameters):
            key = HF_KEYS.get(field.name, field.name)
            if field.default is MISSING and key not in config:
                raise WeightError(f"config.json lacks {key!r}")
        return TidyHyperparameters(**{name: config[key] for key, name in names.items() if key in config})

    def model(self, hyperparameters: TidyHyperparameters) -> TidyModel:
        return TidyModel(hyperparameters)

    def hf_names(self, hyperparameters: TidyHyperparameters) -> NameMap:
        ours, theirs = "layers.{layer}.", "model.layers.{layer}."
        rules = [
            Rule("embed.weight", "model.embed_tokens.weight"),
            Rule("final_norm.weight", "model.norm.weight"),
            Rule("lm_head.weight", "lm_head.weight", optional=True),
            Rule(ours + "attn_norm.weight", theirs + "input_layernorm.weight"),
            Rule(ours + "mlp_norm.weight", theirs + "post_attention_layernorm.weight"),
        ]
        rules += [Rule(f"{ours}attn.{p}.weight", f"{theirs}self_attn.{p}_proj.weight") for p in "qkvo"]
        rules += [Rule(f"{ours}mlp.{p}.weight", f"{theirs}mlp.{p}_proj.weight") for p in ("up", "down")]
        return NameMap(rules, tied={"lm_head.weight": "embed.weight"} if hyperparameters.tied else None)

    def hf_config(self, hyperparameters: TidyHyperparameters) -> dict[str, Any]:
        settings = {HF_KEYS.get(f.name, f.name): getattr(hyperparameters, f.name) for f in fields(hyperparameters)}
        return {"architectures": list(self.architectures), "model_type": self.name, **settings}


TIDY = TidyFamily()
