// Block products c[rows][kWidth] (+)= a[rows][depth] * b panel, for the three kinds of arithmetic attention runs on.
// `rows` is a multiple of 16 (AMX: 32) and `depth` of 32. A result's bits depend on its own row and column alone.
#pragma once

#include <atomic>

#include "attention_pack.h"
#include "isa.h"

namespace sg::cpu::SG_ISA {

// fp32 multiply-add.
struct FloatArithmetic {
  using Elem = float;
  static void begin_task() {}
  static void end_task() {}

  [[gnu::noinline]] static void product(float *c, int ldc, const float *a, int lda, const float *b, int rows, int depth,
                                        bool accumulate) {
#if defined(__AVX512F__)
    constexpr int kRows = 8;
#else
    constexpr int kRows = 4;
#endif
    for (int r = 0; r < rows; r += kRows, c += kRows * ldc, a += kRows * lda) {
      vf acc[kRows][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        acc[i][0] = accumulate ? vload(c + i * ldc) : vzero();
        acc[i][1] = accumulate ? vload(c + i * ldc + kLanes) : vzero();
      }
      const float *panel = b;
      for (int k = 0; k < depth; ++k, panel += kWidth) {
        const vf b0 = vload(panel), b1 = vload(panel + kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const vf x = vset(a[i * lda + k]);
          acc[i][0] = vfma(x, b0, acc[i][0]);
          acc[i][1] = vfma(x, b1, acc[i][1]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        vstore(c + i * ldc, acc[i][0]);
        vstore(c + i * ldc + kLanes, acc[i][1]);
      }
    }
  }
};

#if defined(__AVX512BF16__)

// Pairs of bf16 products summed in fp32 by vector instructions.
struct Bf16DotArithmetic {
  using Elem = bf16;
  // Measured: Intel's cores (Sapphire and Emerald Rapids) issue these dot products at half the rate of fp32
  // multiply-adds, which are then as fast and more exact (score 20); AMD's cores issue both at one rate.
  static int32_t score() {
    if (!cpu_features().avx512_bf16) return 0;
    return __builtin_cpu_is("amd") ? 30 : 15;
  }
  static void begin_task() {}
  static void end_task() {}

  [[gnu::noinline]] static void product(float *c, int ldc, const bf16 *a, int lda, const bf16 *b, int rows, int depth,
                                        bool accumulate) {
    constexpr int kRows = 8;
    for (int r = 0; r < rows; r += kRows, c += kRows * ldc, a += kRows * lda) {
      vf acc[kRows][2];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        acc[i][0] = accumulate ? vload(c + i * ldc) : vzero();
        acc[i][1] = accumulate ? vload(c + i * ldc + kLanes) : vzero();
      }
      const bf16 *panel = b;
      for (int k = 0; k < depth; k += 2, panel += 2 * kWidth) {
        const __m512bh b0 = (__m512bh)_mm512_loadu_si512(panel), b1 = (__m512bh)_mm512_loadu_si512(panel + kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          int32_t pair;
          std::memcpy(&pair, a + i * lda + k, 4);
          const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
          acc[i][0] = _mm512_dpbf16_ps(acc[i][0], x, b0);
          acc[i][1] = _mm512_dpbf16_ps(acc[i][1], x, b1);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        vstore(c + i * ldc, acc[i][0]);
        vstore(c + i * ldc + kLanes, acc[i][1]);
      }
    }
  }
};

#endif

#if defined(__AMX_BF16__)

// The same sums by tile instructions: 2 x 2 tiles of 16 x 16 results, 32 deep.
struct AmxArithmetic {
  using Elem = bf16;
  static int32_t score() { return cpu_features().amx_bf16 ? 40 : 0; }

  // Tiles 0-3: results; 4, 5: rows of a; 6, 7: columns of b. All are 16 rows of 64 bytes.
  static void begin_task() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    _tile_loadconfig(&config);
  }
  static void end_task() { _tile_release(); }

  [[gnu::noinline]] static void product(float *c, int ldc, const bf16 *a, int lda, const bf16 *b, int rows, int depth,
                                        bool accumulate) {
    // The tile intrinsics do not tell the compiler which memory they touch.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    const size_t c_stride = static_cast<size_t>(ldc) * 4, a_stride = static_cast<size_t>(lda) * 2;
    constexpr size_t kPanelStride = kWidth * 4;
    for (int r = 0; r < rows; r += 32, c += 32 * ldc, a += 32 * lda) {
      if (accumulate) {
        _tile_loadd(0, c, c_stride);
        _tile_loadd(1, c + 16, c_stride);
        _tile_loadd(2, c + 16 * ldc, c_stride);
        _tile_loadd(3, c + 16 * ldc + 16, c_stride);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int k = 0; k < depth; k += 32) {
        _tile_loadd(6, b + k * kWidth, kPanelStride);
        _tile_loadd(4, a + k, a_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + k * kWidth + 32, kPanelStride);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + k, a_stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c, c_stride);
      _tile_stored(1, c + 16, c_stride);
      _tile_stored(2, c + 16 * ldc, c_stride);
      _tile_stored(3, c + 16 * ldc + 16, c_stride);
    }
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
};

#endif

}  // namespace sg::cpu::SG_ISA
