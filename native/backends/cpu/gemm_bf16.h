// Packing for the processors that multiply bf16: operands in pairs of consecutive k, summed in fp32. Both the AMX tiles
// and the AVX-512 dot product read the same panels, so they differ only in the loop that multiplies.
//
// A strip is 32 columns. A step of 32 k is 16 pairs; a packed step of a strip is two squares (columns 0-15 and 16-31)
// of 16 pairs x 16 columns, each pair one 32-bit element with the lower k in the lower half. K is padded with zeros to
// whole steps on both sides; rows of A are taken in groups of 32, contiguous or where they lie.
#pragma once

#include "gemm.h"
#include "pack_codes.h"

namespace sg::cpu::SG_ISA {

struct Bf16Panels {
  static constexpr int kStrip = 32, kGroup = 32, kSquare = 256;  // elements of 32 bits in a square
  static constexpr int64_t kStep = 1536, kNarrowPanel = 96, kPairs = 16;
  using Packed = uint32_t;

  static int64_t steps(int64_t k) { return (k + 31) / 32; }
  // In elements of the packed type: pairs.
  static int64_t padded_contraction(int64_t k) { return steps(k) * kPairs; }
  static int64_t scratch_floats(int64_t kc, int64_t panel) {
    return std::max(kGroup * padded_contraction(kc), 2 * (panel + kBlockSlack)) + 2 * kSquare;
  }

  static void pack_b(const MatrixB &b, int64_t k0, int64_t kc, int64_t column, int64_t columns, uint32_t *packed,
                     float *scratch) {
    if (b.by_rows) return pack_by_rows(b, k0, kc, column, columns, packed, scratch);
    const int64_t pairs = padded_contraction(kc);
    const PackCodesFn pack_codes = pack_codes_for(b.dtype);
    for (int64_t c = 0; c < round_up(columns, kStrip); c += 16) {
      if (pack_codes != nullptr && c + 16 <= columns) {
        uint32_t *squares = packed + c / kStrip * pairs * kStrip + c % kStrip / 16 * kSquare;
        pack_codes(b.at(column + c, k0), b.row_bytes, steps(kc), squares, 2 * kSquare);
        continue;
      }
      for (int i = 0; i < 16; ++i) {
        bf16 *row = reinterpret_cast<bf16 *>(scratch + i * pairs);
        const int64_t filled = c + i < columns ? kc : 0;
        if (filled > 0) decode_row(b.dtype, b.at(column + c + i, k0), kc, row);
        std::fill(row + filled, row + 2 * pairs, bf16{0});
      }
      uint32_t *target = packed + c / kStrip * pairs * kStrip + (c % kStrip) * 16;
      for (int64_t s = 0; s < steps(kc); ++s) {
        transpose_square(scratch + s * 16, pairs, reinterpret_cast<float *>(target + s * 2 * kSquare), 16);
      }
    }
  }

  // The first `count` (of at most 32) elements of a row; none where the row is past the end of K.
  static __m512i load_row(const bf16 *row, int64_t count, bool exists) {
    const __mmask32 mask = !exists ? 0u : count >= 32 ? 0xffffffffu : (1u << count) - 1u;
    return _mm512_maskz_loadu_epi16(mask, row);
  }
  // Interleaves two rows of 32: pairs of columns 0-15 and of columns 16-31.
  static void interleave(__m512i even, __m512i odd, __m512i *low, __m512i *high) {
    // Unpacking works inside 128 bits: lo holds columns 0-3, 8-11, 16-19, 24-27 and hi the others, four to a lane.
    const __m512i lo = _mm512_unpacklo_epi16(even, odd), hi = _mm512_unpackhi_epi16(even, odd);
    const __m512i in_order = _mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7);
    *low = _mm512_permutexvar_epi64(in_order, _mm512_shuffle_i64x2(lo, hi, 0x44));
    *high = _mm512_permutexvar_epi64(in_order, _mm512_shuffle_i64x2(lo, hi, 0xee));
  }

  static void pack_by_rows(const MatrixB &b, int64_t k0, int64_t kc, int64_t column, int64_t columns, uint32_t *packed,
                           float *scratch) {
    const int64_t pairs = padded_contraction(kc), span = round_up(columns, block_elements(b.dtype));
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const bf16 *rows[2];
      for (int side = 0; side < 2; ++side) {
        const int64_t k = 2 * pair + side;
        rows[side] = reinterpret_cast<const bf16 *>(scratch) + side * span;
        if (k >= kc) continue;
        if (b.dtype == SG_BF16) rows[side] = reinterpret_cast<const bf16 *>(b.at(k0 + k, column));
        else decode_row(b.dtype, b.at(k0 + k, column), span, reinterpret_cast<bf16 *>(scratch) + side * span);
      }
      for (int64_t c = 0; c < columns; c += kStrip) {
        __m512i low, high;
        interleave(load_row(rows[0] + c, columns - c, 2 * pair < kc),
                   load_row(rows[1] + c, columns - c, 2 * pair + 1 < kc), &low, &high);
        uint32_t *target = packed + c * pairs + pair / 16 * 2 * kSquare + pair % 16 * 16;
        _mm512_storeu_si512(target, low);
        _mm512_storeu_si512(target + kSquare, high);
      }
    }
  }

  struct Rows {
    const bf16 *data;
    int64_t stride;
  };
  static Rows take_a(const MatrixA &a, int64_t row, int rows, int64_t k0, int64_t kc, float *scratch) {
    const bf16 *source = a.from<bf16>(k0);
    if (!a.transposed && rows == kGroup && kc % 32 == 0) return {source + row * a.stride, a.stride};
    const int64_t stride = 2 * padded_contraction(kc);
    bf16 *copy = reinterpret_cast<bf16 *>(scratch);
    if (a.transposed) {
      take_transposed(source + row, a.stride, rows, kc, scratch);
      return {copy, stride};
    }
    for (int i = 0; i < kGroup; ++i) {
      const int64_t filled = i < rows ? kc : 0;
      if (filled > 0) std::memcpy(copy + i * stride, source + (row + i) * a.stride, static_cast<size_t>(kc) * 2);
      std::fill(copy + i * stride + filled, copy + (i + 1) * stride, bf16{0});
    }
    return {copy, stride};
  }

  // scratch[32][kc] from 32 columns of kc rows: squares of 16 pairs x 16 rows, turned.
  static void take_transposed(const bf16 *source, int64_t stride, int rows, int64_t kc, float *scratch) {
    const int64_t pairs = padded_contraction(kc);
    float *squares = scratch + kGroup * pairs;
    for (int64_t s = 0; s < steps(kc); ++s) {
      for (int i = 0; i < 16; ++i) {
        const int64_t k = s * 32 + 2 * i;
        const bf16 *line = source + k * stride;
        __m512i low, high;
        interleave(load_row(line, rows, k < kc), load_row(line + stride, rows, k + 1 < kc), &low, &high);
        _mm512_storeu_si512(squares + i * 16, low);
        _mm512_storeu_si512(squares + kSquare + i * 16, high);
      }
      transpose_square(squares, 16, scratch + s * 16, pairs);
      transpose_square(squares + kSquare, 16, scratch + 16 * pairs + s * 16, pairs);
    }
  }
};

}  // namespace sg::cpu::SG_ISA
