// Products of up to 64 tokens with a bf16 weight on compute capability 9.0: y[T, N] = alpha x[T, K] weight[N, K]^T + bias +
// addend, where x may be normed first and the two halves of N be a gated unit, as rms_norm_linear.cuh reads it.
//
// Floor: the bytes of the weight. A block takes 64 rows of it (32 of the gate and the 32 that belong to them), in chunks of
// 64 terms that the copy engine brings to a ring of stages in shared memory, each with the same terms of all tokens. One
// thread asks for them; two warpgroups multiply them in turn. Of weights that nothing writes while programs run, the
// first stages are asked for before the kernels ahead have ended: two blocks fit a multiprocessor, so that the weights of
// a product come while the one before it still works, and behind it there is only x to read. Few tiles are shared by the
// blocks of a cluster, each with a part of K, whose sums they add through each other's shared memory, in order.
//
// A norm: x arrives as it is, and the warpgroup multiplies its chunk by the norm's weight, rounds it to bf16 where it lies,
// and adds up the squares; a token's sums are scaled by its norm at the end.
#pragma once

#include <algorithm>

#include "cluster.cuh"
#include "hopper.cuh"
#include "rms_norm_linear.cuh"
#include "tile_map.h"

namespace sg::cuda {

constexpr int kRingTokens = 64;  // the most
constexpr int kRingRows = 64;    // of the weight, of a tile: those of a warpgroup's product
constexpr int kHalfRows = 32;    // of what is copied at a time
constexpr int kRingTerms = 64;   // of a chunk: a row of 128 bytes
constexpr int kRingGroups = 2;
constexpr int kSumThreads = kRingGroups * kWarpgroup, kRingThreads = kSumThreads + 32;
constexpr int kMostStages = 16, kMostSplits = 8;
constexpr int kWeightBytes = kRingRows * kSwizzledRow;
constexpr int kSumStride = kRingRows + 4;     // floats from token to token: lanes that store sums meet different banks
constexpr int kRingShared = 113 << 10;        // bytes of a block: two to a multiprocessor
constexpr int kLeastChunks = 4;               // of a block of a cluster

struct RingProblem : NormedProblem {
  const void *addend;
  void *y;
  bool y_bf16;
  bool quads;          // four columns of y and of the addend can be moved at a time
  bool fixed;          // nothing writes the weight while programs run
  int64_t tiles;
  int chunks, stages;
};

// How a block lays out its shared memory, behind a multiple of 1024 bytes: stages, sums, squares, barriers.
template <int TOKENS, class X, bool normed>
struct RingLayout {
  static constexpr int kBoxes = sizeof(X) / 2;  // of 128 bytes a token, of a chunk
  static constexpr int kTermBytes = TOKENS * kSwizzledRow * kBoxes;
  static constexpr int kStageBytes = kWeightBytes + kTermBytes;
  static constexpr int kSumBytes = TOKENS * kSumStride * 4;
  static constexpr int kSquareBytes = normed ? kRingGroups * TOKENS * 4 : 0;
  static constexpr int kBarrierBytes = 2 * kMostStages * 8;
  static constexpr int kAround = 1024 + kSumBytes + kSquareBytes + kBarrierBytes;
  static constexpr int kStages = std::min(kMostStages, (kRingShared - kAround) / kStageBytes);
  static_assert(kStages >= 3 && kTermBytes % 1024 == 0);
  static constexpr int bytes(int stages) { return kAround + stages * kStageBytes; }
};

#if SG_HOPPER

// What a block does: its tiles, and its chunks of each.
struct RingShare {
  int64_t first_tile, step;
  int first_chunk, chunks;
  int tiles;

  __device__ explicit RingShare(const RingProblem &p) {
    const int splits = static_cast<int>(gridDim.y), rank = static_cast<int>(blockIdx.y);
    first_tile = blockIdx.x;
    step = gridDim.x;
    tiles = static_cast<int>((p.tiles - first_tile + step - 1) / step);
    first_chunk = p.chunks * rank / splits;
    chunks = p.chunks * (rank + 1) / splits - first_chunk;
  }
};

template <int TOKENS, class X, bool normed, bool gated>
struct Ring {
  using Layout = RingLayout<TOKENS, X, normed>;
  static constexpr int kColumns = gated ? kHalfRows : kRingRows;  // of y, of a tile
  static constexpr int kWide = std::min(TOKENS, 32), kParts = TOKENS / kWide;  // tokens of one instruction
  static constexpr int kUnits = std::max(TOKENS / 16, 1);  // of 16 bytes of normed terms, that a thread makes of a chunk

  const RingProblem &p;
  unsigned char *stages;
  float *sums, *squares;
  uint32_t ring, full, empty;
  RingShare share;

  __device__ Ring(const RingProblem &problem, unsigned char *shared) : p(problem), share(problem) {
    const uint32_t address = shared_address(shared);
    stages = shared + (1024 - address % 1024) % 1024;
    sums = reinterpret_cast<float *>(stages + p.stages * Layout::kStageBytes);
    squares = sums + TOKENS * kSumStride;
    ring = shared_address(stages);
    full = shared_address(squares) + Layout::kSquareBytes;
    empty = full + kMostStages * 8;
  }

  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < p.stages; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, kWarpgroup / 32);
      }
      barriers_are_there();
    }
    __syncthreads();
  }

  // Number `q` of the block's chunks, counted over all of its tiles.
  __device__ int64_t tile_of(int q) const { return share.first_tile + q / share.chunks * share.step; }
  __device__ int term_of(int q) const { return (share.first_chunk + q % share.chunks) * kRingTerms; }

  // body(term, row) for the two parts of the tile's rows.
  template <class Body>
  __device__ void with_rows(int q, Body &&body) const {
    const int row = static_cast<int>(tile_of(q)) * kColumns;
    body(term_of(q), row);
    body(term_of(q), row + (gated ? static_cast<int>(p.product.n / 2) : kHalfRows));
  }
  __device__ void ask_for_weight(const void *map, int q) const {
    const int stage = q % p.stages;
    uint32_t to = ring + stage * Layout::kStageBytes;
    barrier_expect(full + 8 * stage, Layout::kStageBytes);
    with_rows(q, [&](int term, int row) {
      copy_tile(to, map, term, row, full + 8 * stage);
      to += kWeightBytes / 2;
    });
  }
  __device__ void ask_for_terms(const void *map, int q) const {
    const int stage = q % p.stages;
    const uint32_t to = ring + stage * Layout::kStageBytes + kWeightBytes;
#pragma unroll
    for (int box = 0; box < Layout::kBoxes; ++box) {
      copy_tile(to + box * TOKENS * kSwizzledRow, map, term_of(q) + box * kRingTerms / Layout::kBoxes, 0, full + 8 * stage);
    }
  }

  // By one thread: everything that the block reads of weight and x.
  __device__ void fill(const void *weight, const void *x) const {
    const int total = share.tiles * share.chunks, ahead = min(p.stages, total);
    bring_map_closer(x);
    for (int q = 0; q < ahead; ++q) {
      if (p.fixed) {
        ask_for_weight(weight, q);
      } else {
        with_rows(q, [&](int term, int row) { bring_tile_closer(weight, term, row); });
      }
    }
    wait_for_kernels_ahead();
    for (int q = 0; q < ahead; ++q) {
      if (!p.fixed) ask_for_weight(weight, q);
      ask_for_terms(x, q);
    }
    for (int q = ahead; q < total; ++q) {
      barrier_wait(empty + 8 * (q % p.stages), (q / p.stages - 1) % 2);
      ask_for_weight(weight, q);
      ask_for_terms(x, q);
    }
  }

  // A warpgroup makes terms of a chunk of x: bf16(x * norm weight) where it lies, zeros from K on; adds up squares.
  __device__ void norm_terms(unsigned char *terms, const float (&factors)[8], int group, float (&square)[kUnits]) const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, first = thread / 8, unit = thread % 8;
    const bool mine = TOKENS >= 16 || first < TOKENS;
    float values[kUnits][8] = {};
    if (mine) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int row = first + 16 * i;
        if constexpr (sizeof(X) == 2) {
          Pack<X, 8> pack;
          memcpy(&pack, terms + swizzled(row, unit), sizeof(pack));
          to_floats<8>(pack, values[i]);
        } else {
          const unsigned char *box = terms + unit / 4 * TOKENS * kSwizzledRow;
          memcpy(&values[i][0], box + swizzled(row, unit % 4 * 2), 16);
          memcpy(&values[i][4], box + swizzled(row, unit % 4 * 2 + 1), 16);
        }
      }
    }
    if constexpr (sizeof(X) == 4) sync_group(group);  // all have read what is written over
    if (mine) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          square[i] = fmaf(values[i][j], values[i][j], square[i]);
          values[i][j] *= factors[j];
        }
        *reinterpret_cast<uint4 *>(terms + swizzled(first + 16 * i, unit)) = {
            pack_bf16(values[i][0], values[i][1]), pack_bf16(values[i][2], values[i][3]),
            pack_bf16(values[i][4], values[i][5]), pack_bf16(values[i][6], values[i][7])};
      }
    }
    stores_before_products();
    sync_group(group);
  }

  __device__ static void sync_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(kWarpgroup) : "memory");
  }
  __device__ static void sync_groups() { sync_warps<1, kSumThreads>(); }

  // A warpgroup's chunks of a tile, whose first is number `base`.
  __device__ void multiply(int group, int base, float (&d)[kParts][kWide / 2], float (&square)[kUnits]) const {
    const int unit = static_cast<int>(threadIdx.x) % 8;
    for (int c = group; c < share.chunks; c += kRingGroups) {
      const int q = base + c, stage = q % p.stages;
      const uint32_t weight = ring + stage * Layout::kStageBytes, terms = weight + kWeightBytes;
      float factors[8] = {};
      if constexpr (normed) {
        const int column = (share.first_chunk + c) * kRingTerms + 8 * unit;
        if (column < p.product.k) p.norm.load_pack<8>(column, factors);
      }
      barrier_wait(full + 8 * stage, q / p.stages % 2);
      if constexpr (normed) norm_terms(stages + stage * Layout::kStageBytes + kWeightBytes, factors, group, square);
      products_begin();
#pragma unroll
      for (int i = 0; i < kRingTerms / 16; ++i) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          multiply_tiles(d[part], tile_descriptor(weight) + 2 * i,
                         tile_descriptor(terms + part * kWide * kSwizzledRow) + 2 * i);
        }
      }
      products_end();
      if (lane_index() == 0) barrier_arrive(empty + 8 * stage);
    }
  }

  // body(float of shared memory, sum) for each sum that this thread has.
  template <class Body>
  __device__ void with_sums(float (&d)[kParts][kWide / 2], Body &&body) const {
    const int lane = lane_index(), row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kWide / 2; ++i) {
        const int token = part * kWide + i / 4 * 8 + lane % 4 * 2 + i % 2;
        body(sums[token * kSumStride + row + i / 2 % 2 * 8], d[part][i]);
      }
    }
  }

  // The sums of both warpgroups, over the block's part of K, to shared memory.
  __device__ void leave_sums(int group, float (&d)[kParts][kWide / 2], float (&square)[kUnits]) const {
    if (group == 1) with_sums(d, [](float &place, float sum) { place = sum; });
    if constexpr (normed) {
      const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float sum = square[i];
#pragma unroll
        for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        const int token = thread / 8 + 16 * i;
        if (thread % 8 == 0 && token < TOKENS) squares[group * TOKENS + token] = sum;
      }
    }
    sync_groups();
    if (group == 0) with_sums(d, [](float &place, float sum) { place += sum; });
  }

  // Four rows of the tile times a token, over all of K.
  __device__ void gather(int token, int row, int splits, float (&to)[4]) const {
    const auto *own = reinterpret_cast<const float4 *>(sums + token * kSumStride + row);
    float4 sum = splits == 1 ? *own : read_cluster(own, 0);
    for (int rank = 1; rank < splits; ++rank) {
      const float4 more = read_cluster(own, rank);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
  }
  __device__ float factor_of(int token, int splits) const {
    if constexpr (!normed) return p.product.alpha;
    float square = 0.0f;
#pragma unroll
    for (int group = 0; group < kRingGroups; ++group) {
      const float *own = squares + group * TOKENS + token;
      if (splits == 1) {
        square += *own;
      } else {
        for (int rank = 0; rank < splits; ++rank) square += read_cluster(own, rank);
      }
    }
    return p.product.alpha * rsqrtf(square / static_cast<float>(p.product.k) + p.eps);
  }

  template <class Y>
  __device__ void finish(int64_t tile, int splits) const {
    const int64_t count = gated ? p.product.n / 2 : p.product.n;
    const int quads = kColumns / 4 / splits, rank = static_cast<int>(blockIdx.y);
    const auto *addend = static_cast<const Y *>(p.addend);
    for (int i = static_cast<int>(threadIdx.x); i < quads * p.product.tokens; i += kSumThreads) {
      const int token = i / quads, row = (rank * quads + i % quads) * 4;
      const int64_t column = tile * kColumns + row, left = count - column;
      if (left <= 0) continue;
      float value[4], added[4] = {};
      const int64_t from = token * p.product.addend_stride + column;
      if (addend != nullptr) p.quads ? load<4>(addend + from, added) : load_upto<4, false>(addend + from, left, added);
      gather(token, row, splits, value);
      const float factor = factor_of(token, splits);
      const auto finished = [&](float sum, int64_t at) {
        return p.product.bias != nullptr && at < p.product.n ? factor * sum + bias_at(p.product, at) : factor * sum;
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] = finished(value[j], column + j) + added[j];
      if constexpr (gated) {
        float up[4];
        gather(token, kHalfRows + row, splits, up);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = activated(p.activation, value[j]) * finished(up[j], count + column + j);
      }
      Y *to = static_cast<Y *>(p.y) + token * p.product.y_stride + column;
      p.quads ? store<4>(to, value) : store_upto<4, false>(to, left, value);
    }
  }

  // By the two warpgroups.
  __device__ void make_tiles() const {
    const int group = static_cast<int>(threadIdx.x) / kWarpgroup, splits = static_cast<int>(gridDim.y);
    for (int made = 0; made < share.tiles; ++made) {
      if (made > 0) sync_groups();  // the sums of the tile before have been read
      float d[kParts][kWide / 2] = {}, square[kUnits] = {};
      multiply(group, made * share.chunks, d, square);
      leave_sums(group, d, square);
      if (splits > 1) {
        cluster_barrier();
      } else {
        sync_groups();
      }
      const int64_t tile = share.first_tile + made * share.step;
      p.y_bf16 ? finish<bf16>(tile, splits) : finish<float>(tile, splits);
    }
    if (splits > 1) cluster_barrier();  // nobody leaves while others read its sums
  }
};

#endif  // SG_HOPPER

template <int TOKENS, class X, bool normed, bool gated>
__global__ void __launch_bounds__(kRingThreads, 2)
    linear_ring(const RingProblem p, const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring<TOKENS, X, normed, gated> ring(p, shared);
  ring.open();
  if (threadIdx.x >= kSumThreads) {
    if (threadIdx.x == kSumThreads) ring.fill(&weight, &x);
    return;
  }
  wait_for_kernels_ahead();
  ring.make_tiles();
#endif
}

// Whether the kernel is there for a call that read_few or read_normed can read.
inline bool ring_supports(const NormedProblem &p, const sg_tensor *x, const sg_tensor *weight) {
  return device().architecture == 90 && p.product.tokens > 0 && p.product.tokens <= kRingTokens && p.product.k > 0 &&
         p.product.k % 8 == 0 && p.product.n < INT32_MAX - 2 * kRingRows && can_map_tiles(x) && can_map_tiles(weight);
}

template <int TOKENS, class X, bool normed, bool gated>
int32_t launch_ring(const sg_call *call, RingProblem &p, const sg_tensor *x, const sg_tensor *weight) {
  using Layout = RingLayout<TOKENS, X, normed>;
  CUtensorMap weight_map, x_map;
  if (!map_tiles(weight, kHalfRows, &weight_map) || !map_tiles(x, TOKENS, &x_map)) {
    return fail(call, "%s: x and the weight begin at multiples of 16 bytes for this kernel", call->op);
  }
  const int units = device().units;
  p.tiles = ceil_div(p.product.n, kRingRows);
  if (gated) p.tiles = ceil_div(p.product.n / 2, kHalfRows);
  p.chunks = static_cast<int>(ceil_div(p.product.k, kRingTerms));
  int splits = 1;
  while (splits < kMostSplits && 2 * splits * p.tiles <= units && p.chunks / (2 * splits) >= kLeastChunks) splits *= 2;
  const int64_t blocks = splits > 1 ? p.tiles : std::min<int64_t>(p.tiles, units);
  const int64_t most = ceil_div(p.tiles, blocks) * ceil_div(p.chunks, splits);
  p.stages = static_cast<int>(std::min<int64_t>(Layout::kStages, most));
  const int bytes = Layout::bytes(p.stages);
  const auto kernel = linear_ring<TOKENS, X, normed, gated>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_clusters_ahead(call, dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(splits)),
                        static_cast<unsigned>(splits), kRingThreads, static_cast<size_t>(bytes), kernel, p, weight_map,
                        x_map);
  return launched(call);
}

// p: all but what depends on the kernel's shape.
template <class X, bool normed, bool gated>
int32_t run_ring(const sg_call *call, RingProblem &p, const sg_tensor *x, const sg_tensor *weight, const sg_tensor *addend) {
  const sg_tensor *y = output(call, 0);
  p.addend = addend != nullptr ? addend->data : nullptr;
  p.y = y->data;
  p.y_bf16 = y->dtype == SG_BF16;
  p.fixed = is_fixed(weight);
  const auto packs = [&](const void *data, int64_t stride) {
    return p.y_bf16 ? can_pack<4>(static_cast<const bf16 *>(data), stride)
                    : can_pack<4>(static_cast<const float *>(data), stride);
  };
  const bool many = p.product.tokens > 1;
  p.quads = y->shape[1] % 4 == 0 && packs(p.y, many ? p.product.y_stride : 0) &&
            (addend == nullptr || packs(p.addend, many ? p.product.addend_stride : 0));
  if (p.product.tokens <= 8) return launch_ring<8, X, normed, gated>(call, p, x, weight);
  if (p.product.tokens <= 16) return launch_ring<16, X, normed, gated>(call, p, x, weight);
  if (p.product.tokens <= 32) return launch_ring<32, X, normed, gated>(call, p, x, weight);
  return launch_ring<64, X, normed, gated>(call, p, x, weight);
}

}  // namespace sg::cuda
