// Attention of a few columns (a decoded token's heads) to a block of keys: lanes run over keys for the logits and over
// value columns for the sum, so that no lane is wasted on absent queries.
//
// Every column's bits equal those of the strip path (softmax_strip, FloatArithmetic::product): sums over head_dim and
// over keys run in the same order with the same fused operations. A token therefore gives the same result decoded
// alone or inside a prompt.
#pragma once

#include "attention_common.h"
#include "attention_softmax.h"

namespace sg::cpu::SG_ISA {

constexpr int kFewColumns = 16;

// Keys of one pass of few_dots: two tiles of lanes, for enough independent sums to hide the latency of each.
constexpr int kFewKeys = 2 * kLanes;
// Columns of the keys that one transposed tile holds: a lane of it holds one fp32 or a pair of bf16.
template <class C>
constexpr int kTileDims = kLanes * static_cast<int>(sizeof(float) / sizeof(C));

// tiles[i][n] = column d + i of keys[n], for kLanes keys and kTileDims columns; zero past `count` and `dim`.
inline void transpose_keys(float *tiles, const float *const *keys, int count, int d, int dim) {
  vf tile[kLanes];
  load_tile(tile, keys, count, d, dim);
  transpose_tile(tile);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) vstore(tiles + i * kFewKeys, tile[i]);
}
inline vf load_clipped_pairs(const bf16 *row, int d, int dim) {
  if (d + 2 * kLanes <= dim) return vload(reinterpret_cast<const float *>(row + d));
  bf16 words[2 * kLanes] = {};
  if (d < dim) std::memcpy(words, row + d, static_cast<size_t>(dim - d) * sizeof(bf16));
  return vload(reinterpret_cast<const float *>(words));
}
inline void transpose_keys(float *tiles, const bf16 *const *keys, int count, int d, int dim) {
  vf tile[kLanes];
  if (count >= kLanes && d + 2 * kLanes <= dim) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) tile[i] = vload(reinterpret_cast<const float *>(keys[i] + d));
  } else {
    for (int i = 0; i < kLanes; ++i) tile[i] = i < count ? load_clipped_pairs(keys[i], d, dim) : vzero();
  }
  transpose_tile(tile);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    vstore(tiles + 2 * i * kFewKeys, low_bf16(tile[i]));
    vstore(tiles + (2 * i + 1) * kFewKeys, high_bf16(tile[i]));
  }
}

// logits[c][0 .. kFewKeys) += q[c][0 .. dims) . keys, the keys transposed into tiles[dims][kFewKeys]; N columns.
template <int N, int dims>
inline void few_dots(float *logits, const float *tiles, const float *q, int padded_dim) {
  vf acc[N][2];
  const float *rows[N];
#pragma GCC unroll 4
  for (int c = 0; c < N; ++c) {
    rows[c] = q + c * padded_dim;
    acc[c][0] = vload(logits + c * kKeyBlock);
    acc[c][1] = vload(logits + c * kKeyBlock + kLanes);
  }
#pragma GCC unroll 16
  for (int i = 0; i < dims; ++i) {
    const vf left = vload(tiles + i * kFewKeys), right = vload(tiles + i * kFewKeys + kLanes);
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      const vf x = vset(rows[c][i]);
      acc[c][0] = vfma(x, left, acc[c][0]);
      acc[c][1] = vfma(x, right, acc[c][1]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < N; ++c) {
    vstore(logits + c * kKeyBlock, acc[c][0]);
    vstore(logits + c * kKeyBlock + kLanes, acc[c][1]);
  }
}

// Columns whose sums over values are formed together: as many as fit the registers.
constexpr int kMostSummed = kLanes == 16 ? 4 : 3;
constexpr int kStepKeys = 8;  // values that are added between two steps of CacheAhead

// How often one block of kKeyBlock keys asks for what is ahead.
template <class C>
inline int64_t few_steps(int columns, int dim, int value_dim) {
  const int64_t wide = kLanes == 16 ? 4 * kLanes : 2 * kLanes, sums = (columns + kMostSummed - 1) / kMostSummed;
  return kKeyBlock / kFewKeys * ((dim + kTileDims<C> - 1) / kTileDims<C>) +
         kKeyBlock / kStepKeys * sums * ((value_dim + wide - 1) / wide);
}

// Cache blocks that a later task reads, asked for a few lines at a time: the hardware doesn't look ahead from block to
// block, and waiting for each key would take longer than the arithmetic. More lines at once than are under way together
// would stop what comes behind them.
struct CacheAhead {
  const char *keys, *values;  // of cache block 0
  int64_t key_bytes, value_bytes;  // of a cache block
  const int32_t *next, *end;       // cache blocks
  int64_t lines;                   // asked for by a step
  int64_t byte = 0;

  void step() {
    for (int64_t i = 0; i < lines && next < end; ++i) {
      if (byte < key_bytes) _mm_prefetch(keys + *next * key_bytes + byte, _MM_HINT_T1);
      if (byte < value_bytes) _mm_prefetch(values + *next * value_bytes + byte, _MM_HINT_T1);
      byte += 64;
      if (byte >= std::max(key_bytes, value_bytes)) byte = 0, ++next;
    }
  }
};

// logits[c][n] = q[c] . keys[n], up to kKeyBlock keys; q in fp32 rows of padded_dim.
template <class C>
void few_logits(float *logits, int columns, const float *q, const C *const *keys, int count, int dim, int padded_dim,
                CacheAhead *ahead) {
  constexpr int kDims = kTileDims<C>;
  alignas(64) float tiles[kDims * kFewKeys];
  for (int n = 0; n < count; n += kFewKeys) {
    for (int c = 0; c < columns; ++c) {
      vstore(logits + c * kKeyBlock + n, vzero());
      vstore(logits + c * kKeyBlock + n + kLanes, vzero());
    }
    for (int d = 0; d < dim; d += kDims) {
      ahead->step();
      transpose_keys(tiles, keys + n, count - n, d, dim);
      transpose_keys(tiles + kLanes, keys + n + kLanes, count - n - kLanes, d, dim);
      float *out = logits + n;
      const float *x = q + d;
      int c = 0;
      for (; c + 4 <= columns; c += 4) few_dots<4, kDims>(out + c * kKeyBlock, tiles, x + c * padded_dim, padded_dim);
      if (columns - c == 3) few_dots<3, kDims>(out + c * kKeyBlock, tiles, x + c * padded_dim, padded_dim);
      if (columns - c == 2) few_dots<2, kDims>(out + c * kKeyBlock, tiles, x + c * padded_dim, padded_dim);
      if (columns - c == 1) few_dots<1, kDims>(out + c * kKeyBlock, tiles, x + c * padded_dim, padded_dim);
    }
  }
}

// One column: logits of keys first_key .. first_key + count become weights in place; returns the factor that what was
// summed before shrinks by. Keys outside [low, high] are hidden.
inline float few_softmax(float *logits, int count, float factor, float first_key, float low, float high, float *peak,
                         float *total) {
  const vf hidden = vset(-INFINITY), f = vset(factor), first = vset(low), last = vset(high);
  alignas(64) float index[kLanes];
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<float>(i);
  const vf lanes = vload(index);
  const int padded = static_cast<int>(round_up(count, kLanes));
  vf maximum = hidden;
  for (int n = 0; n < padded; n += kLanes) {
    const vf key = vadd(vset(first_key + static_cast<float>(n)), lanes);
    const vf x = vwithin(vload(logits + n), key, first, last, hidden);
    vstore(logits + n, x);
    maximum = vmax(maximum, x);
  }
  const float new_peak = std::max(*peak, factor * vmaximum(maximum));
  const vf minus_peak = vset(-new_peak);
  for (int n = 0; n < padded; n += kLanes) {
    const vf key = vadd(vset(first_key + static_cast<float>(n)), lanes);
    vstore(logits + n, vwithin(vexp2(vfma(vload(logits + n), f, minus_peak)), key, first, last, vzero()));
  }
  __m128 sum = _mm_setzero_ps();
  for (int n = 0; n < padded; n += 4) sum = _mm_add_ps(sum, _mm_loadu_ps(logits + n));
  float s[4];
  _mm_storeu_ps(s, sum);
  alignas(64) float shrink[kLanes], scaled[kLanes];
  const vf shrinking = vexp2(vsub(vset(*peak), vset(new_peak)));
  vstore(shrink, shrinking);
  vstore(scaled, vfma(vset(*total), shrinking, vadd(vadd(vset(s[0]), vset(s[1])), vadd(vset(s[2]), vset(s[3])))));
  *total = scaled[0];
  *peak = new_peak;
  return shrink[0];
}

// o[c][d..] = shrink[c] * o[c][d..] + sum over keys of weights[c] * values, for N columns and M vectors of value
// columns (which, if M > 1, all lie within dim).
template <int N, int M, class C>
inline void few_values(float *o, int padded_dim, const float *weights, const float *shrink, const C *const *values,
                       int count, int d, int dim, CacheAhead *ahead) {
  vf acc[N][M];
#pragma GCC unroll 4
  for (int c = 0; c < N; ++c) {
#pragma GCC unroll 4
    for (int j = 0; j < M; ++j) acc[c][j] = vmul(vload(o + c * padded_dim + d + j * kLanes), vset(shrink[c]));
  }
  for (int n = 0; n < count; ++n) {
    if (n % kStepKeys == 0) ahead->step();
    vf value[M];
#pragma GCC unroll 4
    for (int j = 0; j < M; ++j) value[j] = M > 1 ? vload(values[n] + d + j * kLanes) : load_clipped(values[n], d, dim);
#pragma GCC unroll 4
    for (int c = 0; c < N; ++c) {
      const vf w = vset(weights[c * kKeyBlock + n]);
#pragma GCC unroll 4
      for (int j = 0; j < M; ++j) acc[c][j] = vfma(value[j], w, acc[c][j]);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < N; ++c) {
#pragma GCC unroll 4
    for (int j = 0; j < M; ++j) vstore(o + c * padded_dim + d + j * kLanes, acc[c][j]);
  }
}

template <int N, class C>
inline void few_values_columns(float *o, int padded_dim, const float *weights, const float *shrink,
                               const C *const *values, int count, int dim, CacheAhead *ahead) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  int d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    few_values<N, kVectors>(o, padded_dim, weights, shrink, values, count, d, dim, ahead);
  }
  for (; d < dim; d += kLanes) few_values<N, 1>(o, padded_dim, weights, shrink, values, count, d, dim, ahead);
}

template <class C>
void few_sum(float *o, int columns, int padded_dim, const float *weights, const float *shrink, const C *const *values,
             int count, int dim, CacheAhead *ahead) {
  const auto add = [&]<int n>(std::integral_constant<int, n>, int c) {
    few_values_columns<n>(o + c * padded_dim, padded_dim, weights + c * kKeyBlock, shrink + c, values, count, dim, ahead);
  };
  int c = 0;
  for (; c + kMostSummed <= columns; c += kMostSummed) add(std::integral_constant<int, kMostSummed>(), c);
  if (columns - c == 3) add(std::integral_constant<int, 3>(), c);
  if (columns - c == 2) add(std::integral_constant<int, 2>(), c);
  if (columns - c == 1) add(std::integral_constant<int, 1>(), c);
}

}  // namespace sg::cpu::SG_ISA
