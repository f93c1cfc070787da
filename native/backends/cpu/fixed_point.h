// Tokens in fixed point, for products with codes as integers: 15 bits with one power of two for each block of 32, exact where
// a value is no smaller than 2^-7 of its block's largest, off by 2^-15 of that largest at most elsewhere.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

namespace sg::cpu::SG_ISA {

constexpr int64_t kFixedBlock = 32, kFixedWords = 16;  // values of a block, and words that hold them

// A block, or as much of it as `count` says, as integers times a power of two, its step, which is not a number where a value
// is not finite. sum: of the values.
template <int count = kFixedBlock>
inline __m512i to_fixed_point(const bf16 *x, float *step, float *sum) {
  const vf low = vload(x), high = count == kFixedBlock ? vload(x + kLanes) : vzero();
  const vf largest = vmax(_mm512_abs_ps(low), _mm512_abs_ps(high));
  const vf bad = vadd(vmul(low, vzero()), vmul(high, vzero()));  // 0, or NaN in a lane that is not finite
  // 2^13 / 2^e, with e the exponent of the largest, kept within what a float and its reciprocal hold.
  const float e = std::max(_mm512_reduce_max_ps(_mm512_getexp_ps(largest)), -100.0f);
  const vf factor = vexp2_int(vset(13.0f - e));
  const __m512i a = _mm512_cvtps_epi32(vmul(low, factor)), b = _mm512_cvtps_epi32(vmul(high, factor));
  *step = 1.0f / _mm512_cvtss_f32(factor) + vsum(bad);
  *sum = *step * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b), 1);
}

// x = 256 upper + lower, both signed bytes: the 32 upper ones, then the 32 lower ones.
inline __m512i to_digits(__m512i x) {
  const __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(128)), 8);
  const __m512i lower = _mm512_sub_epi16(x, _mm512_slli_epi16(upper, 8));
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(upper)), _mm512_cvtepi16_epi8(lower), 1);
}

// Four vectors to the sum of each.
inline __m128 sum_each(const vf *v) {
  const vf ab = vadd(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const vf cd = vadd(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const vf all = vadd(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

}  // namespace sg::cpu::SG_ISA

#endif
