// Our own matrix product: C[M, N] = alpha * A[M, K] B[K, N] + bias[N] + addend[M, N], with fp32 sums.
//
// It is cut into tasks of (row block x column panel) by shape alone. A task packs its panel of B into the worker's
// workspace, decoding it on the way (B may be a quantised weight read in place), and multiplies all its rows of A with
// it. What is done with a packed panel is the `Micro` parameter: fp32 vectors here, bf16 pairs and tiles in other
// files.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel.h"
#include "quant.h"
#include "simd.h"

namespace sg::cpu::SG_ISA {

// A: element (row, k) is data[row * stride + k], or data[k * stride + row] when transposed. f32 or bf16.
struct MatrixA {
  const void *data;
  int32_t dtype;
  int64_t stride;
  bool transposed;

  // Where (0, k) lies.
  template <class T>
  const T *from(int64_t k) const {
    return static_cast<const T *>(data) + (transposed ? k * stride : k);
  }
};

// B: element (k, column). By rows: row `k` of a stored matrix holds the columns; otherwise row `column` holds the k.
struct MatrixB {
  const void *data;
  int32_t dtype;
  int64_t row_bytes;
  bool by_rows;
  // Whole blocks only: `first` is a multiple of the block.
  const uint8_t *at(int64_t row, int64_t first) const {
    return static_cast<const uint8_t *>(data) + row * row_bytes + SG_ISA::row_bytes(dtype, first);
  }
};

// What becomes of the sums. The addend has the output's dtype and may be the output itself.
struct Epilogue {
  float alpha;
  const void *bias;
  int32_t bias_dtype;
  const void *addend;
  void *out;
  int32_t out_dtype;
  int64_t stride;  // elements from row to row of the output
  int64_t addend_stride = stride;

  // Asks for the lines that will be written (and read, with an addend), before the multiplying starts.
  void fetch(int64_t row, int rows, int64_t column, int64_t n) const {
    const int64_t size = out_dtype == SG_F32 ? 4 : 2;
    for (int r = 0; r < rows; ++r) {
      const int64_t offset = ((row + r) * stride + column) * size;
      const int64_t addend_offset = ((row + r) * addend_stride + column) * size;
      for (int64_t byte = 0; byte < n * size; byte += 64) {
        __builtin_prefetch(static_cast<char *>(out) + offset + byte, 1);
        if (addend != nullptr && addend != out) {
          __builtin_prefetch(static_cast<const char *>(addend) + addend_offset + byte);
        }
      }
    }
  }
  // `rows` rows of `n` columns from (row, column) on; sums are `sums_stride` apart.
  void operator()(int64_t row, int rows, int64_t column, int n, const float *sums, int64_t sums_stride) const {
    if (out_dtype == SG_F32) choose<float>(row, rows, column, n, sums, sums_stride);
    else choose<bf16>(row, rows, column, n, sums, sums_stride);
  }
  template <class T>
  void choose(int64_t row, int rows, int64_t column, int n, const float *sums, int64_t sums_stride) const {
    if (bias == nullptr && addend == nullptr) apply<T, false, false>(row, rows, column, n, sums, sums_stride);
    else if (bias == nullptr) apply<T, false, true>(row, rows, column, n, sums, sums_stride);
    else if (addend == nullptr) apply<T, true, false>(row, rows, column, n, sums, sums_stride);
    else apply<T, true, true>(row, rows, column, n, sums, sums_stride);
  }
  template <class T, bool has_bias, bool has_addend>
  void apply(int64_t row, int rows, int64_t column, int n, const float *sums, int64_t sums_stride) const {
    const vf factor = vset(alpha);
    T *y = static_cast<T *>(out) + row * stride + column;
    const T *plus = static_cast<const T *>(addend) + (has_addend ? row * addend_stride + column : 0);
    for (int r = 0; r < rows; ++r, sums += sums_stride, y += stride, plus += has_addend ? addend_stride : 0) {
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        vf v = vmul(vload(sums + i), factor);
        if constexpr (has_bias) v = vadd(v, bias_at(column + i, kLanes));
        if constexpr (has_addend) v = vadd(v, vload(plus + i));
        vstore(y + i, v);
      }
      if (i == n) continue;
      vf v = vmul(vload_n(sums + i, n - i), factor);
      if constexpr (has_bias) v = vadd(v, bias_at(column + i, n - i));
      if constexpr (has_addend) v = vadd(v, vload_n(plus + i, n - i));
      vstore_n(y + i, v, n - i);
    }
  }
  vf bias_at(int64_t column, int lanes) const {
    return bias_dtype == SG_F32 ? vload_n(static_cast<const float *>(bias) + column, lanes)
                                : vload_n(static_cast<const bf16 *>(bias) + column, lanes);
  }
};

// dst[j][i] = src[i][j] for a square of kLanes 32-bit elements.
inline void transpose_square(const float *src, int64_t src_stride, float *dst, int64_t dst_stride) {
#if defined(__AVX512F__)
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_ps(src + i * src_stride);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {  // r[4 g + j]: column 4 lane + j of rows 4 g .. 4 g + 3
    t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
    t[8 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
    t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    _mm512_storeu_ps(dst + j * dst_stride, _mm512_shuffle_f32x4(t[j], t[4 + j], 0x88));
    _mm512_storeu_ps(dst + (8 + j) * dst_stride, _mm512_shuffle_f32x4(t[j], t[4 + j], 0xdd));
    _mm512_storeu_ps(dst + (4 + j) * dst_stride, _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0x88));
    _mm512_storeu_ps(dst + (12 + j) * dst_stride, _mm512_shuffle_f32x4(t[8 + j], t[12 + j], 0xdd));
  }
#else
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(src + i * src_stride);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    _mm256_storeu_ps(dst + j * dst_stride, _mm256_permute2f128_ps(r[j], r[4 + j], 0x20));
    _mm256_storeu_ps(dst + (4 + j) * dst_stride, _mm256_permute2f128_ps(r[j], r[4 + j], 0x31));
  }
#endif
}

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The last block of a panel's rows may reach past its columns.
constexpr int64_t kBlockSlack = 256;

// fp32 vectors. A strip is kStrip columns; a tile of kTileRows x kStrip sums stays in registers.
struct FloatMicro {
  static constexpr int kVectors = kLanes == 16 ? 4 : 2, kStrip = kVectors * kLanes, kTileRows = 6, kGroup = 48;
  static constexpr int64_t kStep = 768, kNarrowPanel = 64;
  using Packed = float;
  struct Session {};  // nothing to set up in a task

  static int64_t padded_contraction(int64_t k) { return round_up(k, kLanes); }
  // Floats of scratch that packing a panel, or taking a group of rows, wants.
  static int64_t scratch_floats(int64_t kc, int64_t panel) {
    return std::max(std::max(kGroup, kLanes) * padded_contraction(kc), panel + kBlockSlack);
  }

  // Strips of [k][kStrip], one after another; columns at or past `columns` are zero.
  static void pack_b(const MatrixB &b, int64_t k0, int64_t kc, int64_t column, int64_t columns, float *packed,
                     float *scratch) {
    const int64_t padded = padded_contraction(kc);
    if (b.by_rows) return pack_by_rows(b, k0, kc, column, columns, packed, scratch);
    for (int64_t c = 0; c < round_up(columns, kStrip); c += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        float *row = scratch + i * padded;
        const int64_t filled = c + i < columns ? kc : 0;
        if (filled > 0) decode_row(b.dtype, b.at(column + c + i, k0), kc, row);
        std::fill(row + filled, row + padded, 0.0f);
      }
      float *target = packed + c / kStrip * padded * kStrip + c % kStrip;
      for (int64_t k = 0; k < padded; k += kLanes) transpose_square(scratch + k, padded, target + k * kStrip, kStrip);
    }
  }
  static void pack_by_rows(const MatrixB &b, int64_t k0, int64_t kc, int64_t column, int64_t columns, float *packed,
                           float *scratch) {
    const int64_t padded = padded_contraction(kc), width = round_up(columns, kStrip);
    for (int64_t k = 0; k < kc; ++k) {
      decode_row(b.dtype, b.at(k0 + k, column), round_up(columns, block_elements(b.dtype)), scratch);
      std::fill(scratch + columns, scratch + width, 0.0f);
      for (int64_t c = 0; c < width; c += kStrip) {
        float *target = packed + c / kStrip * padded * kStrip + k * kStrip;
        for (int i = 0; i < kStrip; i += kLanes) vstore(target + i, vload(scratch + c + i));
      }
    }
  }

  // Rows [row, row + rows) x [k0, k0 + kc) of A as floats: where they lie, or copied into `scratch`.
  struct Rows {
    const float *data;
    int64_t stride;
  };
  static Rows take_a(const MatrixA &a, int64_t row, int rows, int64_t k0, int64_t kc, float *scratch) {
    if (a.dtype == SG_F32 && !a.transposed) {
      return {a.from<float>(k0) + row * a.stride, a.stride};
    }
    auto copy = [&](const auto *source) {
      if (!a.transposed) {
        for (int i = 0; i < rows; ++i) {
          const auto *from = source + (row + i) * a.stride;
          for (int64_t k = 0; k < kc; k += kLanes) {
            const int lanes = static_cast<int>(std::min<int64_t>(kLanes, kc - k));
            vstore_n(scratch + i * kc + k, vload_n(from + k, lanes), lanes);
          }
        }
        return;
      }
      for (int64_t k = 0; k < kc; ++k) {
        const auto *from = source + k * a.stride + row;
        for (int i = 0; i < rows; ++i) scratch[i * kc + k] = to_float(from[i]);
      }
    };
    if (a.dtype == SG_F32) copy(a.from<float>(k0));
    else copy(a.from<bf16>(k0));
    return {scratch, kc};
  }

  template <int kRows>
  static void tile(const float *a, int64_t a_stride, const float *strip, int64_t kc, float *sums, int64_t sums_stride,
                   bool add) {
    vf c[kRows][kVectors];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) c[i][j] = add ? vload(sums + i * sums_stride + j * kLanes) : vzero();
    }
    for (int64_t k = 0; k < kc; ++k, strip += kStrip) {
      vf b[kVectors];
      for (int j = 0; j < kVectors; ++j) b[j] = vload(strip + j * kLanes);
      for (int i = 0; i < kRows; ++i) {
        const vf x = vset(a[i * a_stride + k]);
        for (int j = 0; j < kVectors; ++j) c[i][j] = vfma(x, b[j], c[i][j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) vstore(sums + i * sums_stride + j * kLanes, c[i][j]);
    }
  }

  // sums[rows][panel] (+)= rows of A times the packed panel of `strips` strips.
  static void multiply(const Rows &a, int rows, const float *packed, int64_t strips, int64_t kc, float *sums,
                       int64_t sums_stride, bool add) {
    const int64_t padded = padded_contraction(kc);
    for (int64_t s = 0; s < strips; ++s) {
      const float *strip = packed + s * padded * kStrip;
      for (int i = 0; i < rows; i += kTileRows) {
        const float *x = a.data + i * a.stride;
        float *out = sums + i * sums_stride + s * kStrip;
        switch (std::min(kTileRows, rows - i)) {
          case 6: tile<6>(x, a.stride, strip, kc, out, sums_stride, add); break;
          case 5: tile<5>(x, a.stride, strip, kc, out, sums_stride, add); break;
          case 4: tile<4>(x, a.stride, strip, kc, out, sums_stride, add); break;
          case 3: tile<3>(x, a.stride, strip, kc, out, sums_stride, add); break;
          case 2: tile<2>(x, a.stride, strip, kc, out, sums_stride, add); break;
          default: tile<1>(x, a.stride, strip, kc, out, sums_stride, add); break;
        }
      }
    }
  }
};

// How a product is cut: by its shape, and by the block of B, alone.
template <class Micro>
struct Gemm {
  int64_t m, n, k;
  int64_t panel;       // columns of a task; a multiple of a strip, and of B's block where B comes by rows
  int64_t block_rows;  // rows of a task
  int64_t step;        // elements of K packed at once; a multiple of every block

  // A block of rows and a panel fit in the second-level cache together. Few rows, and narrow outputs, are cut finer, so
  // that two cores share them. A short sum is all output, which is written in whole rows.
  static Gemm product(int64_t m, int64_t n, int64_t k, bool wide_blocks) {
    const int64_t narrow = m <= 128 ? 64 : Micro::kNarrowPanel;
    const int64_t panel = wide_blocks ? 256 : k <= 64 ? 1536 : m <= 1024 || n <= 256 ? narrow : 192;
    const int64_t rows = n <= 128 ? 256 : k <= 64 ? 128 : 1024;
    return {m, n, k, std::min(panel, round_up(n, wide_blocks ? 256 : Micro::kStrip)), rows, Micro::kStep};
  }
  // For sums over tokens. A is transposed as it is taken, which a wide panel pays for, unless A or B is narrow; a panel of
  // 64 columns would read B in pieces too short for the hardware to fetch ahead.
  static Gemm over_tokens(int64_t m, int64_t n, int64_t k) {
    const int64_t panel = m <= 64 ? 192 : 256, rows = n <= 64 ? 64 : 192;
    return {m, n, k, std::min(panel, round_up(n, Micro::kStrip)), rows, 512};
  }
  int64_t panels() const { return n == 0 ? 0 : (n + panel - 1) / panel; }
  int64_t tasks() const { return m == 0 ? 0 : (m + block_rows - 1) / block_rows * panels(); }
  int64_t chunk() const { return std::min(k, step); }

  // Bytes of one worker's workspace: the packed panel, scratch, sums.
  int64_t packed_bytes() const {
    return round_up(Micro::padded_contraction(chunk()) * panel * static_cast<int64_t>(sizeof(typename Micro::Packed)),
                    64);
  }
  int64_t scratch_bytes() const { return round_up(Micro::scratch_floats(chunk(), panel) * 4, 64); }
  int64_t sums_rows() const {
    if (k <= step) return Micro::kGroup;
    return std::min(round_up(m, Micro::kGroup), block_rows + Micro::kGroup);
  }
  int64_t worker_bytes() const { return packed_bytes() + scratch_bytes() + round_up(sums_rows() * panel * 4, 64); }

  // finish(row, rows, column, columns, sums, stride) takes the sums of a group of rows; they are padded to whole
  // strips.
  template <class Finish>
  void run_task(int64_t task, char *workspace, const MatrixA &a, const MatrixB &b, const Finish &finish) const {
    auto *packed = reinterpret_cast<typename Micro::Packed *>(workspace);
    auto *scratch = reinterpret_cast<float *>(workspace + packed_bytes());
    auto *sums = reinterpret_cast<float *>(workspace + packed_bytes() + scratch_bytes());
    const int64_t column = task % panels() * panel, columns = std::min(panel, n - column);
    const int64_t row0 = task / panels() * block_rows, row1 = std::min(m, row0 + block_rows);
    const int64_t strips = (columns + Micro::kStrip - 1) / Micro::kStrip;
    [[maybe_unused]] typename Micro::Session session;
    int64_t k0 = 0;
    do {  // once also when K is 0: the sums are then zero
      const int64_t kc = std::min(step, k - k0);
      const bool last = k0 + kc >= k;
      Micro::pack_b(b, k0, kc, column, columns, packed, scratch);
      for (int64_t row = row0; row < row1; row += Micro::kGroup) {
        const int rows = static_cast<int>(std::min<int64_t>(Micro::kGroup, row1 - row));
        float *part = k > step ? sums + (row - row0) * panel : sums;
        auto taken = Micro::take_a(a, row, rows, k0, kc, scratch);
        if constexpr (requires { finish.fetch(row, rows, column, columns); }) {
          if (last) finish.fetch(row, rows, column, columns);
        }
        Micro::multiply(taken, rows, packed, strips, kc, part, panel, k0 > 0);
        if (last) finish(row, rows, column, static_cast<int>(columns), part, panel);
      }
      k0 += kc;
    } while (k0 < k);
  }

  // The whole product on the call's pool. Worker w works in `workspace` + w * `bytes`, at least worker_bytes().
  template <class Finish>
  void run(const sg_call *call, char *workspace, int64_t bytes, const MatrixA &a, const MatrixB &b,
           const Finish &finish) const {
    parallel_for(call, tasks(), [&](int64_t task, int worker) {
      run_task(task, workspace + worker * bytes, a, b, finish);
    });
  }
};

}  // namespace sg::cpu::SG_ISA
