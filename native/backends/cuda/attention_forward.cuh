// A tile of queries as it walks over tiles of keys, in bf16: what attention and paged_attention do with a tile of keys
// and one of values once they lie in shared memory. attention.cu says why it is made so.
#pragma once

#include "attention_tile.cuh"

namespace sg::cuda {

template <int DIM>
struct ForwardTile {
  static constexpr int kRowTiles = DIM <= 128 ? 2 : 1;  // of 16 rows, of a warp
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kQueries = kWarpRows * kAttentionThreads / 32;
  static constexpr int kKeys = 64;
  static constexpr int kKeyTiles = kKeys / 8;
  static constexpr int kDimTiles = DIM / 8;
  static constexpr int kBlocks = DIM <= 64 ? 3 : 2;  // on a multiprocessor
  static constexpr size_t kBytes = (kQueries + 2 * kKeys) * kRowBytes<DIM> + kQueries * sizeof(TokenRange);
};

// Weights are relative to a base that the peak of the logits may exceed by this many powers of two: the sums, which
// have to shrink when the base moves, then hardly ever do, and weights and sums are as exact as before.
constexpr float kSlack = 8.0f;

// The softmax of 16 rows goes on: logits become weights, and what was summed shrinks where the base moves. base and
// total belong to rows lane / 4 and lane / 4 + 8; total is this lane's share. A row that has seen nothing has base
// -infinity.
template <int KEY_TILES, int DIM_TILES>
__device__ __forceinline__ void softmax_step(float (&logits)[KEY_TILES][4], float (&sums)[DIM_TILES][4],
                                             float (&base)[2], float (&total)[2], float factor) {
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float peak = -INFINITY;
#pragma unroll
    for (int nt = 0; nt < KEY_TILES; ++nt) {
      peak = fmaxf(peak, fmaxf(logits[nt][2 * half], logits[nt][2 * half + 1]));
    }
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
    const bool moves = peak * factor > fmaf(base[half], factor, kSlack);
    const float next = moves ? peak : base[half];
    const float shift = next == -INFINITY ? 0.0f : next * factor;
    shrink[half] = moves ? fast_exp2(fmaf(base[half], factor, -shift)) : 1.0f;
    base[half] = next;
    float sum = 0.0f;
#pragma unroll
    for (int nt = 0; nt < KEY_TILES; ++nt) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        logits[nt][i] = fast_exp2(fmaf(logits[nt][i], factor, -shift));
        sum += logits[nt][i];
      }
    }
    total[half] = fmaf(total[half], shrink[half], sum);
  }
  if (!__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) return;
#pragma unroll
  for (int nt = 0; nt < DIM_TILES; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[nt][i] *= shrink[i / 2];
  }
}

// What a warp knows of its rows while it walks over the keys.
template <int DIM, bool CAPPED>
struct ForwardWarp {
  using Tile = ForwardTile<DIM>;
  static constexpr int kRowTiles = Tile::kRowTiles;
  float sums[kRowTiles][Tile::kDimTiles][4];
  float base[kRowTiles][2], total[kRowTiles][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
      base[mt][0] = base[mt][1] = -INFINITY;
      total[mt][0] = total[mt][1] = 0.0f;
#pragma unroll
      for (int nt = 0; nt < Tile::kDimTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[mt][nt][i] = 0.0f;
      }
    }
  }

  // Hides the keys, of the tile that begins at `key`, outside the rows' ranges.
  __device__ __forceinline__ void mask(float (&logits)[kRowTiles][Tile::kKeyTiles][4], const TokenRange *ranges,
                                       int key) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TokenRange range = ranges[mt * 16 + half * 8 + lane / 4];
#pragma unroll
        for (int nt = 0; nt < Tile::kKeyTiles; ++nt) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = key + nt * 8 + (lane % 4) * 2 + i;
            if (at < range.begin || at >= range.end) logits[mt][nt][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void cap(float (&logits)[kRowTiles][Tile::kKeyTiles][4], float factor) const {
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < Tile::kKeyTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) logits[mt][nt][i] = fast_tanh(logits[mt][nt][i] * factor);
      }
    }
  }

  // Weights of the keys of one tile, packed for the product with the values.
  __device__ __forceinline__ void see_keys(uint32_t (&weights)[kRowTiles][Tile::kKeyTiles / 2][4], uint32_t queries,
                                           uint32_t keys, float tanh_factor, float logit_factor,
                                           const TokenRange *ranges, const Bounds &bounds, int key) {
    float logits[kRowTiles][Tile::kKeyTiles][4];
    multiply_rows<DIM>(logits, queries, keys);
    if constexpr (CAPPED) cap(logits, tanh_factor);
    if (!bounds.cover(key, Tile::kKeys)) mask(logits, ranges, key);
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
      softmax_step(logits[mt], sums[mt], base[mt], total[mt], logit_factor);
    }
    pack_fragments(weights, logits);
  }

  // The factor that makes sums a mean, and the sum of weights; NaN and 0 where a row saw nothing. By whole warps.
  __device__ __forceinline__ void means(float (&factor)[kRowTiles][2], float (&all)[kRowTiles][2]) const {
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = total[mt][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        all[mt][half] = sum;
        factor[mt][half] = sum == 0.0f ? NAN : 1.0f / sum;
      }
    }
  }

  // The same factors; lse[row * heads] of the rows, of which the first is `first`, becomes NaN where nothing was seen.
  __device__ __forceinline__ void finish(float (&factor)[kRowTiles][2], float *lse, const AttentionShape &shape,
                                         int first) const {
    const int lane = threadIdx.x % 32;
    float all[kRowTiles][2];
    means(factor, all);
#pragma unroll
    for (int mt = 0; mt < kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first + mt * 16 + half * 8 + lane / 4;
        if (lane % 4 == 0 && row < shape.tokens) {
          const bool seen = !(all[mt][half] == 0.0f);
          lse[static_cast<int64_t>(row) * shape.heads] =
              seen ? (base[mt][half] * shape.logit_factor + log2f(all[mt][half])) * kLn2 : NAN;
        }
      }
    }
  }
};

}  // namespace sg::cuda
