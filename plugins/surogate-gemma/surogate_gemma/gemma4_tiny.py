"""Tiny configurations of Gemma 4 that the parity harness makes random models of."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 5, "max_position_embeddings": 64, "final_logit_softcapping": 4.0,
    "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    "pad_token_id": None,  # transformers gives the embedding of a padding token no gradient, wherever it stands
}  # fmt: skip
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"

SHARED: dict[str, Any] = {
    **_BASE, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 5,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160, "layer_types": [_LOCAL, _LOCAL, _GLOBAL, _LOCAL, _GLOBAL],
}  # fmt: skip
UNIFIED: dict[str, Any] = {
    **_BASE, "architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text", "num_hidden_layers": 2,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "layer_types": [_LOCAL, _GLOBAL],
}  # fmt: skip

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4_text": {"shared_keys": SHARED},
    "gemma4_unified_text": {"keys_are_values": UNIFIED},
}
