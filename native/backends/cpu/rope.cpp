// rope(x[T, H, D], positions[T], table[P, R/2, 2]) -> y: each head's first R dims are rotated pair by pair. A token's
// cosines and sines are laid out once and then serve all of its heads. Rows of x and y may lie apart, and y may be x.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxRotated = 1024;

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

// Pairs (i, i + half): cosines in angle[0, half), sines in angle[half, 2 half).
template <class T>
void rotate_halves(const T *x, T *y, const float *angle, int64_t half) {
  for_vectors(half, [&](int64_t i, int m) SG_FLATTEN {
    const vf cos = vload_upto(angle + i, m), sin = vload_upto(angle + half + i, m);
    const vf a = vload_upto(x + i, m), b = vload_upto(x + half + i, m);
    vstore_upto(y + i, vfnma(b, sin, vmul(a, cos)), m);
    vstore_upto(y + half + i, vfma(a, sin, vmul(b, cos)), m);
  });
}

inline vf vswap_neighbours(vf x) {
#if defined(__AVX512F__)
  return _mm512_permute_ps(x, 0xB1);
#else
  return _mm256_permute_ps(x, 0xB1);
#endif
}

// Pairs (2i, 2i + 1): angle holds each cosine twice, then each sine as (-sin, sin).
template <class T>
void rotate_neighbours(const T *x, T *y, const float *angle, int64_t half) {
  for_vectors(2 * half, [&](int64_t i, int m) SG_FLATTEN {
    const vf a = vload_upto(x + i, m);
    const vf turned = vmul(vswap_neighbours(a), vload_upto(angle + 2 * half + i, m));
    vstore_upto(y + i, vfma(a, vload_upto(angle + i, m), turned), m);
  });
}

void lay_out(const float *pairs, float sign, bool interleaved, int64_t half, float *angle) {
  for (int64_t i = 0; i < half; ++i) {
    const float cos = pairs[2 * i], sin = sign * pairs[2 * i + 1];
    if (interleaved) {
      angle[2 * i] = angle[2 * i + 1] = cos;
      angle[2 * half + 2 * i] = -sin;
      angle[2 * half + 2 * i + 1] = sin;
    } else {
      angle[i] = cos;
      angle[half + i] = sin;
    }
  }
}

template <class T>
void rotate_token(const T *x, T *y, const float *angle, bool interleaved, int64_t heads, int64_t dim, int64_t half) {
  for (int64_t head = 0; head < heads; ++head, x += dim, y += dim) {
    if (interleaved) {
      rotate_neighbours(x, y, angle, half);
    } else {
      rotate_halves(x, y, angle, half);
    }
    const size_t passed = static_cast<size_t>(dim - 2 * half) * sizeof(T);
    if (x != y && passed > 0) std::memcpy(y + 2 * half, x + 2 * half, passed);
  }
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
