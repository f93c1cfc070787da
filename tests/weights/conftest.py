"""A tiny Llama in a family's terms: its maps, its configuration, random weights."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from surogate_core.weights.name_map import NameMap, Rule
from surogate_core.weights.tensor import StoredTensor, from_f32
from surogate_core.weights.transforms import Identity, PermuteRope

_LAYER = (  # ours, GGUF, Hugging Face
    ("attn_norm", "attn_norm", "input_layernorm"),
    ("attn.q", "attn_q", "self_attn.q_proj"),
    ("attn.k", "attn_k", "self_attn.k_proj"),
    ("attn.v", "attn_v", "self_attn.v_proj"),
    ("attn.o", "attn_output", "self_attn.o_proj"),
    ("mlp_norm", "ffn_norm", "post_attention_layernorm"),
    ("mlp.gate", "ffn_gate", "mlp.gate_proj"),
    ("mlp.up", "ffn_up", "mlp.up_proj"),
    ("mlp.down", "ffn_down", "mlp.down_proj"),
)
_TOP = (
    ("embed", "token_embd", "model.embed_tokens"),
    ("final_norm", "output_norm", "model.norm"),
    ("lm_head", "output", "lm_head"),
)
_TIED = {"lm_head.weight": "embed.weight"}


@dataclass
class TinyLlama:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    inner: int = 96
    layers: int = 2
    vocab: int = 128
    tied: bool = False
    hf_map: NameMap = field(init=False)
    gguf_map: NameMap = field(init=False)

    def __post_init__(self) -> None:
        permute = {
            "attn.q": PermuteRope(self.heads, self.head_dim),
            "attn.k": PermuteRope(self.kv_heads, self.head_dim),
        }
        ours, gguf, hf = "layers.{layer}.", "blk.{layer}.", "model.layers.{layer}."
        top_gguf = [Rule(a + ".weight", b + ".weight") for a, b, _ in _TOP]
        top_hf = [Rule(a + ".weight", c + ".weight") for a, _, c in _TOP]
        self.gguf_map = NameMap(
            top_gguf
            + [Rule(f"{ours}{a}.weight", f"{gguf}{b}.weight", permute.get(a, Identity())) for a, b, _ in _LAYER],
            _TIED,
        )
        self.hf_map = NameMap(top_hf + [Rule(f"{ours}{a}.weight", f"{hf}{c}.weight") for a, _, c in _LAYER], _TIED)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "attn_norm": (self.hidden,), "attn.q": (q, self.hidden), "attn.k": (kv, self.hidden), "attn.v": (kv, self.hidden),
            "attn.o": (self.hidden, q), "mlp_norm": (self.hidden,), "mlp.gate": (self.inner, self.hidden),
            "mlp.up": (self.inner, self.hidden), "mlp.down": (self.hidden, self.inner),
        }  # fmt: skip
        shapes = {"embed.weight": (self.vocab, self.hidden), "final_norm.weight": (self.hidden,)}
        shapes |= {f"layers.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in layer.items()}
        return shapes if self.tied else {**shapes, "lm_head.weight": (self.vocab, self.hidden)}

    def params(self, seed: int = 0, dtype: str = "f32") -> dict[str, StoredTensor]:
        rng = np.random.default_rng(seed)
        return {
            name: from_f32(name, rng.normal(0, 0.2, shape).astype(np.float32), dtype if len(shape) > 1 else "f32")
            for name, shape in self.shapes().items()
        }

    def config(self) -> dict:
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": self.tied,
        }  # fmt: skip


@pytest.fixture
def tiny() -> TinyLlama:
    return TinyLlama()
