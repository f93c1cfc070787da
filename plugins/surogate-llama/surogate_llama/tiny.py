"""Tiny configurations, one for each variant of the architecture, that the parity harness makes random models of."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_BASE}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **_BASE}

# Original contexts are shorter than the tiny documents, so that every scaled kind changes what is computed.
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ROPE_TUNED = {**YARN_ROPE, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 1.2}

LLAMA_VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": LLAMA,
    "mha_tied": {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "mqa_wide_heads": {**LLAMA, "num_key_value_heads": 1, "head_dim": 24},
    "attention_bias": {**LLAMA, "attention_bias": True},
    "mlp_bias_tied": {**LLAMA, "mlp_bias": True, "tie_word_embeddings": True},
    "linear_rope": {**LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3_rope": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
    "yarn_rope": {**LLAMA, "rope_parameters": YARN_ROPE},
    "yarn_rope_tuned": {**LLAMA, "rope_parameters": YARN_ROPE_TUNED},
}
MISTRAL_VARIANTS: dict[str, dict[str, Any]] = {
    "window": {**MISTRAL, "sliding_window": 5},
    "no_window": {**MISTRAL, "sliding_window": None},
}
