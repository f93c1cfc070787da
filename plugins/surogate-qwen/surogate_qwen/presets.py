"""Public models of this plugin's families that `surogate bench` and `surogate profile` know by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED: dict[str, Any] = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN25: dict[str, Any] = {**_SHARED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
                           "max_position_embeddings": 32768}
_QWEN3: dict[str, Any] = {**_SHARED, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
                          "num_key_value_heads": 8, "max_position_embeddings": 40960}

PRESETS: dict[str, dict[str, Mapping[str, Any]]] = {
    "qwen2": {
        "qwen2.5-0.5b": {
            **_QWEN25, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
        "qwen2.5-7b": {
            **_QWEN25, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
    },
    "qwen3": {
        "qwen3-0.6b": {
            **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "qwen3-1.7b": {
            **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
        "qwen3-4b": {
            **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
        "qwen3-8b": {
            **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    },
}
"""By family."""
