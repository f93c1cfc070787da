// What the forward and the backward kernel share: the operands' dimensions, the columns that a query block is turned
// into, and the masks.
//
// Both work on transposed logits: rows are keys, columns are (token, head) pairs of one key-value head, token-major, so
// that all query heads of a group share every packed block of keys, and every softmax quantity (maximum, sum, lse) is a
// vector over columns. Columns go through in strips of kWidth, whose logits stay in the first-level cache.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention_gemm.h"
#include "kernel.h"

namespace sg::cpu::SG_ISA {

constexpr int kKeyBlock = 128;
constexpr int kMaxColumns = 192;  // of a query block, unless one token has more heads in a group
constexpr int kMaxGroup = 256;    // so also the most columns of a query block

struct AttentionDims {
  int64_t tokens = 0;
  int heads = 0, kv_heads = 0, group = 0, head_dim = 0, value_dim = 0;
  int padded_head_dim = 0, padded_value_dim = 0;
  int query_block = 0;     // tokens
  int padded_columns = 0;  // of a query block
  int causal = 0, window = 0;
  float scale = 0.0f, softcap = 0.0f;

  AttentionDims(const sg_call *call, const sg_tensor *q, const sg_tensor *k, const sg_tensor *v) {
    tokens = q->shape[0];
    heads = static_cast<int>(q->shape[1]);
    kv_heads = static_cast<int>(k->shape[1]);
    group = heads / kv_heads;
    head_dim = static_cast<int>(q->shape[2]);
    value_dim = static_cast<int>(v->shape[2]);
    padded_head_dim = static_cast<int>(round_up(head_dim, kPad));
    padded_value_dim = static_cast<int>(round_up(value_dim, kPad));
    query_block = std::max(1, kMaxColumns / group);
    padded_columns = static_cast<int>(round_up(query_block * group, kPad));
    causal = static_cast<int>(attr_int(call, "causal", 1));
    window = static_cast<int>(std::min<int64_t>(attr_int(call, "window", 0), 1 << 30));
    scale = static_cast<float>(attr_float(call, "scale", 0.0));
    softcap = static_cast<float>(attr_float(call, "softcap", 0.0));
  }

  // Logits in base 2 are logit_factor * (the product, or after `softcap` its capped hyperbolic tangent).
  float logit_factor() const { return (softcap > 0.0f ? softcap : scale) * kLog2e; }
  float tanh_factor() const { return softcap > 0.0f ? scale / softcap : 0.0f; }

  // Key-value positions (of a document of `length` tokens) that queries [begin, end) see: [first_key, end_key).
  int first_key(int begin) const { return window > 0 ? std::max(0, begin - window + 1) / kKeyBlock * kKeyBlock : 0; }
  int end_key(int end, int length) const {
    if (causal) return end;
    return window > 0 ? std::min(length, end - 1 + window) : length;
  }
};

// A tensor [tokens, heads, dim] whose tokens may lie apart, as parts of one fused product do.
inline bool has_dense_heads(const sg_tensor *t) {
  return t->rank == 3 && (t->shape[2] == 1 || t->strides[2] == 1) && (t->shape[1] == 1 || t->strides[1] == t->shape[2]);
}

template <class T>
struct TokenRows {
  T *base;
  int64_t stride;  // from token to token
  int dim;
  explicit TokenRows(const sg_tensor *t)
      : base(static_cast<T *>(t->data)), stride(t->strides[0]), dim(static_cast<int>(t->shape[2])) {}
  T *row(int64_t token, int head) const { return base + token * stride + head * dim; }
  // rows[c] = the row of column c: token0 + c / group, first_head + c % group.
  void columns(T **rows, int64_t token0, int count, int first_head, int group) const {
    T *at = row(token0, first_head);
    for (int c = 0; c < count; c += group, at += stride) {
      for (int g = 0; g < group; ++g) rows[c + g] = at + g * dim;
    }
  }
};

inline bool attention_supported(const sg_call *call, const sg_tensor *q, const sg_tensor *k, const sg_tensor *v) {
  if (q == nullptr || k == nullptr || v == nullptr) return false;
  if (!has_dense_heads(q) || !has_dense_heads(k) || !has_dense_heads(v)) return false;
  if (!is_activation(q) || k->dtype != q->dtype || v->dtype != q->dtype) return false;
  if (k->shape[0] != v->shape[0] || k->shape[1] != v->shape[1] || k->shape[2] != q->shape[2]) return false;
  if (k->shape[1] < 1 || q->shape[1] % k->shape[1] != 0 || q->shape[1] / k->shape[1] > kMaxGroup) return false;
  if (q->shape[2] < 1 || v->shape[2] < 1 || q->shape[2] > 4096 || v->shape[2] > 4096) return false;
  return q->shape[0] < (1 << 24) && attr_float(call, "scale", 0.0) > 0.0 && attr_int(call, "window", 0) >= 0;
}

inline bool is_document_list(const sg_tensor *t) {
  return t->dtype == SG_I32 && t->rank == 1 && t->shape[0] >= 1 && is_dense(t);
}
inline bool is_lse(const sg_tensor *t, const sg_tensor *q) {
  return t->dtype == SG_F32 && t->rank == 2 && t->shape[0] == q->shape[0] && t->shape[1] == q->shape[1] && is_dense(t);
}

// SG_OK if the documents ascend from 0 to T.
inline int32_t check_documents(const sg_call *call, const sg_tensor *doc_starts, int64_t tokens) {
  const int32_t *starts = data<const int32_t>(doc_starts);
  const int64_t last = doc_starts->shape[0] - 1;
  for (int64_t i = 0; i < last; ++i) {
    if (starts[i] > starts[i + 1]) {
      return fail(call, "%s: doc_starts must ascend, but entry %lld is %d and the next %d", call->op,
                  static_cast<long long>(i), starts[i], starts[i + 1]);
    }
  }
  if (starts[0] != 0 || starts[last] != tokens) {
    return fail(call, "%s: doc_starts must run from 0 to the number of tokens, %lld, but runs from %d to %d", call->op,
                static_cast<long long>(tokens), starts[0], starts[last]);
  }
  return SG_OK;
}

// The columns of queries [begin, end) of a document: row pointers, and the range of keys that each may see.
struct Columns {
  int count = 0;      // tokens * group
  int padded = 0;     // to kPad
  float *low, *high;  // [padded_columns]: first and last visible key position, as floats (exact below 2^24)

  explicit Columns(Bump &bump, const AttentionDims &dims)
      : low(bump.take<float>(dims.padded_columns)), high(bump.take<float>(dims.padded_columns)) {}

  void set(const AttentionDims &dims, int begin, int end, int length) {
    count = (end - begin) * dims.group;
    padded = static_cast<int>(round_up(count, kPad));
    int c = 0;
    for (int position = begin; position < end; ++position) {
      const float first = static_cast<float>(dims.window > 0 ? std::max(0, position - dims.window + 1) : 0);
      const float last = static_cast<float>(dims.end_key(position + 1, length) - 1);
      for (int g = 0; g < dims.group; ++g, ++c) low[c] = first, high[c] = last;
    }
    for (; c < padded; ++c) low[c] = low[count - 1], high[c] = high[count - 1];
  }
};

// The part of a key block that a strip of columns sees: rows [begin, end), multiples of kPad, and whether some pairs
// in it are hidden.
struct StripRange {
  int begin = 0, end = 0;
  bool masked = false;

  StripRange(const Columns &columns, int strip, int first_key, int padded_keys) {
    const int last = strip + kWidth - 1;
    const int low = static_cast<int>(columns.low[strip]) - first_key;
    const int high = static_cast<int>(columns.high[last]) - first_key;
    begin = low <= 0 ? 0 : low / kPad * kPad;
    end = std::min(padded_keys, static_cast<int>(round_up(std::max(high + 1, 0), kPad)));
    masked = static_cast<int>(columns.low[last]) - first_key > begin ||
             static_cast<int>(columns.high[strip]) - first_key < end - 1;
  }
  bool empty() const { return end <= begin; }
  int size() const { return end - begin; }
};

// Writes strip columns [0, count) of transposed[dim][kWidth], times factor[column], as rows.
template <class T>
[[gnu::noinline]] inline void store_transposed(T *const *rows, int count, const float *transposed, const float *factor,
                                               int dim) {
  vf tile[kLanes];
  for (int c = 0; c < count; c += kLanes) {
    const vf f = vload(factor + c);
    for (int d = 0; d < dim; d += kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) tile[i] = vmul(vload(transposed + (d + i) * kWidth + c), f);
      transpose_tile(tile);
      if (c + kLanes <= count && d + kLanes <= dim) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store_rounded(rows[c + i] + d, tile[i]);
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          if (c + i < count) vstore_n(rows[c + i] + d, tile[i], std::min(kLanes, dim - d));
        }
      }
    }
  }
}

// logits = tanh(factor * logits), on rows of kWidth.
inline void tanh_rows(float *logits, int rows, float factor) {
  const vf f = vset(factor);
  for (int64_t i = 0; i < static_cast<int64_t>(rows) * kWidth; i += kLanes) {
    vstore(logits + i, vtanh(vmul(vload(logits + i), f)));
  }
}

}  // namespace sg::cpu::SG_ISA
