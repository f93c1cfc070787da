// attention_grad on compute capability 9.0, heads of 64 or 128, causal: what its kernels share. In this order:
//
//   prepare    delta and lse by heads, where pairs of tiles have their places          (attention_grad_prepare.cuh)
//   keys       dk and dv of 128 keys; the gradients of the logits, in bf16, to memory (attention_grad_keys.cuh)
//   queries    dq = those gradients times the keys                                    (attention_grad_queries.cuh)
//
// So each of the five products is made once, every sum has one owner and one order, and nothing is added in memory. It costs
// 2 bytes for each pair of a query and a key of the same document, written and read: of a head of 2048 tokens 4 MiB.
//
// Tiles are 64 tokens, counted from the call's first one. A pair of tiles whose tokens see one another has a place of 8 KiB:
// for every eight keys the eights of queries, 128 bytes each, of a key 16. Queries are in the order of place_row. So a thread
// writes 16 bytes from its registers, a warp 512 neighbouring ones, and products take the place as it is. Places of a tile of
// keys are neighbours, the first being that of the same tile of queries.
#pragma once

#include "attention_common.cuh"
#include "hopper.cuh"
#include "tile_map.h"
#include "vectors.cuh"

namespace sg::cuda::attention_tiles {

constexpr int kTile = 64;                         // tokens
constexpr int kPlaceBytes = kTile * kTile * 2;
constexpr int kBlockKeys = 128;                   // of a block of the second kernel
constexpr int kBlockQueries = 256;                // and of the third

// The query of a tile that is number `index` in a place. Where keys are rows of a product, a thread has of a row columns
// 8 j + 2 (lane % 4) and the next: those of four j make eight.
__device__ inline int place_row(int index) { return index / 32 * 32 + index / 2 % 4 * 8 + index / 8 % 4 * 2 + index % 2; }

// Where what the kernels leave one another is.
struct Between {
  unsigned char *gradients;  // [heads at once, places] of kPlaceBytes
  float *stats;              // [H, padded / 2, 2, 2]: of two tokens -lse in base 2, then -delta; 0 behind the last token
  int *first_place;          // [tiles + 1] of one head; all of them -1 where there are more than `places`
  int *key_order;            // [padded / kBlockKeys]: the blocks of keys, those with most queries first
  int *query_order;          // [query_blocks]: the blocks of queries, those with most keys first
  int *lengths;              // scratch, of as many as the larger of these
  int padded, tiles, query_blocks;  // tokens, a multiple of kBlockKeys; tiles and blocks that have any
  int64_t places;                   // of a head

  __device__ bool fits() const { return first_place[0] >= 0; }
};

#if SG_HOPPER

// Sums of 64 rows of a head by one warpgroup, each times its row's factor, to shared memory (parts of 64 columns lie
// `part_bytes` apart), and from there to `to`. `shared`: of the warpgroup's first row. factor[i]: of row lane / 4 + 8 i of
// the warp's 16. row_of(i): which of the rows from `first` on row i is.
template <int DIM, class RowOf>
__device__ __forceinline__ void store_sums(unsigned char *shared, int part_bytes, const float (&sums)[DIM / 8][4],
                                           const float (&factor)[2], const HeadRows<bf16> &to, int first, int tokens,
                                           RowOf &&row_of) {
  const int lane = lane_index(), warp_row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = warp_row + 8 * i + lane / 4;
#pragma unroll
    for (int nt = 0; nt < DIM / 8; ++nt) {
      *reinterpret_cast<uint32_t *>(shared + nt / 8 * part_bytes + swizzled(row, nt % 8) + lane % 4 * 4) =
          pack_bf16(sums[nt][2 * i] * factor[i], sums[nt][2 * i + 1] * factor[i]);
    }
  }
  __syncwarp();
  constexpr int kUnits = DIM / 8;
#pragma unroll 4
  for (int i = lane; i < 16 * kUnits; i += 32) {
    const int row = warp_row + i / kUnits, unit = i % kUnits, token = first + row_of(row);
    if (token >= tokens) continue;
    const unsigned char *const from = shared + unit / 8 * part_bytes + swizzled(row, unit % 8);
    store_word(reinterpret_cast<uint4 *>(to.row(token) + unit * 8), *reinterpret_cast<const uint4 *>(from));
  }
}

// A number that is the same for all threads of a warp, so that the compiler knows it: descriptors of products are then made by
// the multiprocessor's scalar unit, and not moved there one by one.
__device__ inline int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

#endif  // SG_HOPPER

}  // namespace sg::cuda::attention_tiles
