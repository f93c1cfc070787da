// What the kernels of paged_attention share: the call as they read it, and where a position's key and value lie.
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

struct PagedProblem {
  int heads, group;  // group: query heads of one key-value head
  int head_dim, value_dim;
  int64_t q_stride, key_stride, value_stride, o_stride;  // elements from token to token, or from row to row of a cache
  int64_t sequences, max_blocks, block_size, cache_rows;
  int64_t window;
  float scale, softcap;
};

struct PagedIndices {
  const int32_t *sequence_ids, *positions, *block_tables;
};

// The row of the cache that holds a position, or -1.
__device__ inline int64_t cache_row(const PagedProblem &p, const int32_t *table, int64_t position) {
  const int64_t row = table[position / p.block_size] * p.block_size + position % p.block_size;
  return row >= 0 && row < p.cache_rows ? row : -1;
}

inline PagedProblem paged_problem(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *tables = input(call, 5);
  PagedProblem p;
  p.heads = static_cast<int>(q->shape[1]);
  p.group = static_cast<int>(q->shape[1] / k->shape[1]);
  p.head_dim = static_cast<int>(q->shape[2]);
  p.value_dim = static_cast<int>(v->shape[2]);
  p.q_stride = q->strides[0], p.key_stride = k->strides[0], p.value_stride = v->strides[0];
  p.o_stride = output(call, 0)->strides[0];
  p.sequences = tables->shape[0], p.max_blocks = tables->shape[1];
  p.block_size = attr_int(call, "block_size", 0);
  p.cache_rows = k->shape[0];
  p.window = attr_int(call, "window", 0);
  p.scale = static_cast<float>(attr_float(call, "scale", 0.0));
  p.softcap = static_cast<float>(attr_float(call, "softcap", 0.0));
  return p;
}

// [rows, heads, dim] with dense heads; rows may lie apart.
inline bool is_rows_of_heads(const sg_tensor *t) { return t->rank == 3 && is_activation(t) && has_dense_rows(t); }
inline bool is_index(const sg_tensor *t, int rank) {
  return t != nullptr && t->dtype == SG_I32 && t->rank == rank && is_dense(t);
}

// What every kernel of paged_attention asks of a call.
inline bool paged_supported(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *o = output(call, 0);
  if (!q || !k || !v || !o) return false;
  if (!is_rows_of_heads(q) || !is_rows_of_heads(k) || !is_rows_of_heads(v) || !is_rows_of_heads(o)) return false;
  if (k->dtype != v->dtype || o->dtype != q->dtype || k->shape[0] < 1 || k->shape[1] < 1) return false;
  if (k->shape[0] != v->shape[0] || k->shape[1] != v->shape[1] || k->shape[2] != q->shape[2]) return false;
  if (q->shape[1] % k->shape[1] != 0 || q->shape[1] > 65535) return false;
  if (q->shape[2] < 1 || v->shape[2] < 1 || q->shape[2] > 4096 || v->shape[2] > 4096) return false;
  if (o->shape[0] != q->shape[0] || o->shape[1] != q->shape[1] || o->shape[2] != v->shape[2]) return false;
  if (!is_index(input(call, 3), 1) || !is_index(input(call, 4), 1) || !is_index(input(call, 5), 2)) return false;
  if (input(call, 3)->shape[0] != q->shape[0] || input(call, 4)->shape[0] != q->shape[0]) return false;
  if (attr_int(call, "block_size", 0) < 1 || attr_int(call, "window", 0) < 0) return false;
  return q->shape[0] < INT32_MAX && attr_float(call, "scale", 0.0) > 0.0;
}

inline PagedIndices paged_indices(const sg_call *call) {
  return {data<const int32_t>(input(call, 3)), data<const int32_t>(input(call, 4)),
          data<const int32_t>(input(call, 5))};
}

}  // namespace sg::cuda
