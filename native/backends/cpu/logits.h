// Rows of logits read for probabilities: NaN counts as -infinity, infinity as the largest number, so that differences
// to a row's largest are numbers or -infinity.
#pragma once

#include <cfloat>

#include "best.h"

namespace sg::cpu::SG_ISA {

constexpr int64_t kLogitPiece = 8192;  // elements of a row that one task takes
inline int64_t logit_pieces(int64_t width) { return (width + kLogitPiece - 1) / kLogitPiece; }

// The first n elements at p, -infinity in the other lanes. max and min return their second operand where one is NaN.
template <class T>
SG_FLATTEN inline vf load_logits(const T *p, int n) {
  vf x = vload_upto(p, n);
  if (n < kLanes) {
    float lanes[kLanes];
    vstore(lanes, vset(-INFINITY));
    vstore_n(lanes, x, n);
    x = vload(lanes);
  }
  return vmin(vmax(x, vset(-INFINITY)), vset(FLT_MAX));
}

// What a row's probabilities are made of: e^((x - most) * factor).
struct Softmax {
  float most, factor;
  SG_FLATTEN vf weights(vf x) const { return vexp(vmul(vsub(x, vset(most)), vset(factor))); }
};

// step(i, x, weights) for every vector of a piece; returns the sum of the weights. Partial sums are short, so that the
// sum is good to about 1e-7.
template <class T, class Step>
inline double sum_weights(const T *p, int64_t n, Softmax softmax, Step &&step) {
  constexpr int64_t kShort = 1024;
  double sum = 0.0;
  for (int64_t begin = 0; begin < n; begin += kShort) {
    vf part = vzero();
    for_vectors(n - begin < kShort ? n - begin : kShort, [&](int64_t i, int m) SG_FLATTEN {
      const vf x = load_logits(p + begin + i, m), weights = softmax.weights(x);
      part = vadd(part, weights);
      step(begin + i, x, weights);
    });
    sum += vsum(part);
  }
  return sum;
}

inline uint32_t at_least(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
#endif
}
// Lanes of `value` where a >= b, else 0.
inline vf where_at_least(vf a, vf b, vf value) {
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_GE_OQ), value);
#else
  return _mm256_and_ps(value, _mm256_cmp_ps(a, b, _CMP_GE_OQ));
#endif
}
inline uint32_t above(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
#endif
}

}  // namespace sg::cpu::SG_ISA
