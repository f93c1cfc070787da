// Matrix products of bf16 activations on AMX tiles: 16 x 16 fp32 sums, 32 k at a time.
#include "amx_tiles.h"
#include "linear_bf16.h"

namespace sg::cpu::SG_ISA {
namespace {

struct AmxMicro : Bf16Panels {
  static int32_t score() { return cpu_features().amx_bf16 ? 50 : 0; }

  using Session = TileSession;

  static void multiply(const Rows &a, int rows, const uint32_t *packed, int64_t strips, int64_t kc, float *sums,
                       int64_t sums_stride, bool add) {
    const int64_t count = steps(kc), a_bytes = a.stride * 2, sums_bytes = sums_stride * 4;
    const bf16 *lower = a.data + 16 * a.stride;
    for (int64_t s = 0; s < strips; ++s) {
      const uint32_t *b = packed + s * count * 2 * kSquare;
      float *c = sums + s * kStrip;
      if (rows > 16) two_by_two(a.data, lower, a_bytes, b, count, c, c + 16 * sums_stride, sums_bytes, add);
      else one_by_two(a.data, a_bytes, b, count, c, sums_bytes, add);
    }
  }

  static void two_by_two(const bf16 *upper, const bf16 *lower, int64_t a_bytes, const uint32_t *b, int64_t count,
                         float *c, float *d, int64_t bytes, bool add) {
    if (add) {
      _tile_loadd(0, c, bytes);
      _tile_loadd(1, c + 16, bytes);
      _tile_loadd(2, d, bytes);
      _tile_loadd(3, d + 16, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < count; ++k, b += 2 * kSquare) {
      _tile_loadd(4, upper + 32 * k, a_bytes);
      _tile_stream_loadd(6, b, 64);
      _tile_stream_loadd(7, b + kSquare, 64);
      _tile_loadd(5, lower + 32 * k, a_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
    _tile_stored(2, d, bytes);
    _tile_stored(3, d + 16, bytes);
  }

  static void one_by_two(const bf16 *rows, int64_t a_bytes, const uint32_t *b, int64_t count, float *c, int64_t bytes,
                         bool add) {
    if (add) {
      _tile_loadd(0, c, bytes);
      _tile_loadd(1, c + 16, bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    for (int64_t k = 0; k < count; ++k, b += 2 * kSquare) {
      _tile_loadd(4, rows + 32 * k, a_bytes);
      _tile_stream_loadd(6, b, 64);
      _tile_stream_loadd(7, b + kSquare, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c, bytes);
    _tile_stored(1, c + 16, bytes);
  }
};

}  // namespace

SG_REGISTER_BF16_KERNELS(AmxMicro)

}  // namespace sg::cpu::SG_ISA
