// low_rank_grad on compute capability 9.0, all branches of a call at once:
//
//   dlow_i[T, R] = alpha dy_i[T, N_i] b_i[N_i, R]        db_i[N_i, R] += alpha dy_i^T low_i[T, R]
//
// A block has a chunk of a branch's columns and a strip of rows, 64 rows at a time. One warpgroup copies tiles of 64 x 64 to a
// ring in shared memory, where both products take them: another makes 64 rows of dlow over the chunk, a third adds to the
// chunk's rows of db, which stay in its registers until the end. A second kernel adds the parts of dlow, one of each chunk,
// and of db, one of each strip.
//
// Threads copy dy, a row of the chunk at a time, and not the copy engine, which takes a tile's 64 pieces of 128 bytes one
// after the other: so memory gives a twentieth more.
//
// Floor: the bytes of dy, once. Beside them go 4 R bytes of sums for each row and chunk, written and read in the
// second-level cache: a sixteenth of dy's where R is 16 and a chunk 512 columns.
//
// Ranks that are no multiple of 16 are multiplied as the next one that products have; columns that belong to nobody are
// not stored.
#pragma once

#include "hopper.cuh"
#include "low_rank_call.h"
#include "low_rank_parts.cuh"
#include "prefetch.cuh"
#include "tile_map.h"

namespace sg::cuda::low_rank {

constexpr int kTile = 64;                     // rows and columns
constexpr int kTileBytes = kTile * kSwizzledRow;
constexpr int kMultipliers = 2 * kWarpgroup;  // threads that multiply: dlow's, then db's
constexpr int kTileThreads = kMultipliers + kWarpgroup;  // and those that copy

// What a branch is in a launch.
struct BranchTiles {
  float *weight_parts;  // [strips][chunks][sums of db]
  int first_column, features, first_chunk, chunks;
};

struct TileProblem {
  BranchTiles branch[kMostBranches];
  const bf16 *dy;
  int64_t dy_stride;
  float *low_parts;                              // [chunks][row tiles of 64][sums of dlow]
  int branches, rank, tokens, row_tiles, strip;  // strip: row tiles of a block
  bool goes_first;                               // dy, out of the cache
};

struct TileMaps {
  CUtensorMap low, b[kMostBranches];
};

// How a block lays out its shared memory. RANK: of products, 16, 32 or 64; so many columns of a chunk that a thread has 64
// sums of db.
template <int RANK>
struct TileLayout {
  static constexpr int kTiles = 128 / RANK;                    // of 64 columns, of a chunk
  static constexpr int kColumns = kTile * kTiles;
  static constexpr int kNarrowRow = 2 * RANK;                  // bytes of a row of b and of low
  static constexpr int kFactorBytes = kColumns * kNarrowRow;   // the chunk's rows of b
  static constexpr int kLowBytes = kTile * kNarrowRow;
  static constexpr int kRowTiles = RANK == 64 ? 4 : 16 / kTiles;  // of the ring
  static constexpr int kStages = kRowTiles * kTiles;
  // low of 64 rows is asked for when their first tile is free, and others of the rows that were there are not yet.
  static constexpr int kLows = kRowTiles + 1;
  static constexpr int kBarrierBytes = (2 * kStages + kLows + 1) * 8;
  static constexpr int kBytes = kStages * kTileBytes + kLows * kLowBytes + kFactorBytes + kBarrierBytes;
  static constexpr int kPacks = kColumns / 8;                  // of 16 bytes, in a row of the chunk
  static constexpr int kRowsAtOnce = kWarpgroup / kPacks;      // that the copying threads bring
  static_assert(kBytes <= 226 << 10 && kRowsAtOnce <= 8);
};

#if SG_HOPPER

template <int RANK>
struct TileBlock {
  using L = TileLayout<RANK>;
  static constexpr int kTiles = L::kTiles;
  static constexpr int kFours = RANK / 8;  // that a thread has of 64 rows times RANK columns

  const TileProblem &p;
  uint32_t ring, lows, factors, full, empty, lows_full, factors_full;
  int branch, chunk, first, last;  // of the branch's chunks; row tiles

  __device__ TileBlock(const TileProblem &problem, unsigned char *shared) : p(problem) {
    if (shared_address(shared) % 1024 != 0) __trap();  // swizzled tiles are aligned to that
    ring = shared_address(shared);
    factors = ring + L::kStages * kTileBytes;
    lows = factors + L::kFactorBytes;
    full = lows + L::kLows * L::kLowBytes;
    empty = full + L::kStages * 8;
    lows_full = empty + L::kStages * 8;
    factors_full = lows_full + L::kLows * 8;
    branch = 0, chunk = static_cast<int>(blockIdx.x);
    while (branch + 1 < p.branches && chunk >= p.branch[branch + 1].first_chunk) ++branch;
    chunk -= p.branch[branch].first_chunk;
    first = min(static_cast<int>(blockIdx.y) * p.strip, p.row_tiles);
    last = min(first + p.strip, p.row_tiles);
  }

  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < L::kStages; ++s) {
        barrier_init(full + 8 * s, kWarpgroup / kTiles);
        barrier_init(empty + 8 * s, kMultipliers / 32);
      }
      for (int i = 0; i < L::kLows; ++i) barrier_init(lows_full + 8 * i, 1);
      barrier_init(factors_full, 1);
      barriers_are_there();
    }
    __syncthreads();
  }

  using Turn = cuda::Turn<L::kStages>;  // a place in the ring

  __device__ uint32_t tile_at(const Turn &turn) const { return ring + turn.stage * kTileBytes; }
  __device__ int low_place(int row_tile) const { return (row_tile - first) % L::kLows; }
  __device__ uint32_t low_of(int row_tile) const { return lows + low_place(row_tile) * L::kLowBytes; }
  __device__ uint32_t low_full(int row_tile) const { return lows_full + low_place(row_tile) * 8; }

  // By all threads: the first rows are on their way to the cache before the kernel ahead has ended. More of them, or a longer
  // ring, make memory slower: too many of its pages are asked for at once.
  __device__ void bring_first_rows() const {
    const BranchTiles &of = p.branch[branch];
    const int column = chunk * L::kColumns, row = first * kTile;
    const int rows = min(min(last - first, 1) * kTile, p.tokens - row);
    const bf16 *from = p.dy + row * p.dy_stride + of.first_column + column;
    bring_rows<kTileThreads, 2 * L::kColumns>(from, 2 * p.dy_stride, rows, 2 * (of.features - column));
  }

  // ---- by the third warpgroup: everything that the block reads. A thread has 8 columns of every few rows; zeros stand for
  // what is not there.
  __device__ void fill(const TileMaps &maps) const {
    const int thread = static_cast<int>(threadIdx.x) - kMultipliers, pack = thread % L::kPacks;
    const int own_row = thread / L::kPacks, tile = pack / 8, column = chunk * L::kColumns + 8 * pack;
    const BranchTiles &of = p.branch[branch];
    const bool inside = column < of.features;
    const uint64_t policy = cache_policy(p.goes_first);
    const bf16 *from = p.dy + (int64_t{first} * kTile + own_row) * p.dy_stride + of.first_column + column;
    if (thread == 0) ask_for_factors(&maps.b[branch]);
    Turn turn{tile, 0};
#pragma unroll 1
    for (int row_tile = first; row_tile < last; ++row_tile) {
      barrier_wait(empty + 8 * turn.stage, turn.parity ^ 1);
      if (thread == 0) {
        barrier_expect(low_full(row_tile), L::kLowBytes);
        copy_tile(low_of(row_tile), &maps.low, branch * p.rank, row_tile * kTile, low_full(row_tile));
      }
      const int left = inside ? p.tokens - row_tile * kTile - own_row : 0;
      const uint32_t to = tile_at(turn) + swizzled(own_row, pack % 8);
#pragma unroll
      for (int row = 0; row < kTile; row += L::kRowsAtOnce) {  // own_row has no bit in common with any of these
        copy_async_by(policy, (to ^ ((row % 8) << 4)) + row * kSwizzledRow, from, row < left);
        from += L::kRowsAtOnce * p.dy_stride;
      }
      arrive_with_copies(full + 8 * turn.stage);
      turn.skip(kTiles);
    }
  }
  __device__ void ask_for_factors(const void *map) const {
    if (first == last) return;
    barrier_expect(factors_full, L::kFactorBytes);
#pragma unroll 1
    for (int m = 0; m < kTiles; ++m) {
      copy_tile(factors + m * kTile * L::kNarrowRow, map, 0, chunk * L::kColumns + m * kTile, factors_full);
    }
  }

  __device__ void wait_for_tile(const Turn &turn) const {
    barrier_wait(full + 8 * turn.stage, turn.parity);
    stores_before_products();
  }
  // The tile before the one whose products were just begun has been used.
  __device__ void leave_tile_before(int &before, int stage) const {
    products_wait_but<1>();
    leave(before);
    before = stage;
  }
  __device__ void leave(int stage) const {
    if (stage >= 0 && lane_index() == 0) barrier_arrive(empty + 8 * stage);
  }

  // ---- by the first warpgroup: the chunk's sums of dlow, to `low_parts`
  __device__ void make_low() const {
    Turn turn;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index();
    if (first < last) barrier_wait(factors_full, 0);
    const uint64_t b = narrow_descriptor<L::kNarrowRow>(factors);
#pragma unroll 1
    for (int row_tile = first; row_tile < last; ++row_tile) {
      float sums[RANK / 2] = {};
      int before = -1;
#pragma unroll
      for (int m = 0; m < kTiles; ++m, turn.skip(1)) {
        wait_for_tile(turn);
        const uint64_t dy = tile_descriptor(tile_at(turn));
        products_begin();
#pragma unroll
        for (int i = 0; i < kTile / 16; ++i) {
          constexpr int kStep = 16 * L::kNarrowRow >> 4;
          multiply_tiles<0, 1>(sums, dy + 2 * i, b + (m * (kTile / 16) + i) * kStep);
        }
        products_commit();
        leave_tile_before(before, turn.stage);
      }
      products_wait();
      leave(before);
      const int tiles = p.rank / 8;  // of 8 columns that there are
      const int64_t index = int64_t{blockIdx.x} * p.row_tiles + row_tile;
      float4 *to = reinterpret_cast<float4 *>(p.low_parts) + (index * 4 + warp) * tiles * 32 + lane;
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        if (j < tiles) to[32 * j] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
      }
    }
  }

  // ---- by the second: the chunk's rows of db
  __device__ void make_weight() const {
    Turn turn;
    float sums[kTiles][RANK / 2] = {};
#pragma unroll 1
    for (int row_tile = first; row_tile < last; ++row_tile) {
      int before = -1;
      const uint64_t low = narrow_descriptor<L::kNarrowRow>(low_of(row_tile));
      barrier_wait(low_full(row_tile), (row_tile - first) / L::kLows & 1);
#pragma unroll
      for (int m = 0; m < kTiles; ++m, turn.skip(1)) {
        wait_for_tile(turn);
        const uint64_t dy = transposed_descriptor(tile_at(turn), kTileBytes);
        products_begin();
#pragma unroll
        for (int i = 0; i < kTile / 16; ++i) {
          constexpr int kDyStep = 16 * kSwizzledRow >> 4, kLowStep = 16 * L::kNarrowRow >> 4;
          multiply_tiles<1, 1>(sums[m], dy + i * kDyStep, low + i * kLowStep);
        }
        products_commit();
        leave_tile_before(before, turn.stage);
      }
      products_wait();
      leave(before);
    }
    leave_weight(sums);
  }

  // In the order of 16 rows, 8 columns and lanes, as the second kernel reads them.
  __device__ void leave_weight(const float (&sums)[kTiles][RANK / 2]) const {
    const int warp = static_cast<int>(threadIdx.x) / 32 - kWarpgroup / 32, tiles = p.rank / 8;
    const BranchTiles &to = p.branch[branch];
    const int64_t index = static_cast<int64_t>(blockIdx.y) * to.chunks + chunk;
    float4 *part = reinterpret_cast<float4 *>(to.weight_parts) + index * (L::kColumns * p.rank / 4) + lane_index();
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int j = 0; j < kFours; ++j) {
        const float(&from)[RANK / 2] = sums[m];
        const float4 four = make_float4(from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]);
        if (j < tiles) part[((4 * m + warp) * tiles + j) * 32] = four;
      }
    }
  }
};

#endif  // SG_HOPPER

template <int RANK>
__global__ void __launch_bounds__(kTileThreads, 1)
    tiles_kernel(const __grid_constant__ TileProblem p, const __grid_constant__ TileMaps maps) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const TileBlock<RANK> block(p, shared);
  block.open();
  block.bring_first_rows();
  wait_for_kernels_ahead();
  switch (threadIdx.x / kWarpgroup) {
    case 0:
      return block.make_low();
    case 1:
      return block.make_weight();
    default:
      return block.fill(maps);
  }
#endif
}

}  // namespace sg::cuda::low_rank
