// Operands whose first axis may have gaps: q, k and v as three column ranges of one product, gate and up as its halves.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

// What `supports` asks of such an operand. has_dense_rows lets the only axis of a vector have gaps; this does not.
inline bool has_packable_rows(const sg_tensor *t) { return t->rank < 2 ? is_dense(t) : has_dense_rows(t); }

// Elements from one index of the first axis to the next; `dense` where there is no gap, or no next index.
inline int64_t row_stride(const sg_tensor *t, int64_t dense) { return is_dense(t) ? dense : t->strides[0]; }

template <class T>
struct Rows {
  T *data;
  int64_t stride;
};
template <class T>
inline Rows<T> rows_of(const sg_tensor *t, int64_t dense) {
  return {data<T>(t), row_stride(t, dense)};
}

// Whether every row can be moved V elements at a time, given that its length is a multiple of V.
template <int V, class T>
inline bool can_pack_rows(const Rows<T> &rows) {
  return can_pack<V>(rows.data, rows.stride);
}

}  // namespace sg::cuda
