"""What published config.json files say beside the shapes: each of their settings is used, or has no bearing on the arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surogate_core.model import LoadedModel
from surogate_llama.families import FAMILIES

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0", "use_cache": True, "vocab_size": 128,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": False, "mlp_bias": False,
        "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "max_position_embeddings": 65536, "max_window_layers": 28, "rms_norm_eps": 1e-6,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
        "pad_token_id": 128004, "pretraining_tp": 2, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
        "use_sliding_window": False,
    },
    "granite-3.3-2b": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_bias": False, "mlp_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000000.0, "tie_word_embeddings": True,
    },
    "MiniCPM4-0.5B": {
        "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "auto_map": {"AutoConfig": "configuration_minicpm"},
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 32, "short_factor": [1.0] * 32,
                         "original_max_position_embeddings": 32768},
        "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "mup_denominator": 32, "tie_word_embeddings": True,
    },
    "ERNIE-4.5-0.3B": {
        "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 18, "pad_token_id": 0,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_scaling": None, "use_bias": False,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    config = {**_COMMON, **PUBLISHED[name]}
    model = LoadedModel.from_architecture(config, FAMILIES)
    h = model.hyperparameters
    assert model.family.name == config["model_type"]
    assert (h.rope_base, h.max_positions) == (float(config["rope_theta"]), config["max_position_embeddings"])
    assert h.tied == config.get("tie_word_embeddings", True)
    assert model.family.from_hf(model.family.hf_config(h)) == h


def test_their_switches():
    models = {name: LoadedModel.from_architecture({**_COMMON, **config}, FAMILIES) for name, config in PUBLISHED.items()}
    h = {name: model.hyperparameters for name, model in models.items()}
    assert h["SmolLM3-3B"].kinds == ("full", "full", "full", "full_nope") * 9
    assert h["granite-3.3-2b"].attention_scale == 1 / 64 and h["granite-3.3-2b"].logit_divisor == 8
    assert h["MiniCPM4-0.5B"].residual_scale == 1.4 / 24**0.5 and h["MiniCPM4-0.5B"].logit_divisor == 4
    assert h["ERNIE-4.5-0.3B"].interleaved and h["ERNIE-4.5-0.3B"].head_dim == 128
    assert h["Mistral-7B-v0.3"].window == 0


@pytest.mark.parametrize(("hidden", "layers", "published"), ((1536, 24, 1_080_632_832), (2048, 42, 2_516_756_480)))
def test_minicpm5_is_a_llama_of_as_many_parameters_as_its_cards_say(hidden, layers, published):
    """16 query heads of 128 on two, untied, MLP three times as wide: what the cards of MiniCPM5-1B and 2B tell, and what follows
    from their counts."""
    config = {
        **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "head_dim": 128,
        "intermediate_size": 3 * hidden, "num_attention_heads": 16, "num_hidden_layers": layers, "num_key_value_heads": 2,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
        "vocab_size": 130560,
    }
    model = LoadedModel.from_architecture(config, FAMILIES)
    assert model.family.name == "llama"
    assert sum(math.prod(each.shape) for _, each in model.dsl().parameters()) == published
