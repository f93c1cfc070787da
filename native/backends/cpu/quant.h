// The weight formats that kernels read in place: GGUF's blocks, and f32, f16, bf16 beside them. A format is described
// once, by a `decode` that hands out one block's values as vectors; rows and matrix products are built on it.
//
// A quantised row of K elements is K / kElements blocks, one after another. All fields are little endian; d and m are
// f16; q are the unsigned codes; sc and mn the sub-block scales and minimums of the K formats.
//   q4_0  32 elements, 18 bytes: d, q[16]                low nibble = element i, high = element i + 16; d (q - 8)
//   q4_1  32, 20: d, m, q[16]                            d q + m
//   q5_0  32, 22: d, high bits u32, q[16]                bit i = fifth bit of element i; d (q - 16)
//   q5_1  32, 24: d, m, high bits u32, q[16]             d q + m
//   q8_0  32, 34: d, i8 q[32]                            d q
//   q4_k  256, 144: d, m, packed sc and mn [12], q[128]  8 sub-blocks of 32: d sc q - m mn
//   q5_k  256, 176: d, m, packed [12], high bits [32], q[128]
//   q6_k  256, 210: low nibbles [128], high pairs [64], i8 sc[16], d; 16 sub-blocks of 16: d sc (q - 32)
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa.h"
#include "simd.h"
#include "surogate/abi.h"

namespace sg::cpu::SG_ISA {

inline float half_to_float(uint16_t bits) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}
inline float load_half(const uint8_t *p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return half_to_float(bits);
}
inline uint32_t load_u32(const uint8_t *p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

// Integer vectors of kLanes 32-bit lanes, as far as decoding needs them.
#if defined(__AVX512F__)
using vi = __m512i;
inline vi vload_u8(const uint8_t *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline vi vload_i8(const uint8_t *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline vi vset_int(int x) { return _mm512_set1_epi32(x); }
inline vi viota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline vi vand_int(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi vor_int(vi a, vi b) { return _mm512_or_si512(a, b); }
inline vi vshr_int(vi a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
inline vi vshl_int(vi a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
inline vi vshr_lanes(vi a, vi n) { return _mm512_srlv_epi32(a, n); }
inline vf vto_float(vi a) { return _mm512_cvtepi32_ps(a); }
inline vf vload_half(const uint8_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
inline void vstore_half(uint16_t *p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
using vi = __m256i;
inline vi vload_u8(const uint8_t *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
inline vi vload_i8(const uint8_t *p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
inline vi vset_int(int x) { return _mm256_set1_epi32(x); }
inline vi viota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline vi vand_int(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi vor_int(vi a, vi b) { return _mm256_or_si256(a, b); }
inline vi vshr_int(vi a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
inline vi vshl_int(vi a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
inline vi vshr_lanes(vi a, vi n) { return _mm256_srlv_epi32(a, n); }
inline vf vto_float(vi a) { return _mm256_cvtepi32_ps(a); }
inline vf vload_half(const uint8_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
inline void vstore_half(uint16_t *p, vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#endif
inline vi vlow_nibble(vi a) { return vand_int(a, vset_int(15)); }

// Scale and minimum of sub-block j of the 12 packed bytes of q4_k and q5_k: six bits each.
inline void unpack_scale(const uint8_t *packed, int j, int *scale, int *minimum) {
  if (j < 4) {
    *scale = packed[j] & 63;
    *minimum = packed[j + 4] & 63;
  } else {
    *scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
    *minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
  }
}

// Format<dtype>::decode(block, put) calls put(i, v) with the values of elements i .. i + kLanes - 1, for every such i
// of the block, in no particular order.
template <int32_t dtype>
struct Format;

// The 4-bit and 5-bit formats of 32 elements. The fifth bits, if any, follow the scales.
template <int kBytes_, bool has_minimum, bool has_high, int offset>
struct NibbleFormat {
  static constexpr int kElements = 32, kBytes = kBytes_;
  template <class Put>
  static void decode(const uint8_t *block, Put &&put) {
    const float d = load_half(block);
    const vf scale = vset(d);
    const vf base = vset(has_minimum ? load_half(block + 2) : -d * offset);
    const uint8_t *high = block + (has_minimum ? 4 : 2);
    const uint8_t *codes = high + (has_high ? 4 : 0);
    const vi high_bits = vset_int(has_high ? static_cast<int>(load_u32(high)) : 0);
    for (int i = 0; i < 16; i += kLanes) {
      vi byte = vload_u8(codes + i);
      vi low = vlow_nibble(byte), up = vshr_int(byte, 4);
      if constexpr (has_high) {
        const vi one = vset_int(1);
        low = vor_int(low, vshl_int(vand_int(vshr_lanes(high_bits, vor_int(viota(), vset_int(i))), one), 4));
        up = vor_int(up, vshl_int(vand_int(vshr_lanes(high_bits, vor_int(viota(), vset_int(16 + i))), one), 4));
      }
      put(i, vfma(vto_float(low), scale, base));
      put(16 + i, vfma(vto_float(up), scale, base));
    }
  }
};
template <>
struct Format<SG_Q4_0> : NibbleFormat<18, false, false, 8> {};
template <>
struct Format<SG_Q4_1> : NibbleFormat<20, true, false, 0> {};
template <>
struct Format<SG_Q5_0> : NibbleFormat<22, false, true, 16> {};
template <>
struct Format<SG_Q5_1> : NibbleFormat<24, true, true, 0> {};

template <>
struct Format<SG_Q8_0> {
  static constexpr int kElements = 32, kBytes = 34;
  template <class Put>
  static void decode(const uint8_t *block, Put &&put) {
    const vf scale = vset(load_half(block));
    for (int i = 0; i < 32; i += kLanes) put(i, vmul(vto_float(vload_i8(block + 2 + i)), scale));
  }
};

template <bool has_high>
struct KFormat {
  static constexpr int kElements = 256, kBytes = has_high ? 176 : 144;
  template <class Put>
  static void decode(const uint8_t *block, Put &&put) {
    const float d = load_half(block), m = load_half(block + 2);
    const uint8_t *high = block + 16, *codes = block + (has_high ? 48 : 16);
    for (int pair = 0; pair < 4; ++pair) {
      vf scale[2], base[2];
      for (int side = 0; side < 2; ++side) {
        int sc, mn;
        unpack_scale(block + 4, 2 * pair + side, &sc, &mn);
        scale[side] = vset(d * static_cast<float>(sc));
        base[side] = vset(-m * static_cast<float>(mn));
      }
      for (int i = 0; i < 32; i += kLanes) {
        vi byte = vload_u8(codes + 32 * pair + i);
        vi low = vlow_nibble(byte), up = vshr_int(byte, 4);
        if constexpr (has_high) {
          const vi sixteen = vset_int(16), bits = vload_u8(high + i);
          low = vor_int(low, vand_int(vshl_int(vshr_int(bits, 2 * pair), 4), sixteen));
          up = vor_int(up, vand_int(vshl_int(vshr_int(bits, 2 * pair + 1), 4), sixteen));
        }
        put(64 * pair + i, vfma(vto_float(low), scale[0], base[0]));
        put(64 * pair + 32 + i, vfma(vto_float(up), scale[1], base[1]));
      }
    }
  }
};
template <>
struct Format<SG_Q4_K> : KFormat<false> {};
template <>
struct Format<SG_Q5_K> : KFormat<true> {};

template <>
struct Format<SG_Q6_K> {
  static constexpr int kElements = 256, kBytes = 210;
  template <class Put>
  static void decode(const uint8_t *block, Put &&put) {
    const uint8_t *nibbles = block, *pairs = block + 128;
    const int8_t *scales = reinterpret_cast<const int8_t *>(block + 192);
    const float d = load_half(block + 208);
    const vi three = vset_int(3);
    for (int half = 0; half < 2; ++half) {
      for (int group = 0; group < 4; ++group) {
        for (int i = 0; i < 32; i += kLanes) {
          vi byte = vload_u8(nibbles + 64 * half + 32 * (group & 1) + i);
          vi low = group < 2 ? vlow_nibble(byte) : vshr_int(byte, 4);
          vi up = vand_int(vshr_int(vload_u8(pairs + 32 * half + i), 2 * group), three);
          const float scale = d * static_cast<float>(scales[8 * half + 2 * group + i / 16]);
          vi code = vor_int(low, vshl_int(up, 4));
          put(128 * half + 32 * group + i, vmul(vset(scale), vsub(vto_float(code), vset(32.0f))));
        }
      }
    }
  }
};

// Calls use(FormatTag) with the format of a quantised dtype; false when it isn't one.
template <int32_t dtype>
struct FormatTag {
  using type = Format<dtype>;
  static constexpr int32_t value = dtype;
};
template <class Use>
inline bool with_format(int32_t dtype, Use &&use) {
  switch (dtype) {
    case SG_Q4_0: use(FormatTag<SG_Q4_0>{}); return true;
    case SG_Q4_1: use(FormatTag<SG_Q4_1>{}); return true;
    case SG_Q5_0: use(FormatTag<SG_Q5_0>{}); return true;
    case SG_Q5_1: use(FormatTag<SG_Q5_1>{}); return true;
    case SG_Q8_0: use(FormatTag<SG_Q8_0>{}); return true;
    case SG_Q4_K: use(FormatTag<SG_Q4_K>{}); return true;
    case SG_Q5_K: use(FormatTag<SG_Q5_K>{}); return true;
    case SG_Q6_K: use(FormatTag<SG_Q6_K>{}); return true;
    default: return false;
  }
}

// The formats that a kernel reads.
template <int32_t... formats>
struct FormatList {
  static bool has(int32_t dtype) { return ((dtype == formats) || ...); }
  // As with_format, for these alone.
  template <class Use>
  static bool with(int32_t dtype, Use &&use) {
    return ((dtype == formats && (use(FormatTag<formats>{}), true)) || ...);
  }
};

inline bool is_quantised(int32_t dtype) { return dtype >= SG_Q4_0 && dtype <= SG_Q6_K; }
// Every dtype that a weight may have.
inline bool is_weight(int32_t dtype) {
  return dtype == SG_F32 || dtype == SG_BF16 || dtype == SG_F16 || is_quantised(dtype);
}

inline int64_t block_elements(int32_t dtype) {
  int64_t elements = 1;
  with_format(dtype, [&](auto tag) { elements = decltype(tag)::type::kElements; });
  return elements;
}

// Bytes of a row of `elements`, a multiple of the block.
inline int64_t row_bytes(int32_t dtype, int64_t elements) {
  int64_t bytes = elements * (dtype == SG_F32 ? 4 : 2);
  with_format(dtype, [&](auto tag) {
    using F = typename decltype(tag)::type;
    bytes = elements / F::kElements * F::kBytes;
  });
  return bytes;
}

// Elements [0, n) of a row that starts at `row` (a block boundary; n a multiple of the block), as float or bf16.
template <class Out>
inline void decode_row(int32_t dtype, const void *row, int64_t n, Out *out) {
  const uint8_t *p = static_cast<const uint8_t *>(row);
  const bool quantised = with_format(dtype, [&](auto tag) {
    using F = typename decltype(tag)::type;
    for (int64_t i = 0; i < n; i += F::kElements, p += F::kBytes) {
      F::decode(p, [&](int offset, vf v) { vstore(out + i + offset, v); });
    }
  });
  if (quantised) return;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    if (dtype == SG_F32) vstore(out + i, vload(reinterpret_cast<const float *>(p) + i));
    else if (dtype == SG_BF16) vstore(out + i, vload(reinterpret_cast<const bf16 *>(p) + i));
    else vstore(out + i, vload_half(p + 2 * i));
  }
  for (; i < n; ++i) {
    if (dtype == SG_F32) from_float(reinterpret_cast<const float *>(p)[i], out + i);
    else if (dtype == SG_BF16) from_float(to_float(reinterpret_cast<const bf16 *>(p)[i]), out + i);
    else from_float(load_half(p + 2 * i), out + i);
  }
}

}  // namespace sg::cpu::SG_ISA
