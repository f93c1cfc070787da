// Where the warps of paged_attention_decode.cuh have their tiles of 16 keys and values from: straight from memory into the
// fragments of mma.m16n8k16, or, on compute capability 9.0, through a ring in shared memory that the copy engine fills.
//
// A thread takes 16 neighbouring bytes where the instruction's own layout would have it take 4. Loads of the first kind
// that are under way take room in the first-level cache, and kernels that have all of the shared memory leave 28 KB of it:
// with products of linear_ring.cuh before and behind, the second kind moves half as much again.
#pragma once

#include "attention_ptx.cuh"
#include "hopper.cuh"
#include "paged_attention.cuh"
#include "paged_attention_ptx.cuh"
#include "tile_map.h"

namespace sg::cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
constexpr int kTileKeys = 16;  // that a warp takes at a time; blocks of the cache hold a multiple of them

// Neighbouring warps that share heads of `dim`, each with one half of the elements.
__host__ __device__ constexpr int split_warps(int dim) { return dim > 128 ? 2 : 1; }

// One key-value head of the caches, and the table of one sequence.
struct PagedHead {
  const bf16 *keys, *values;
  int64_t key_stride, value_stride;
  const int32_t *table;
  int tiles_per_block, cache_tiles;
  int index;  // which head

  // The cache's tile that holds a tile of positions, or -1.
  __device__ int tile_at(int tile) const {
    const int block = tiles_per_block == 1 ? tile : tile / tiles_per_block;
    const int64_t place = static_cast<int64_t>(table[block]) * tiles_per_block + (tile - block * tiles_per_block);
    return place >= 0 && place < cache_tiles ? static_cast<int>(place) : -1;
  }
};

// A warp's elements of heads of DIM.
template <int DIM>
struct WarpDims {
  static constexpr int kWarps = split_warps(DIM), kDims = DIM / kWarps;
  static constexpr int kChunks = (kDims + 31) / 32;  // of a key: 8 elements a lane
  static constexpr int kParts = (kDims + 63) / 64;   // of a value: 8 elements a lane

  __device__ static __forceinline__ int own_dim() {
    return kWarps == 1 ? 0 : static_cast<int>(threadIdx.x) / 32 % kWarps * kDims;
  }
  // Whether the head has this lane's elements of a chunk of a key, of a part of a value.
  __device__ static __forceinline__ bool has_chunk(int i) {
    return kDims % 32 == 0 || 32 * i + 8 * (lane_index() % 4) < kDims;
  }
  __device__ static __forceinline__ bool has_part(int part) {
    return kDims % 64 == 0 || 64 * part + 8 * (lane_index() / 4) < kDims;
  }
};

// Which of a tile's rows, of 8, the products take as row i: such that the lanes that read a ring at a time meet all banks,
// of keys (rows of 2 i and 2 i + 1) as of values (of all even i, or all odd ones).
__device__ __forceinline__ int tile_row(int i) { return static_cast<int>(0x35421760u >> 4 * i & 7); }
// This lane's rows of a tile of keys, and of one of values, that the products take as 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
// t = lane % 4.
__device__ __forceinline__ int key_row(int half) { return tile_row(lane_index() / 4) + 8 * half; }
__device__ __forceinline__ int value_row(int i) { return tile_row(2 * (lane_index() % 4) + i % 2) + 8 * (i / 2); }

// Sources of tiles: a warp asks for tile n, of keys and of values, when it has taken tile n - kDepth; tiles are numbered
// over all tokens that it makes. Values in rows outside [low, high] may never have been written: the nearest inside stands
// for them, and gets no weight.

struct NoMaps {};

template <int DIM>
struct DirectTiles : WarpDims<DIM> {
  using Dims = WarpDims<DIM>;
  using Maps = NoMaps;
  static constexpr int kDepth = 1, kBytes = 0;  // kBytes: of a block's shared memory
  uint4 keys[Dims::kChunks][2], values[Dims::kParts][4];

  __device__ DirectTiles(const Maps &, unsigned char *) {}

  __device__ __forceinline__ void ask_for_keys(const PagedHead &head, int place, int) {
    const bf16 *first = head.keys + static_cast<int64_t>(place) * kTileKeys * head.key_stride;
    first += Dims::own_dim() + 8 * (lane_index() % 4);
#pragma unroll
    for (int i = 0; i < Dims::kChunks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        keys[i][half] = Dims::has_chunk(i) ? load_cached(first + key_row(half) * head.key_stride + 32 * i) : uint4{};
      }
    }
  }
  __device__ __forceinline__ void ask_for_values(const PagedHead &head, int place, int, int low, int high) {
    const bf16 *first = head.values + static_cast<int64_t>(place) * kTileKeys * head.value_stride;
    first += Dims::own_dim() + 8 * (lane_index() / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bf16 *row = first + min(max(value_row(i), low), high) * head.value_stride;
#pragma unroll
      for (int part = 0; part < Dims::kParts; ++part) {
        values[part][i] = Dims::has_part(part) ? load_cached(row + 64 * part) : uint4{};
      }
    }
  }
  __device__ __forceinline__ void wait_for_keys(int) const {}
  __device__ __forceinline__ void wait_for_values(int) const {}
  __device__ __forceinline__ uint4 key(int, int chunk, int half) const { return keys[chunk][half]; }
  __device__ __forceinline__ uint4 value(int, int part, int i, int, int) const { return values[part][i]; }
};

struct TileMaps {
  CUtensorMap keys, values;
};

// Two tiles a warp are under way, 16 KB of heads of 128.
template <int DIM>
struct RingTiles : WarpDims<DIM> {
  using Dims = WarpDims<DIM>;
  using Maps = TileMaps;
  static constexpr int kDepth = 2, kParts = Dims::kParts;
  static constexpr int kHalf = kTileKeys * kParts * kSwizzledRow;  // bytes of a tile's keys, or of its values
  static constexpr int kBarriers = kDecodeWarps * kDepth * 2 * 8;
  static constexpr int kBytes = kDecodeWarps * kDepth * 2 * kHalf + 1024;  // and the barriers, for which 1024 are taken

#if SG_HOPPER
  const Maps &maps;
  const unsigned char *ring;  // the warp's
  uint32_t barriers;

  // shared: kBytes, at a multiple of 1024.
  __device__ RingTiles(const Maps &of, unsigned char *shared) : maps(of) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    ring = shared + 1024 + warp * kDepth * 2 * kHalf;
    barriers = shared_address(shared) + warp * kDepth * 2 * 8;
    if (lane_index() == 0) {
      bring_map_closer(&maps.keys);
      bring_map_closer(&maps.values);
#pragma unroll
      for (int i = 0; i < 2 * kDepth; ++i) barrier_init(barriers + 8 * i, 1);
      barriers_are_there();
    }
    __syncwarp();
  }

  __device__ __forceinline__ void ask_for_keys(const PagedHead &head, int place, int n) const {
    ask(&maps.keys, head, place, 2 * (n % kDepth));
  }
  __device__ __forceinline__ void ask_for_values(const PagedHead &head, int place, int n, int, int) const {
    ask(&maps.values, head, place, 2 * (n % kDepth) + 1);
  }
  __device__ __forceinline__ void wait_for_keys(int n) const {
    barrier_wait(barriers + 8 * (2 * (n % kDepth)), n / kDepth & 1);
  }
  __device__ __forceinline__ void wait_for_values(int n) const {
    barrier_wait(barriers + 8 * (2 * (n % kDepth) + 1), n / kDepth & 1);
  }
  __device__ __forceinline__ uint4 key(int n, int chunk, int half) const {
    return taken(2 * (n % kDepth), key_row(half), chunk / 2, chunk % 2 * 4 + lane_index() % 4);
  }
  __device__ __forceinline__ uint4 value(int n, int part, int i, int low, int high) const {
    return taken(2 * (n % kDepth) + 1, min(max(value_row(i), low), high), part, lane_index() / 4);
  }

 private:
  // What lay there has been taken by all lanes.
  __device__ __forceinline__ void ask(const CUtensorMap *map, const PagedHead &head, int place, int half) const {
    __syncwarp();
    if (lane_index() != 0) return;
    barrier_expect(barriers + 8 * half, kHalf);
    copy_box(shared_address(ring) + half * kHalf, map, head.index * (DIM / 64) + Dims::own_dim() / 64, place * kTileKeys,
             barriers + 8 * half);
  }
  // A row of a tile is kParts rows of 128 bytes.
  __device__ __forceinline__ uint4 taken(int half, int row, int part, int unit) const {
    return *reinterpret_cast<const uint4 *>(ring + half * kHalf + swizzled(row * kParts + part, unit));
  }
#else
  __device__ RingTiles(const Maps &, unsigned char *) {}
  __device__ void ask_for_keys(const PagedHead &, int, int) const {}
  __device__ void ask_for_values(const PagedHead &, int, int, int, int) const {}
  __device__ void wait_for_keys(int) const {}
  __device__ void wait_for_values(int) const {}
  __device__ uint4 key(int, int, int) const { return {}; }
  __device__ uint4 value(int, int, int, int, int) const { return {}; }
#endif
};

}  // namespace sg::cuda
