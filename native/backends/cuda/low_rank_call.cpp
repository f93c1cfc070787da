#include "low_rank_call.h"

namespace sg::cuda::low_rank {
namespace {

bool is_matrix(const sg_tensor *t, int64_t rows, int64_t columns, int32_t dtype) {
  return t != nullptr && t->rank == 2 && t->dtype == dtype && t->shape[0] == rows && t->shape[1] == columns &&
         has_dense_rows(t);
}

sg_tensor columns_of(const sg_tensor *t, int64_t first, int64_t count) {
  sg_tensor part = *t;
  part.data = static_cast<char *>(t->data) + first * (t->dtype == SG_F32 ? 4 : 2);
  part.strides[0] = row_stride(*t);
  part.shape[1] = count;
  return part;
}

}  // namespace

bool read_call(const sg_call *call, Call *c) {
  const sg_tensor *dy = input(call, 0), *low = input(call, 1), *dlow = output(call, 0);
  if (dy == nullptr || dy->rank != 2 || !is_activation(dy) || input(call, 2) == nullptr || input(call, 2)->rank != 2) {
    return false;
  }
  c->tokens = dy->shape[0], c->rank = input(call, 2)->shape[1], c->branches = 0;
  while (c->branches < kMostBranches && input(call, 2 + c->branches) != nullptr) ++c->branches;
  if (!is_matrix(low, c->tokens, c->branches * c->rank, dy->dtype) || !has_dense_rows(dy) ||
      !is_matrix(dlow, c->tokens, c->branches * c->rank, dy->dtype)) {
    return false;
  }
  int64_t first = 0;
  for (int i = 0; i < c->branches; ++i) {
    const sg_tensor *b = input(call, 2 + i), *db = output(call, 1 + i);
    if (b->rank != 2 || !is_matrix(b, b->shape[0], c->rank, dy->dtype) ||
        !is_matrix(db, b->shape[0], c->rank, SG_F32)) {
      return false;
    }
    const int64_t features = b->shape[0];
    if (first + features > dy->shape[1]) return false;
    c->branch[i] = {columns_of(dy, first, features),  *b, columns_of(low, i * c->rank, c->rank),
                    columns_of(dlow, i * c->rank, c->rank), *db, c->tokens, features, c->rank};
    first += features;
  }
  return first == dy->shape[1];
}

}  // namespace sg::cuda::low_rank
