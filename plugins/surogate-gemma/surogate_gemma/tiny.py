"""Tiny configurations, one for each variant of the architecture, that the parity harness makes random models of."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": None,  # transformers gives the embedding of a padding token no gradient, wherever it stands
}  # fmt: skip
GEMMA_1: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", **_BASE, "num_hidden_layers": 2,
}  # fmt: skip
# Caps low enough to bend what these models compute, windows shorter than the longest documents.
GEMMA_2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_BASE, "num_hidden_layers": 2,
    "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
}  # fmt: skip
GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_BASE, "num_hidden_layers": 3,
    "sliding_window": 5, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
}  # fmt: skip

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma": {"wide_heads": {**GEMMA_1, "num_key_value_heads": 1, "head_dim": 24}},
    "gemma2": {"soft_caps": GEMMA_2},
    "gemma3_text": {"local_global": GEMMA_3},
}
