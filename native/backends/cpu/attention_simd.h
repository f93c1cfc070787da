// Vector helpers of the attention kernels: base-2 exponentials, range masks and in-register transposes.
#pragma once

#include "simd.h"

namespace sg::cpu::SG_ISA {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

inline constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// 2^t for t <= 127, to 2 ulp; below -125 it gives 2^-125, which stands for zero here. NaN stays NaN. The polynomial is
// the degree-6 Taylor series of 2^r on [-0.5, 0.5] (truncation below 1.2e-7 of the result); 2^0 is exactly 1.
inline vf vexp2(vf t) {
  t = vmax(vset(-125.0f), t);  // a NaN in the second operand is kept
  vf n = vround(t);
  vf r = vsub(t, n);
  vf p = vset(1.540353039338161e-4f);
  p = vfma(p, r, vset(1.333355814642844e-3f));
  p = vfma(p, r, vset(9.618129107628477e-3f));
  p = vfma(p, r, vset(5.550410866482158e-2f));
  p = vfma(p, r, vset(2.402265069591007e-1f));
  p = vfma(p, r, vset(6.931471805599453e-1f));
  p = vfma(p, r, vset(1.0f));
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23)));
#else
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
#endif
}

// x where low <= key <= high, otherwise `other`.
inline vf vwithin(vf x, vf key, vf low, vf high, vf other) {
#if defined(__AVX512F__)
  __mmask16 in = _mm512_cmp_ps_mask(low, key, _CMP_LE_OQ) & _mm512_cmp_ps_mask(key, high, _CMP_LE_OQ);
  return _mm512_mask_mov_ps(other, in, x);
#else
  vf in = _mm256_and_ps(_mm256_cmp_ps(low, key, _CMP_LE_OQ), _mm256_cmp_ps(key, high, _CMP_LE_OQ));
  return _mm256_blendv_ps(other, x, in);
#endif
}

inline bool vall_one(vf x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x, vset(1.0f), _CMP_EQ_OQ) == 0xffff;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(x, vset(1.0f), _CMP_EQ_OQ)) == 0xff;
#endif
}

// The first and the second bf16 of every 32-bit lane.
inline vf low_bf16(vf pairs) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
#else
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
#endif
}
inline vf high_bf16(vf pairs) {
#if defined(__AVX512F__)
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(-65536)));
#else
  return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(-65536)));
#endif
}

// vstore, by the processor's own conversion to bf16 where it has one (it reads denormals as zero).
inline void store_rounded(float *p, vf v) { vstore(p, v); }
inline void store_rounded(bf16 *p, vf v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), (__m256i)_mm512_cvtneps_pbh(v));
#else
  vstore(p, v);
#endif
}

// tile[i] lane j <-> tile[j] lane i. The lanes may as well hold pairs of bf16.
inline void transpose_tile(vf *tile) {
#if defined(__AVX512F__)
  vf u[16];
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(tile[g], tile[g + 1]));
    __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(tile[g], tile[g + 1]));
    __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(tile[g + 2], tile[g + 3]));
    __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(tile[g + 2], tile[g + 3]));
    u[g] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    u[g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    u[g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    u[g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
  // 128-bit lane L of u[4g + j] holds column 4L + j of rows 4g .. 4g+3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    vf even_low = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88), odd_low = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    vf even_high = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    vf odd_high = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    tile[j] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
    tile[4 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    tile[8 + j] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
    tile[12 + j] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
#else
  vf u[8];
#pragma GCC unroll 2
  for (int g = 0; g < 8; g += 4) {
    vf low01 = _mm256_unpacklo_ps(tile[g], tile[g + 1]), high01 = _mm256_unpackhi_ps(tile[g], tile[g + 1]);
    vf low23 = _mm256_unpacklo_ps(tile[g + 2], tile[g + 3]), high23 = _mm256_unpackhi_ps(tile[g + 2], tile[g + 3]);
    u[g] = _mm256_shuffle_ps(low01, low23, 0x44);
    u[g + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    u[g + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    u[g + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    tile[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    tile[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
#endif
}

// Hands out 64-byte aligned arrays from a block of memory. On a null base it only counts, so that one function
// describes a scratch area and tells its size.
class Bump {
 public:
  explicit Bump(void *base) : base_(static_cast<char *>(base)) {}
  template <class T>
  T *take(int64_t count) {
    T *p = reinterpret_cast<T *>(base_ + used_);
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return p;
  }
  size_t used() const { return used_; }

 private:
  char *base_;
  size_t used_ = 0;
};

}  // namespace sg::cpu::SG_ISA
