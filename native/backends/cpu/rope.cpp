// rope(x[T, H, D], positions[T], table[P, R/2, 2]) -> y: each head's first R dims are rotated pair by pair. A token's
// cosines and sines are laid out once and then serve all of its heads. Rows of x and y may lie apart, and y may be x.
#include "rope.h"

namespace sg::cpu::SG_ISA {
namespace {

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *positions = input(call, 1), *table = input(call, 2), *y = output(call, 0);
  if (!x || !positions || !table || !y || x->rank != 3 || !same_shape(x, y)) return 0;
  if (!is_activation(x) || x->dtype != y->dtype || !has_dense_rows(x) || !has_dense_rows(y)) return 0;
  if (positions->dtype != SG_I32 || positions->rank != 1 || positions->shape[0] != x->shape[0]) return 0;
  if (!is_dense(positions) || !is_dense(table) || table->dtype != SG_F32) return 0;
  if (table->rank != 3 || table->shape[2] != 2) return 0;
  const int64_t rotated = 2 * table->shape[1];
  return rotated <= x->shape[2] && rotated <= kMaxRotated ? isa_score(SG_ISA_NAME) : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *table = input(call, 2), *y = output(call, 0);
  const int32_t *positions = data<int32_t>(input(call, 1));
  const int64_t tokens = x->shape[0], heads = x->shape[1], dim = x->shape[2], half = table->shape[1];
  if (int64_t t = find_outside(positions, tokens, table->shape[0]); t >= 0) {
    return fail(call, "position %d of token %lld is outside the table of %lld positions: build a longer table",
                positions[t], static_cast<long long>(t), static_cast<long long>(table->shape[0]));
  }
  const bool interleaved = attr_int(call, "interleaved", 0) != 0;
  const float sign = attr_int(call, "inverse", 0) != 0 ? -1.0f : 1.0f;
  with_type(x, [&]<class T>(T) {
    parallel_rows(call, tokens, heads * dim, [&](int64_t begin, int64_t end) {
      alignas(64) float angle[2 * kMaxRotated];
      for (int64_t t = begin; t < end; ++t) {
        lay_out(data<float>(table) + positions[t] * 2 * half, sign, interleaved, half, angle);
        const T *in = data<T>(x) + t * x->strides[0];
        rotate_token(in, data<T>(y) + t * y->strides[0], angle, interleaved, heads, dim, half);
      }
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("rope", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
