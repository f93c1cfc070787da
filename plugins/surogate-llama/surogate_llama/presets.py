"""Public models of this plugin's families that `surogate bench` and `surogate profile` know by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_LLAMA3: dict[str, Any] = {**_LLAMA, "vocab_size": 128256, "max_position_embeddings": 131072, "head_dim": 128}


def _llama3_rope(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    return {"rope_theta": 500000.0, "rope_scaling": scaling}


PRESETS: dict[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA3, **_llama3_rope(8.0), "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        **_LLAMA3, **_llama3_rope(32.0), "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **_LLAMA3, **_llama3_rope(32.0), "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        **_LLAMA, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    },
}
"""`tiny` is of no public model: it shows in a second that everything runs."""
