// What AVX-512 kernels on blocks of 256 share; their layout is quant.h's.
#pragma once

#include "quant.h"

#if defined(__AVX512F__)

namespace sg::cpu::SG_ISA {

// The 32 bytes at p in both halves.
inline __m512i twice(const uint8_t *p) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

// Of the eight sub-blocks of a q4_k or q5_k block: scales, and what is added to every value.
inline void read_six_bit_scales(const uint8_t *block, float *scales, float *offsets) {
  const uint32_t a = load_u32(block + 4), b = load_u32(block + 8), c = load_u32(block + 12);
  const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x03030303;
  const uint64_t scale = (a & six) | static_cast<uint64_t>((c & four) | (a >> 6 & two) << 4) << 32;
  const uint64_t minimum = (b & six) | static_cast<uint64_t>((c >> 4 & four) | (b >> 6 & two) << 4) << 32;
  const __m128i all = _mm_set_epi64x(static_cast<int64_t>(minimum), static_cast<int64_t>(scale));
  const vf factors = _mm512_insertf32x8(vset(load_half(block)), _mm256_set1_ps(-load_half(block + 2)), 1);
  const vf values = vmul(vto_float(_mm512_cvtepu8_epi32(all)), factors);
  _mm256_storeu_ps(scales, _mm512_castps512_ps256(values));
  _mm256_storeu_ps(offsets, _mm512_extractf32x8_ps(values, 1));
}

}  // namespace sg::cpu::SG_ISA

#endif
