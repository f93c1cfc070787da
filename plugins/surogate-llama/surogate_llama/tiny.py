"""Tiny configurations, one for each variant of the architecture, that the parity harness makes random models of."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": None,  # of families whose own is outside of this vocabulary
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
# Layers that go without positions: as published, and sliding where positions are missing.
SMOLLM3: dict[str, Any] = {**_BASE, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "tie_word_embeddings": True}
SMOLLM3_VARIANTS: dict[str, dict[str, Any]] = {
    # Every fourth layer, as GGUF files have it; narrow, so that rounding is not blown up by the updates of a deep model.
    "nope": {**SMOLLM3, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16},
    "nope_window": {**SMOLLM3, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 5},
}
GRANITE: dict[str, Any] = {
    **_BASE, "architectures": ["GraniteForCausalLM"], "model_type": "granite", "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22, "logits_scaling": 3.0, "attention_multiplier": 0.125,
}  # fmt: skip
MINISTRAL = {**_BASE, "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "head_dim": 16,
             "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
# Queries begin to grow within the documents.
MINISTRAL3 = {**_BASE, "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 16,
              "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                                  "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}}
# Every fourth layer sees everything, from the first on.
CWM = {**_BASE, "architectures": ["CwmForCausalLM"], "model_type": "cwm", "sliding_window": 5, "bos_token_id": 1,
       "rope_parameters": LLAMA3_ROPE}
HELIUM = {**_BASE, "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 16}
IQUESTCODER = {**_BASE, "architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder"}
ERNIE = {**_BASE, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 24}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": LLAMA_VARIANTS,
    "mistral": MISTRAL_VARIANTS,
    "ministral": {"layer_types": MINISTRAL},
    "smollm3": SMOLLM3_VARIANTS,
    "granite": {"multipliers": GRANITE},
    "ernie4_5": {"interleaved": ERNIE},
    "ministral3": {"growing_queries": MINISTRAL3},
    "cwm": {"windows": CWM},
    "helium": {"interleaved": HELIUM},
    "iquestcoder": {"llama": IQUESTCODER},
}
"""Of families that `transformers` has and whose arithmetic is not that of another one here."""
