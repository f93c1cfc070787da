"""Tiny configurations, one for each variant of the architecture, that the parity harness makes random models of."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
}  # fmt: skip
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_BASE}
QWEN3: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_BASE, "head_dim": 24}

# The original context is shorter than the tiny documents, so that the scaling changes what is computed.
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": {
        "untied": QWEN2,  # the shape of 7B and up
        "tied": {**QWEN2, "tie_word_embeddings": True},  # and of 0.5B to 3B
        "yarn": {**QWEN2, "rope_parameters": YARN_ROPE},
        "windows_tied": {**QWEN2, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5,
                         "max_window_layers": 1, "tie_word_embeddings": True},
    },
    "qwen3": {
        "untied": QWEN3,  # the shape of 8B and up
        "tied": {**QWEN3, "tie_word_embeddings": True},
        "windows_biases": {**QWEN3, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
                           "layer_types": ["sliding_attention", "full_attention"]},
    },
}  # fmt: skip
