// Packing of rows (given by pointers, so that they may lie anywhere: heads of a token, blocks of a cache) into the
// operands of the block products of attention_gemm.h. Everything is padded with zeros to multiples of kPad.
//
//   A operand   [rows][ld]                     the depth runs along a row
//   B operand   panels [depth][kWidth]         for float
//               panels [depth/2][kWidth][2]    for bf16: pairs of the depth, as dot-product instructions take them
#pragma once

#include <algorithm>

#include "attention_simd.h"

namespace sg::cpu::SG_ISA {

constexpr int kPad = 32;
constexpr int kWidth = 2 * kLanes;  // columns of a B panel

template <class T>
inline vf load_clipped(const T *row, int d, int dim) {
  if (d + kLanes <= dim) return vload(row + d);
  return d < dim ? vload_n(row + d, dim - d) : vzero();
}

// tile[i] = columns d .. d+kLanes of row i; zero past `count` rows and past `dim` columns.
template <class T>
inline void load_tile(vf *tile, const T *const *rows, int count, int d, int dim) {
  if (count >= kLanes && d + kLanes <= dim) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) tile[i] = vload(rows[i] + d);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) tile[i] = i < count ? load_clipped(rows[i], d, dim) : vzero();
  }
}

// A operand whose depth is the columns of the rows: dst[padded_rows][padded_dim].
template <class T>
[[gnu::noinline]] void pack_a(float *dst, const T *const *rows, int count, int padded_rows, int dim, int padded_dim) {
  for (int r = 0; r < padded_rows; ++r, dst += padded_dim) {
    for (int d = 0; d < padded_dim; d += kLanes) vstore(dst + d, r < count ? load_clipped(rows[r], d, dim) : vzero());
  }
}

// A operand whose depth is the rows: dst[padded_dim][ld].
template <class T>
[[gnu::noinline]] void pack_a_transposed(float *dst, int ld, const T *const *rows, int count, int padded_rows, int dim,
                                         int padded_dim) {
  vf tile[kLanes];
  for (int r = 0; r < padded_rows; r += kLanes) {
    for (int d = 0; d < padded_dim; d += kLanes) {
      load_tile(tile, rows + r, count - r, d, dim);
      transpose_tile(tile);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) vstore(dst + (d + i) * ld + r, tile[i]);
    }
  }
}

// B operand whose depth is the columns of the rows and whose columns are the rows: panels of kWidth rows.
template <class T>
[[gnu::noinline]] void pack_b_transposed(float *dst, const T *const *rows, int count, int padded_rows, int dim,
                                         int padded_dim) {
  for (int r = 0; r < padded_rows; r += kWidth, dst += padded_dim * kWidth) {
    const int width = std::min(kWidth, count - r);
    pack_a_transposed(dst, kWidth, rows + r, width, kWidth, dim, padded_dim);
  }
}

// B operand whose depth is the rows: panels of kWidth columns.
template <class T>
[[gnu::noinline]] void pack_b(float *dst, const T *const *rows, int count, int padded_rows, int dim, int padded_dim) {
  for (int d = 0; d < padded_dim; d += kWidth) {
    for (int r = 0; r < padded_rows; ++r, dst += kWidth) {
      vstore(dst, r < count ? load_clipped(rows[r], d, dim) : vzero());
      vstore(dst + kLanes, r < count ? load_clipped(rows[r], d + kLanes, dim) : vzero());
    }
  }
}

// A row of kWidth columns of an A operand, and rows n, n + 1 (n even) of half a B panel.
inline void store_a(float *dst, vf left, vf right) {
  vstore(dst, left);
  vstore(dst + kLanes, right);
}
inline void store_b_pair(float *panel, int n, int half, vf first, vf second) {
  vstore(panel + n * kWidth + half * kLanes, first);
  vstore(panel + (n + 1) * kWidth + half * kLanes, second);
}
inline void zero_a(float *dst) { store_a(dst, vzero(), vzero()); }

#if defined(__AVX512BF16__)

// 32 columns d .. d+31 of a row, zero past dim.
inline __m512i load_clipped_words(const bf16 *row, int d, int dim) {
  if (d + 32 <= dim) return _mm512_loadu_si512(row + d);
  if (d >= dim) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16((1u << (dim - d)) - 1u, row + d);
}
inline __m512i interleave_low() {  // words 0, 32, 1, 33, ... of two registers
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  return _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(32)), 16));
}
inline __m512i interleave_high() { return _mm512_add_epi16(interleave_low(), _mm512_set1_epi16(16)); }

inline void load_pair_tile(vf *tile, const bf16 *const *rows, int count, int d, int dim) {
  if (count >= 16 && d + 32 <= dim) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) tile[i] = _mm512_loadu_ps(rows[i] + d);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      tile[i] = i < count ? _mm512_castsi512_ps(load_clipped_words(rows[i], d, dim)) : vzero();
    }
  }
}

[[gnu::noinline]] inline void pack_a(bf16 *dst, const bf16 *const *rows, int count, int padded_rows, int dim,
                                     int padded_dim) {
  for (int r = 0; r < padded_rows; ++r, dst += padded_dim) {
    for (int d = 0; d < padded_dim; d += 32) {
      _mm512_storeu_si512(dst + d, r < count ? load_clipped_words(rows[r], d, dim) : _mm512_setzero_si512());
    }
  }
}

[[gnu::noinline]] inline void pack_a_transposed(bf16 *dst, int ld, const bf16 *const *rows, int count, int padded_rows,
                                                int dim, int padded_dim) {
  // Pairs of columns are transposed as 32-bit lanes; then two tiles (32 rows) are split into even and odd columns.
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i twice = _mm512_slli_epi32(step, 2);  // words 0 and 2 of each pair of lanes: 4i, 4i + 2
  const __m512i even = _mm512_or_si512(twice, _mm512_slli_epi32(_mm512_add_epi32(twice, _mm512_set1_epi32(2)), 16));
  const __m512i odd = _mm512_add_epi16(even, _mm512_set1_epi16(1));
  vf first[16], second[16];
  for (int r = 0; r < padded_rows; r += 32) {
    for (int d = 0; d < padded_dim; d += 32) {
      load_pair_tile(first, rows + r, count - r, d, dim);
      load_pair_tile(second, rows + r + 16, count - r - 16, d, dim);
      transpose_tile(first);
      transpose_tile(second);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        __m512i a = _mm512_castps_si512(first[i]), b = _mm512_castps_si512(second[i]);
        _mm512_storeu_si512(dst + (d + 2 * i) * ld + r, _mm512_permutex2var_epi16(a, even, b));
        _mm512_storeu_si512(dst + (d + 2 * i + 1) * ld + r, _mm512_permutex2var_epi16(a, odd, b));
      }
    }
  }
}

[[gnu::noinline]] inline void pack_b_transposed(bf16 *dst, const bf16 *const *rows, int count, int padded_rows, int dim,
                                                int padded_dim) {
  vf tile[16];
  for (int r = 0; r < padded_rows; r += kWidth, dst += padded_dim * kWidth) {
    for (int half = 0; half < kWidth; half += 16) {
      for (int d = 0; d < padded_dim; d += 32) {
        load_pair_tile(tile, rows + r + half, count - r - half, d, dim);
        transpose_tile(tile);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_ps(dst + ((d / 2 + i) * kWidth + half) * 2, tile[i]);
      }
    }
  }
}

[[gnu::noinline]] inline void pack_b(bf16 *dst, const bf16 *const *rows, int count, int padded_rows, int dim,
                                     int padded_dim) {
  const __m512i low = interleave_low(), high = interleave_high();
  for (int d = 0; d < padded_dim; d += 32) {
    for (int r = 0; r < padded_rows; r += 2, dst += 2 * kWidth) {
      __m512i a = r < count ? load_clipped_words(rows[r], d, dim) : _mm512_setzero_si512();
      __m512i b = r + 1 < count ? load_clipped_words(rows[r + 1], d, dim) : _mm512_setzero_si512();
      _mm512_storeu_si512(dst, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(dst + kWidth, _mm512_permutex2var_epi16(a, high, b));
    }
  }
}

inline void store_a(bf16 *dst, vf left, vf right) {
  _mm512_storeu_si512(dst, (__m512i)_mm512_cvtne2ps_pbh(right, left));
}
inline void store_b_pair(bf16 *panel, int n, int half, vf first, vf second) {
  // Words 0 .. 15 are the first row's, 16 .. 31 the second's.
  const __m512i step = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i index = _mm512_or_si512(step, _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(16)), 16));
  __m512i words = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(panel + (n / 2 * kWidth + half * kLanes) * 2, _mm512_permutexvar_epi16(index, words));
}
inline void zero_a(bf16 *dst) { _mm512_storeu_si512(dst, _mm512_setzero_si512()); }

#endif  // __AVX512BF16__

}  // namespace sg::cpu::SG_ISA
