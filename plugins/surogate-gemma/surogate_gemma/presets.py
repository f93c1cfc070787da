"""Public models of this plugin's families that `surogate bench` and `surogate profile` know by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "head_dim": 256,
    "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
}  # fmt: skip
_SMALL: dict[str, Any] = {**_GEMMA_3, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512,
                          "max_position_embeddings": 32768}

PRESETS: dict[str, dict[str, Mapping[str, Any]]] = {
    "gemma3_text": {
        "gemma3-270m": {**_SMALL, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        "gemma3-1b": {**_SMALL, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
        "gemma3-4b": {
            **_GEMMA_3, "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 1024,
            "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
}
