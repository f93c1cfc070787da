// Matrix products of bf16 activations on AVX-512's bf16 dot product: 16 fp32 sums, two k at a time.
#include "linear_bf16.h"

namespace sg::cpu::SG_ISA {
namespace {

struct DotMicro : Bf16Panels {
  static constexpr int kTileRows = 12;
  static int32_t score() { return cpu_features().avx512_bf16 ? 30 : 0; }
  struct Session {};

  template <int kRows>
  static void tile(const bf16 *a, int64_t a_stride, const uint32_t *b, int64_t count, float *sums, int64_t stride,
                   bool add) {
    __m512 c[kRows][2];
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) c[i][j] = add ? vload(sums + i * stride + 16 * j) : vzero();
    }
    for (int64_t k = 0; k < count * kPairs; ++k) {
      const uint32_t *square = b + k / kPairs * 2 * kSquare + k % kPairs * 16;
      const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(square));
      const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(square + kSquare));
      for (int i = 0; i < kRows; ++i) {
        int pair;
        std::memcpy(&pair, a + i * a_stride + 2 * k, 4);
        const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        c[i][0] = _mm512_dpbf16_ps(c[i][0], x, left);
        c[i][1] = _mm512_dpbf16_ps(c[i][1], x, right);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) vstore(sums + i * stride + 16 * j, c[i][j]);
    }
  }

  static void multiply(const Rows &a, int rows, const uint32_t *packed, int64_t strips, int64_t kc, float *sums,
                       int64_t sums_stride, bool add) {
    const int64_t count = steps(kc);
    for (int64_t s = 0; s < strips; ++s) {
      const uint32_t *b = packed + s * count * 2 * kSquare;
      float *c = sums + s * kStrip;
      int i = 0;
      for (; i + kTileRows <= rows; i += kTileRows) {
        tile<kTileRows>(a.data + i * a.stride, a.stride, b, count, c + i * sums_stride, sums_stride, add);
      }
      for (; i + 4 <= rows; i += 4)
        tile<4>(a.data + i * a.stride, a.stride, b, count, c + i * sums_stride, sums_stride, add);
      for (; i < rows; ++i) tile<1>(a.data + i * a.stride, a.stride, b, count, c + i * sums_stride, sums_stride, add);
    }
  }
};

}  // namespace

SG_REGISTER_BF16_KERNELS(DotMicro)

}  // namespace sg::cpu::SG_ISA
