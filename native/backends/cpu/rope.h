// Rotary positions: a token's angles laid out for vectors, and heads that are turned by them.
#pragma once

#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxRotated = 1024;

// Pairs (i, i + half): cosines in angle[0, half), sines in angle[half, 2 half).
template <class X, class Y>
void rotate_halves(const X *x, Y *y, const float *angle, int64_t half) {
  for_vectors(half, [&](int64_t i, int m) SG_FLATTEN {
    const vf cos = vload_upto(angle + i, m), sin = vload_upto(angle + half + i, m);
    const vf a = vload_upto(x + i, m), b = vload_upto(x + half + i, m);
    vstore_upto(y + i, vfnma(b, sin, vmul(a, cos)), m);
    vstore_upto(y + half + i, vfma(a, sin, vmul(b, cos)), m);
  });
}

// n elements, rounded where Y is narrower.
template <class X, class Y>
void copy_row(const X *x, Y *y, int64_t n) {
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(y + i, vload_upto(x + i, m), m); });
}

inline vf vswap_neighbours(vf x) {
#if defined(__AVX512F__)
  return _mm512_permute_ps(x, 0xB1);
#else
  return _mm256_permute_ps(x, 0xB1);
#endif
}

// Pairs (2i, 2i + 1): angle holds each cosine twice, then each sine as (-sin, sin).
template <class X, class Y>
void rotate_neighbours(const X *x, Y *y, const float *angle, int64_t half) {
  for_vectors(2 * half, [&](int64_t i, int m) SG_FLATTEN {
    const vf a = vload_upto(x + i, m);
    const vf turned = vmul(vswap_neighbours(a), vload_upto(angle + 2 * half + i, m));
    vstore_upto(y + i, vfma(a, vload_upto(angle + i, m), turned), m);
  });
}

inline void lay_out(const float *pairs, float sign, bool interleaved, int64_t half, float *angle) {
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

// All heads of one token. y may be x where it is of the same type.
template <class X, class Y>
void rotate_token(const X *x, Y *y, const float *angle, bool interleaved, int64_t heads, int64_t dim, int64_t half) {
  const bool in_place = static_cast<const void *>(x) == static_cast<const void *>(y);
  for (int64_t head = 0; head < heads; ++head, x += dim, y += dim) {
    if (interleaved) {
      rotate_neighbours(x, y, angle, half);
    } else {
      rotate_halves(x, y, angle, half);
    }
    if (!in_place) copy_row(x + 2 * half, y + 2 * half, dim - 2 * half);
  }
}

}  // namespace
}  // namespace sg::cpu::SG_ISA
