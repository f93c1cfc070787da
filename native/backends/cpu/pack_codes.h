// Packing of weights of 4- and 5-bit codes for gemm_bf16.h, sixteen rows at a time and with the rows in the lanes: what rows
// decoded one by one would have to be turned into afterwards, a word of codes at a time instead of a word of values.
//
// A vector holds eight rows, each twice, and in the two lanes of a row are two consecutive elements: rounded to bf16, two
// such vectors are a line of a square as it stands. The values are those of quant.h's `decode`, to the bit.
#pragma once

#include "quant.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {

// words[j][h]: word j of the 16 bytes at p of rows 8 h to 8 h + 7, each row in two lanes.
SG_FLATTEN inline void turn_codes(const uint8_t *p, int64_t row_bytes, __m512i (&words)[4][2]) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    __m512i rows[2];  // the even and the odd ones, a lane of 16 bytes each
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const auto row = [&](int r) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + (8 * h + odd + r) * row_bytes));
      };
      rows[odd] = _mm512_castsi128_si512(row(0));
      rows[odd] = _mm512_mask_broadcast_i32x4(rows[odd], 0x00f0, row(2));
      rows[odd] = _mm512_mask_broadcast_i32x4(rows[odd], 0x0f00, row(4));
      rows[odd] = _mm512_mask_broadcast_i32x4(rows[odd], 0xf000, row(6));
    }
    const __m512i low[2] = {_mm512_unpacklo_epi32(rows[0], rows[0]), _mm512_unpacklo_epi32(rows[1], rows[1])};
    const __m512i high[2] = {_mm512_unpackhi_epi32(rows[0], rows[0]), _mm512_unpackhi_epi32(rows[1], rows[1])};
    words[0][h] = _mm512_unpacklo_epi64(low[0], low[1]), words[1][h] = _mm512_unpackhi_epi64(low[0], low[1]);
    words[2][h] = _mm512_unpacklo_epi64(high[0], high[1]), words[3][h] = _mm512_unpackhi_epi64(high[0], high[1]);
  }
}

template <int bytes, bool has_minimum, bool has_high, int zero>
struct CodePacker {
  static constexpr int kBytes = bytes, kHigh = has_minimum ? 4 : 2, kCodes = kHigh + (has_high ? 4 : 0);

  static vf numbers(int first) { return vto_float(_mm512_add_epi32(viota(), vset_int(first))); }

  // One block, at p of the first row, as a square.
  SG_FLATTEN static void block(const uint8_t *p, int64_t row_bytes, __m512i row_offsets, uint32_t *square) {
    constexpr int kSelect = 0xe4;  // a where c, else b
    const __m512i first_twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i fifth = vset_int(16);
    const __m512i headers = _mm512_i32gather_epi32(row_offsets, p, 1);
    const vf d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(headers));
    const vf m = has_minimum ? _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(headers, 16)))
                             : vmul(d, vset(static_cast<float>(-zero)));
    vf scale[2], base[2];
    __m512i words[4][2], high[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m512i twice = _mm512_add_epi32(first_twice, vset_int(8 * h));
      scale[h] = _mm512_permutexvar_ps(twice, d), base[h] = _mm512_permutexvar_ps(twice, m);
    }
    turn_codes(p + kCodes, row_bytes, words);
    if constexpr (has_high) {  // element 0's bit, or 1's, to where a code has its fifth
      const __m512i bits = _mm512_i32gather_epi32(row_offsets, p + kHigh, 1);
      const __m512i turns = _mm512_setr_epi32(28, 29, 28, 29, 28, 29, 28, 29, 28, 29, 28, 29, 28, 29, 28, 29);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m512i twice = _mm512_add_epi32(first_twice, vset_int(8 * h));
        high[h] = _mm512_rorv_epi32(_mm512_permutexvar_epi32(twice, bits), turns);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {  // elements 2 i and 2 i + 1
      const int shift = i % 2 * 16 + i / 8 * 4;
      const __m512i shifts = _mm512_set1_epi64(static_cast<int64_t>(shift + 8) << 32 | shift);
      vf values[2];
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m512i code = _mm512_srlv_epi32(words[i % 8 / 2][h], shifts);
        vf number;
        if constexpr (has_high) {
          code = _mm512_ternarylogic_epi32(high[h], code, fifth, kSelect);
          high[h] = _mm512_ror_epi32(high[h], 2);
          number = _mm512_permutex2var_ps(numbers(0), code, numbers(16));
        } else {
          number = _mm512_permutexvar_ps(code, numbers(0));
        }
        values[h] = vfma(number, scale[h], base[h]);
      }
      _mm512_store_si512(square + 16 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values[1], values[0])));
    }
  }

  // `blocks` of them, to squares that are `stride` words apart.
  static void pack(const uint8_t *p, int64_t row_bytes, int64_t blocks, uint32_t *squares, int64_t stride) {
    const __m512i row_offsets = _mm512_mullo_epi32(viota(), vset_int(static_cast<int32_t>(row_bytes)));
    const char *ahead = reinterpret_cast<const char *>(p + 16 * row_bytes);  // the next sixteen rows
    for (int64_t b = 0; b < blocks; ++b, ahead += 16 * bytes) {
      for (int byte = 0; byte < 16 * bytes; byte += 64) _mm_prefetch(ahead + byte, _MM_HINT_T0);
      block(p + b * bytes, row_bytes, row_offsets, squares + b * stride);
    }
  }
};

using PackCodesFn = void (*)(const uint8_t *rows, int64_t row_bytes, int64_t blocks, uint32_t *squares, int64_t stride);

// What packs sixteen rows of a format, or nullptr where that is not here.
inline PackCodesFn pack_codes_for(int32_t dtype) {
  switch (dtype) {
    case SG_Q4_0: return CodePacker<18, false, false, 8>::pack;
    case SG_Q4_1: return CodePacker<20, true, false, 0>::pack;
    case SG_Q5_0: return CodePacker<22, false, true, 16>::pack;
    case SG_Q5_1: return CodePacker<24, true, true, 0>::pack;
    default: return nullptr;
  }
}

}  // namespace sg::cpu::SG_ISA
