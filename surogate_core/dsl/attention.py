"""Grouped-query attention with rotary positions, optional QK-norm, biases, sliding window and soft-cap."""

from __future__ import annotations

from .layers import Linear, RMSNorm
from .module import Module
from .rope import RopeSpec
from .tensor import Tensor


class Attention(Module):
    """Self-attention over the documents of a packed batch.

    hidden_size -> num_heads x head_dim queries, num_kv_heads x head_dim keys and values -> hidden_size.
    rope: rotary table to use, or None for a layer without positions. query_rope: that of queries, where it is another than
    that of keys. rope_interleaved: pairs that turn are neighbours, not the same places of a head's halves. causal: a token
    sees none that come after it; False: it sees as far ahead as back. window: 0, or how many tokens back a token sees,
    itself included. qk_norm_eps: RMSNorm over each head of q and k before the rotation when given. v_norm_eps: the same of
    v, without a weight. value_is_key: values are made of what k projects, and there is no projection for them.
    kv_to: layers behind this one may read its keys and values under this name of the flow. kv_from: the name under which
    this layer reads those of one before it; it has none of its own.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, rope: RopeSpec | None, *,
        query_rope: RopeSpec | None = None, rope_interleaved: bool = False, causal: bool = True, window: int = 0,
        softcap: float = 0.0, softmax_scale: float | None = None, qkv_bias: bool = False, out_bias: bool = False,
        qk_norm_eps: float | None = None, qk_norm_unit_offset: bool = False, v_norm_eps: float | None = None,
        value_is_key: bool = False, kv_to: str | None = None, kv_from: str | None = None, init_std: float = 0.02,
    ) -> None:
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.rope_spec, self.query_rope_spec, self.rope_interleaved = rope, query_rope or rope, rope_interleaved
        self.causal, self.window, self.softcap = causal, window, softcap
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.kv_to, self.kv_from = kv_to, kv_from
        self.q = Linear(hidden_size, num_heads * head_dim, "attn.q", qkv_bias, init_std)
        if kv_from is None:
            self.k = Linear(hidden_size, num_kv_heads * head_dim, "attn.k", qkv_bias, init_std)
            if not value_is_key:
                self.v = Linear(hidden_size, num_kv_heads * head_dim, "attn.v", qkv_bias, init_std)
        self.o = Linear(num_heads * head_dim, hidden_size, "attn.o", out_bias, init_std)
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, qk_norm_unit_offset)
            if kv_from is None:
                self.k_norm = RMSNorm(head_dim, qk_norm_eps, qk_norm_unit_offset)
        if v_norm_eps is not None and kv_from is None:
            self.v_norm = RMSNorm(head_dim, v_norm_eps, weight=False)

    def forward(self, x: Tensor) -> Tensor:
        flow = self.context.flow
        q = self.q(x).reshape("T", self.num_heads, self.head_dim)
        if self.kv_from is None:
            q, k, v = self._with_own(q, x)
        else:
            q = self._rotate(self.q_norm(q) if hasattr(self, "q_norm") else q, self.query_rope_spec)
            k, v = flow[f"{self.kv_from}.k"], flow[f"{self.kv_from}.v"]
        if self.kv_to is not None:
            flow[f"{self.kv_to}.k"], flow[f"{self.kv_to}.v"] = k, v
        out, _ = self.context.op(
            "attention", q, k, v, self.context.doc_starts, scale=self.softmax_scale, causal=int(self.causal),
            window=self.window, softcap=self.softcap, max_length=self.context.max_positions, label="attention",
        )
        return self.o(out.reshape("T", self.num_heads * self.head_dim))

    def _with_own(self, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention reads them."""
        k = self.k(x).reshape("T", self.num_kv_heads, self.head_dim)
        v = self.v(x).reshape("T", self.num_kv_heads, self.head_dim) if hasattr(self, "v") else k
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if hasattr(self, "v_norm"):
            v = self.v_norm(v)
        return self._rotate(q, self.query_rope_spec), self._rotate(k, self.rope_spec), v

    def _rotate(self, heads: Tensor, spec: RopeSpec | None) -> Tensor:
        if spec is None:
            return heads
        table = self.context.rope_table(spec)
        interleaved = int(self.rope_interleaved)
        return self.context.op("rope", heads, self.context.positions, table, interleaved=interleaved, label="rope")
