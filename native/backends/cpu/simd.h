// A vector of kLanes floats, in AVX2 (8) or AVX-512 (16) form, and loads and stores of every plain activation type.
// Kernels are written once in these terms. bf16 rounds to nearest even, as everywhere in Surogate.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"

namespace sg::cpu::SG_ISA {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline void from_float(float x, float *out) { *out = x; }
inline void from_float(float x, bf16 *out) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((u >> 16) | 0x40u);  // NaN stays NaN
  } else {
    out->bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using vf = __m512;

inline vf vzero() { return _mm512_setzero_ps(); }
inline vf vset(float x) { return _mm512_set1_ps(x); }
inline vf vload(const float *p) { return _mm512_loadu_ps(p); }
inline vf vload(const bf16 *p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline void vstore(float *p, vf v) { _mm512_storeu_ps(p, v); }
inline __m256i vround_bf16(vf v) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));  // the same, but for denormals, which become zero
#endif
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
  return _mm512_cvtepi32_epi16(rounded);
}
inline void vstore(bf16 *p, vf v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), vround_bf16(v)); }
// The first n (0 <= n <= kLanes) elements; missing lanes read as zero and are not written.
inline vf vload_n(const float *p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), p); }
inline vf vload_n(const bf16 *p, int n) {
  __m256i h = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1u), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline void vstore_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1u), v); }
inline void vstore_n(bf16 *p, vf v, int n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1u), vround_bf16(v));
}
inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }    // a*b + c
inline vf vfnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a*b
inline vf vsqrt(vf a) { return _mm512_sqrt_ps(a); }
inline float vsum(vf v) { return _mm512_reduce_add_ps(v); }
inline float vmaximum(vf v) { return _mm512_reduce_max_ps(v); }
inline vf vround(vf v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vexp2_int(vf n) {  // 2^n for integral n in [-126, 127]
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}

#else  // AVX2

constexpr int kLanes = 8;
using vf = __m256;

inline __m256i lane_mask(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline vf vzero() { return _mm256_setzero_ps(); }
inline vf vset(float x) { return _mm256_set1_ps(x); }
inline vf vload(const float *p) { return _mm256_loadu_ps(p); }
inline vf vload(const bf16 *p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline void vstore(float *p, vf v) { _mm256_storeu_ps(p, v); }
inline __m128i vround_bf16(vf v) {
  __m256i u = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  __m256i packed = _mm256_packus_epi32(rounded, rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
inline void vstore(bf16 *p, vf v) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), vround_bf16(v)); }
inline vf vload_n(const float *p, int n) { return _mm256_maskload_ps(p, lane_mask(n)); }
inline vf vload_n(const bf16 *p, int n) {
  bf16 lanes[8] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(bf16));
  return vload(lanes);
}
inline void vstore_n(float *p, vf v, int n) { _mm256_maskstore_ps(p, lane_mask(n), v); }
inline void vstore_n(bf16 *p, vf v, int n) {
  bf16 lanes[8];
  vstore(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(bf16));
}
inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf vfnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
inline vf vsqrt(vf a) { return _mm256_sqrt_ps(a); }
inline float vsum(vf v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float vmaximum(vf v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline vf vround(vf v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf vexp2_int(vf n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

#endif

// The factor exp(x) / 2^n for x = n ln 2 + r, |r| <= ln2/2: our minimax fit 1 + r + r^2 q(r), off by 3.1e-9 at most.
inline vf vexp_fraction(vf x, vf n) {
  vf r = vfnma(n, vset(0.693145751953125f), x);
  r = vfnma(n, vset(1.42860682030941723212e-6f), r);
  vf q = vset(1.38145399e-3f);
  q = vfma(q, r, vset(8.36874513e-3f));
  q = vfma(q, r, vset(4.16683908e-2f));
  q = vfma(q, r, vset(1.66665204e-1f));
  q = vfma(q, r, vset(4.99999934e-1f));
  return vfma(vmul(r, r), q, vadd(r, vset(1.0f)));
}

// exp(x) to 2 ulp on [-87.3, 88.3]. Below the range it gives 0, above it infinity; NaN stays NaN, since min and max return
// their second operand when one is NaN.
inline vf vexp(vf x) {
  const vf low = vset(-87.33654f), high = vset(89.0f);
  vf clamped = vmin(high, vmax(low, x));
  vf n = vround(vmul(clamped, vset(1.44269504088896341f)));
  vf fraction = vexp_fraction(clamped, n);
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), fraction, n);
#else
  // 2^128 has no representation: there the result is infinity. 89 is past the end, 88.73 is not.
  vf result = vmul(fraction, vmul(vexp2_int(vsub(n, vset(1.0f))), vset(2.0f)));
  return _mm256_and_ps(result, _mm256_cmp_ps(x, low, _CMP_NLT_UQ));
#endif
}

// 1/x to 1 ulp for normal x whose reciprocal is normal.
inline vf vreciprocal(vf x) {
#if defined(__AVX512F__)
  vf y = _mm512_rcp14_ps(x);
  return vmul(y, vfnma(x, y, vset(2.0f)));
#else
  return vdiv(vset(1.0f), x);
#endif
}

// 1 / (1 + e^-x); exactly 0 below -87.3.
inline vf vsigmoid(vf x) {
  vf y = vreciprocal(vadd(vset(1.0f), vexp(vsub(vzero(), x))));
#if defined(__AVX512F__)
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, vset(-87.3f), _CMP_NLT_UQ), y);
#else
  return y;
#endif
}

// tanh(x) = 1 - 2 / (1 + e^(2x)) = 1 - 2 sigmoid(-2x); exact at both ends. Near 0 the subtraction loses relative precision
// (absolute error stays below 1.2e-7), which is enough for activations and soft caps.
inline vf vtanh(vf x) { return vfnma(vset(2.0f), vsigmoid(vmul(x, vset(-2.0f))), vset(1.0f)); }

// f16 is a storage type only: weights and casts.
struct f16 {
  uint16_t bits;
};

inline vf vload(const f16 *p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#endif
}
inline void vstore(f16 *p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
}
inline vf vload_n(const f16 *p, int n) {
  f16 lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(f16));
  return vload(lanes);
}
inline void vstore_n(f16 *p, vf v, int n) {
  f16 lanes[kLanes];
  vstore(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(f16));
}

}  // namespace sg::cpu::SG_ISA
