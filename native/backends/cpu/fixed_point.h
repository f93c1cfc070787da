// Tokens in fixed point, for products with codes as integers: 15 bits with one power of two for each block of 32 (or for as
// many as share one), exact where a value is no smaller than 2^-7 of its block's largest, off by 2^-15 of that largest at most
// elsewhere.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

namespace sg::cpu::SG_ISA {

constexpr int64_t kFixedBlock = 32, kFixedWords = 16;  // values of a block, and words that hold them

// What a block's values are multiplied by to be integers, a power of two, and its reciprocal, which is not a number where a
// value is not finite.
struct FixedStep {
  float factor, step;
};

// Of `count` values, a multiple of 16.
inline FixedStep fixed_step(const bf16 *x, int64_t count) {
  vf largest = vzero(), bad = vzero();  // bad: 0, or NaN in a lane that is not finite
  for (int64_t i = 0; i < count; i += kLanes) {
    const vf v = vload(x + i);
    largest = vmax(largest, _mm512_abs_ps(v));
    bad = vadd(bad, vmul(v, vzero()));
  }
  // 2^13 / 2^e, with e the exponent of the largest, kept within what a float and its reciprocal hold.
  const float e = std::max(_mm512_reduce_max_ps(_mm512_getexp_ps(largest)), -100.0f);
  const float factor = _mm512_cvtss_f32(vexp2_int(vset(13.0f - e)));
  return {factor, 1.0f / factor + vsum(bad)};
}

// Values as integers. sum: of these, as a number.
template <int count = kFixedBlock>
inline __m512i to_fixed_point(const bf16 *x, float factor, float *sum) {
  const vf low = vload(x), high = count == kFixedBlock ? vload(x + kLanes) : vzero();
  const __m512i a = _mm512_cvtps_epi32(vmul(low, vset(factor))), b = _mm512_cvtps_epi32(vmul(high, vset(factor)));
  *sum = static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(a, b)));
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b), 1);
}

// A block by itself, its step, and the sum of its values.
inline __m512i to_fixed_point(const bf16 *x, float *step, float *sum) {
  const FixedStep fixed = fixed_step(x, kFixedBlock);
  const __m512i values = to_fixed_point<>(x, fixed.factor, sum);
  *step = fixed.step;
  *sum *= fixed.step;
  return values;
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
