// The two kernels of low_rank_grad's `one_pass`; low_rank_grad.cu says how they share the work.
#pragma once

#include "attention_ptx.cuh"
#include "cluster.cuh"
#include "low_rank_parts.cuh"
#include "prefetch.cuh"

namespace sg::cuda::low_rank {

constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;               // of a step: the depth of one mma
constexpr int kLeastRows = 64;          // of a strip
constexpr int kSharedBytes = 96 << 10;  // what a block may have on every device; two fit on Hopper
constexpr int kMostTiles = 8;

// By R / 8: two blocks fit a multiprocessor or one; how many there are, about: all of them run at once on a large
// device; and how many are a cluster. Clusters of one block a multiprocessor would have to be small to fill a device.
constexpr int blocks_at_once(int tiles) { return tiles <= 2 ? 2 : 1; }
constexpr int wanted_blocks(int tiles) { return tiles <= 2 ? 192 : 128; }
constexpr int cluster_blocks(int tiles) { return tiles <= 2 ? 4 : 2; }

// Of columns of a chunk, where R is 8 * tiles: as many as registers allow.
constexpr int warp_columns(int tiles) { return tiles <= 4 ? 64 : 32; }
constexpr int chunk_columns(int tiles) { return kWarps * warp_columns(tiles); }

template <int tiles>
struct Layout {
  static constexpr int kColumnTiles = warp_columns(tiles) / 16;  // of a warp
  static constexpr int kColumns = chunk_columns(tiles);
  static constexpr int kPacks = kColumns / 8;                    // of 16 bytes, in a row of dy's step
  static constexpr int kLowPacks = tiles | 1;                    // an odd number spreads 8 rows over all banks
  static constexpr int kDyBytes = kRows * kPacks * 16;
  static constexpr int kStepBytes = kDyBytes + kRows * kLowPacks * 16;
  static constexpr int kSums = 128 * tiles;                      // of dlow, a step
  static constexpr int kSumBuffers = tiles <= 2 ? 2 : 1;         // two save a barrier a step
  static constexpr int kSumBytes = kSumBuffers * kWarps * kSums * 4;
  static constexpr int kInboxBytes = 16;
  static constexpr int kFit = (kSharedBytes - kSumBytes - kInboxBytes) / kStepBytes;
  static constexpr int kSteps = kFit < 6 ? kFit : 6;             // in shared memory at a time
  static constexpr int kInboxAt = kSteps * kStepBytes + kSumBytes;
  static constexpr int kBytes = kInboxAt + kInboxBytes;
  static constexpr int kColumnSums = kColumns * 8 * tiles;       // of db
  static_assert(kSteps >= 3 && kColumnSums * 4 <= kInboxAt);
};

struct Operands {
  const bf16 *dy, *b, *low;
  float *low_parts, *weight_parts;  // [chunks][row tiles][tiles][128], [clusters or strips][column tiles][tiles][128]
  int64_t dy_stride, b_stride, low_stride;
  int tokens, features, strip;      // strip: rows of one block, a multiple of kRows; the last ones may have none
  bool goes_first;                  // dy, out of the cache
};

// Where a step keeps 8 neighbouring elements of a row of dy: rows that are read together are in different banks.
template <int tiles>
__device__ inline uint32_t dy_place(int row, int pack) {
  return static_cast<uint32_t>((row * Layout<tiles>::kPacks + (pack ^ (row & 7))) * 16);
}
template <int tiles>
__device__ inline uint32_t low_place(int row, int pack) {
  return static_cast<uint32_t>(Layout<tiles>::kDyBytes + (row * Layout<tiles>::kLowPacks + pack) * 16);
}

// What a thread brings to shared memory: of each step some packs of dy, below one another, and one of low, or none.
// Addresses go on from step to step; zeros stand for what is not there.
template <int tiles>
struct Copies {
  using L = Layout<tiles>;
  static constexpr int kRowsAtOnce = kThreads / L::kPacks, kCount = kRows / kRowsAtOnce;
  const bf16 *dy, *low;
  int dy_left, low_left;  // rows that there still are, from the one that is next
  uint32_t dy_to[kCount], low_to;
  uint64_t policy;  // dy's

  __device__ Copies(const Operands &p, int begin, int end) : policy(cache_policy(p.goes_first)) {
    const int thread = threadIdx.x, row = thread / L::kPacks, pack = thread % L::kPacks, low_row = thread / tiles;
    const int column = blockIdx.x * L::kColumns + 8 * pack;
    dy = p.dy + (begin + row) * p.dy_stride + column;
    dy_left = column < p.features ? end - begin - row : 0;
    low = p.low + (begin + low_row) * p.low_stride + 8 * (thread % tiles);
    low_left = end - begin - low_row;
    low_to = low_place<tiles>(low_row, thread % tiles);
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy_to[i] = dy_place<tiles>(row + i * kRowsAtOnce, pack);
  }

  __device__ void next(const Operands &p, uint32_t step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_async_by(policy, step + dy_to[i], dy + i * kRowsAtOnce * p.dy_stride, i * kRowsAtOnce < dy_left);
    }
    if (threadIdx.x < kRows * tiles) copy_async_16(step + low_to, low, low_left > 0);
    dy += kRows * p.dy_stride, low += kRows * p.low_stride;
    dy_left -= kRows, low_left -= kRows;
  }
};

// Asks for what a block begins with: its rows of b, and the first steps of dy and low.
template <int tiles>
__device__ inline void bring_first_steps(const Operands &p, int begin, int end) {
  constexpr int kColumns = chunk_columns(tiles), kDyBytes = 2 * kColumns, kLowBytes = 16 * tiles;
  const int rows = min(end - begin, (Layout<tiles>::kSteps - 1) * kRows), column = blockIdx.x * kColumns;
  const int left = p.features - column;
  bring_rows<kThreads, kLowBytes>(p.b + column * p.b_stride, 2 * p.b_stride, min(left, kColumns), kLowBytes);
  bring_rows<kThreads, kDyBytes>(p.dy + begin * p.dy_stride + column, 2 * p.dy_stride, rows, 2 * left);
  bring_rows<kThreads, kLowBytes>(p.low + begin * p.low_stride, 2 * p.low_stride, rows, kLowBytes);
}

// b's fragments: terms are the warp's columns of dy, from `column` on. Zeros past the last.
template <int tiles>
__device__ inline void load_b(const Operands &p, int column, uint32_t (&b)[Layout<tiles>::kColumnTiles][tiles][2]) {
  const int lane = threadIdx.x % 32, group = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < Layout<tiles>::kColumnTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int term = column + 16 * m + 8 * half + pair;
      const bool inside = term < p.features;  // and the next one: their number is even
      const auto *from = reinterpret_cast<const uint16_t *>(p.b) + term * p.b_stride + group;
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        const uint32_t one = inside ? from[8 * j] : 0, next = inside ? from[p.b_stride + 8 * j] : 0;
        b[m][j][half] = one | next << 16;
      }
    }
  }
}

// Both products of a step and the warp's columns.
template <int tiles>
__device__ inline void multiply_step(uint32_t step, const uint32_t (&b)[Layout<tiles>::kColumnTiles][tiles][2],
                                     float (&weight)[Layout<tiles>::kColumnTiles][tiles][4], float (&low)[tiles][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t right[tiles][2];  // low's fragments: terms are rows
#pragma unroll
  for (int j = 0; j < tiles; j += 2) {
    const int pack = j + lane / 16;
    uint32_t two[4];
    load_matrices_transposed(two, step + low_place<tiles>(lane % 16, pack < tiles ? pack : j));
    right[j][0] = two[0], right[j][1] = two[1];
    if (j + 1 < tiles) right[j + 1][0] = two[2], right[j + 1][1] = two[3];
  }
#pragma unroll
  for (int m = 0; m < Layout<tiles>::kColumnTiles; ++m) {
    const int pack = (warp * warp_columns(tiles) + 16 * m) / 8;
    uint32_t left[4];
    load_matrices(left, step + dy_place<tiles>(lane % 16, pack + lane / 16));
#pragma unroll
    for (int j = 0; j < tiles; ++j) multiply_fragments(low[j], left, b[m][j][0], b[m][j][1]);
    load_matrices_transposed(left, step + dy_place<tiles>(lane % 8 + lane / 16 * 8, pack + lane / 8 % 2));
#pragma unroll
    for (int j = 0; j < tiles; ++j) multiply_fragments(weight[m][j], left, right[j][0], right[j][1]);
  }
}

// The warps' sums for 16 rows of dlow, added in their order.
template <int tiles>
__device__ inline void add_warps(const float *sums, float *to) {
  constexpr int count = Layout<tiles>::kSums;
#pragma unroll
  for (int i = 0; i < (count + kThreads - 1) / kThreads; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (count % kThreads != 0 && at >= count) continue;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += sums[warp * count + at];
    to[at] = total;
  }
}

template <int tiles>
__device__ inline uint32_t after(uint32_t step, uint32_t steps) {
  step += Layout<tiles>::kStepBytes;
  return step == steps + Layout<tiles>::kSteps * Layout<tiles>::kStepBytes ? steps : step;
}

// Of the warp's sums of db, at which four of the block's the lane has its first; the next are 32 apart.
template <int tiles>
__device__ inline int first_four(int warp) {
  return warp * Layout<tiles>::kColumnTiles * tiles * 32 + static_cast<int>(threadIdx.x) % 32;
}

// body(i, sums) for the lane's i-th four.
template <int tiles, class Body>
__device__ inline void each_four(const float (&weight)[Layout<tiles>::kColumnTiles][tiles][4], Body &&body) {
#pragma unroll
  for (int m = 0; m < Layout<tiles>::kColumnTiles; ++m) {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      const float(&sum)[4] = weight[m][j];
      body(m * tiles + j, make_float4(sum[0], sum[1], sum[2], sum[3]));
    }
  }
}

// The block's sums of db added over its cluster: each block adds a share of them, which the others send it, in the order
// of blocks. `came`: what it is sent, as many as all of a block's, in place of its steps.
template <int tiles>
__device__ inline void leave_cluster_sums(const float (&weight)[Layout<tiles>::kColumnTiles][tiles][4], float4 *came,
                                          const Inbox *inbox, float4 *to, int count) {
  constexpr int kBlocks = cluster_blocks(tiles), kFours = Layout<tiles>::kColumnSums / 4, kShare = kFours / kBlocks;
  constexpr int kOwners = kWarps / kBlocks;  // warps of each block whose sums are one share
  static_assert(kWarps % kBlocks == 0);
  const int warp = static_cast<int>(threadIdx.x) / 32, rank = static_cast<int>(blockIdx.y) % kBlocks;
  ready_for_sends();  // its steps and sums of dlow have been read
  wait_until_ready();
  float4 *mine = came + rank * kShare + first_four<tiles>(warp % kOwners);
  each_four<tiles>(weight, [&](int i, const float4 &sum) { send(sum, mine + 32 * i, inbox, warp / kOwners); });
  wait_for_inbox(inbox);
#pragma unroll
  for (int i = 0; i < (kShare + kThreads - 1) / kThreads; ++i) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads, place = rank * kShare + at;
    if (at >= kShare || place >= count) break;
    float4 sum = came[at];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) add(sum, came[block * kShare + at]);
    to[place] = sum;
  }
}

// The block's sums of db to its cluster's part, or to its own.
template <int tiles>
__device__ inline void leave_weight(const Operands &p, const float (&weight)[Layout<tiles>::kColumnTiles][tiles][4],
                                    unsigned char *shared) {
  const int column_tiles = (p.features + 15) / 16, first_tile = blockIdx.x * (Layout<tiles>::kColumns / 16);
  const int count = (column_tiles - first_tile) * 32 * tiles;
  const auto part = [&](int index) {
    const int64_t first = static_cast<int64_t>(index) * column_tiles + first_tile;
    return reinterpret_cast<float4 *>(p.weight_parts) + first * 32 * tiles;
  };
#if __CUDA_ARCH__ >= 900
  const auto *inbox = reinterpret_cast<const Inbox *>(shared + Layout<tiles>::kInboxAt);
  leave_cluster_sums<tiles>(weight, reinterpret_cast<float4 *>(shared), inbox, part(blockIdx.y / cluster_blocks(tiles)),
                            count);
#else
  float4 *to = part(blockIdx.y);
  const int first = first_four<tiles>(static_cast<int>(threadIdx.x) / 32);
  each_four<tiles>(weight, [&](int i, const float4 &sum) {
    if (first + 32 * i < count) to[first + 32 * i] = sum;
  });
#endif
}

template <int tiles>
__global__ void __launch_bounds__(kThreads, blocks_at_once(tiles)) one_pass_kernel(const Operands p) {
  using L = Layout<tiles>;
  constexpr bool spares_barrier = L::kSumBuffers == 2;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t steps = shared_address(shared);
  float *sums = reinterpret_cast<float *>(shared + L::kSteps * L::kStepBytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.y * p.strip, end = min(begin + p.strip, p.tokens);
  const int count = begin < end ? (end - begin + kRows - 1) / kRows : 0;
  bring_first_steps<tiles>(p, begin, end);
  if (threadIdx.x == 0) open_inbox(reinterpret_cast<Inbox *>(shared + L::kInboxAt), 4 * L::kColumnSums);
  Copies<tiles> copies(p, begin, end);
  wait_for_kernels_ahead();
  const int first_column = blockIdx.x * L::kColumns + warp * warp_columns(tiles);
  const int row_tiles = (p.tokens + kRows - 1) / kRows;
  float *low_parts = p.low_parts + (static_cast<int64_t>(blockIdx.x) * row_tiles + begin / kRows) * L::kSums;

  uint32_t filled = steps, used = steps;  // the step to fill next, and to read
#pragma unroll
  for (int i = 0; i < L::kSteps - 1; ++i, filled = after<tiles>(filled, steps)) {
    if (i < count) copies.next(p, filled);
    commit_copies();
  }
  __syncwarp();  // or the compiler has b loaded first, and waited for, before any copy begins
  uint32_t b[L::kColumnTiles][tiles][2];
  load_b<tiles>(p, first_column, b);
  float weight[L::kColumnTiles][tiles][4] = {};

  for (int i = 0; i < count; ++i, used = after<tiles>(used, steps), filled = after<tiles>(filled, steps)) {
    wait_copies_but<L::kSteps - 2>();
    __syncthreads();  // step i is there, everyone is done with step i - 1 and has left its sums
    if (i + L::kSteps - 1 < count) copies.next(p, filled);
    commit_copies();
    if (spares_barrier && i > 0) {
      add_warps<tiles>(sums + (i - 1) % 2 * kWarps * L::kSums, low_parts);
      low_parts += L::kSums;
    }
    float low[tiles][4] = {};
    multiply_step<tiles>(used, b, weight, low);
    float *mine = sums + (i % L::kSumBuffers * kWarps + warp) * L::kSums + 4 * lane;
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      *reinterpret_cast<float4 *>(mine + 128 * j) = make_float4(low[j][0], low[j][1], low[j][2], low[j][3]);
    }
    if (!spares_barrier) {
      __syncthreads();
      add_warps<tiles>(sums, low_parts);
      low_parts += L::kSums;
    }
  }
  if (spares_barrier && count > 0) {
    __syncthreads();
    add_warps<tiles>(sums + (count - 1) % 2 * kWarps * L::kSums, low_parts);
  }
  leave_weight<tiles>(p, weight, shared);
}

}  // namespace sg::cuda::low_rank
