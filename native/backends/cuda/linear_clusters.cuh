// Products of some tens of tokens with a bf16 weight by clusters of blocks, at their core; linear_clusters.cu says how
// the work is shared.
#pragma once

#include "attention_ptx.cuh"
#include "cluster.cuh"
#include "linear_few.cuh"
#include "linear_few_ptx.cuh"

namespace sg::cuda::clusters {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kWarpRows = 16, kRows = kWarps * kWarpRows;  // of the weight: of a warp, and of a cluster
constexpr int kChunk = 32;        // terms that a warp takes at once
constexpr int kMostTiles = 4;     // of 16 tokens
constexpr int chunks_ahead(int tiles) { return tiles < kMostTiles ? 8 : 6; }  // of a warp, under way; even
constexpr int kMostRanks = 8;     // blocks of a cluster, on every device that has clusters
constexpr int kLeastPart = 128;   // terms of a block
constexpr int64_t kWave = 132;    // blocks that run at once, about; not the device's own, of which bits would depend
constexpr int kMostAhead = 4096;  // bytes of a row

// Of K: how many blocks of a cluster, a power of two, share it, and how many terms each takes, a multiple of kChunk;
// the last ones may have fewer, or none. A block finishes the rows of `own` warps of each block.
struct Cut {
  int ranks, part, own;
};

inline Cut cut(int64_t n, int64_t k) {
  const int64_t clusters = ceil_div(n, kRows);
  int ranks = 1;
  while (ranks < kMostRanks && 2 * ranks * clusters <= kWave && 2 * ranks * kLeastPart <= k) ranks *= 2;
  return {ranks, static_cast<int>(ceil_div(ceil_div(k, ranks), kChunk) * kChunk), kWarps / ranks};
}

struct Product {
  const bf16 *x, *weight;
  int64_t x_stride, weight_stride;  // elements from row to row
  int tokens, n, k;
  Cut cut;
};

// ---- shared memory: what the cluster's blocks send, the count of it, and x's part in panels of chunks_ahead chunks, a
// token a row.
constexpr int tiles_of(int tokens) { return tokens <= 16 ? 1 : tokens <= 32 ? 2 : kMostTiles; }
constexpr int received_bytes(int tiles) { return kRows * 16 * tiles * static_cast<int>(sizeof(float)); }
constexpr int terms_offset(int tiles) { return received_bytes(tiles) + 16; }
// An odd number of halves of 128 bytes, so that reads of two rows at once are in different banks.
constexpr int row_bytes(int tiles) { return (chunks_ahead(tiles) | 1) * 64; }
constexpr int panel_bytes(int tiles) { return 16 * tiles * row_bytes(tiles); }
inline size_t shared_bytes(int tiles, int64_t part) {
  return static_cast<size_t>(terms_offset(tiles) + ceil_div(part, kChunk * chunks_ahead(tiles)) * panel_bytes(tiles));
}

// launch(std::integral_constant<int, tiles>)
template <class Launch>
int32_t with_tiles(int tiles, Launch &&launch) {
  switch (tiles) {
    case 1: return launch(std::integral_constant<int, 1>{});
    case 2: return launch(std::integral_constant<int, 2>{});
    default: return launch(std::integral_constant<int, kMostTiles>{});
  }
}

template <class Problem>
int32_t launch_product(const sg_call *call, const Product &p, int tiles, void (*kernel)(Problem),
                       const Problem &problem) {
  const size_t shared = shared_bytes(tiles, p.cut.part);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  if (error != cudaSuccess) return fail(call, "%s: CUDA: %s", call->op, cudaGetErrorString(error));
  const dim3 blocks(static_cast<unsigned>(ceil_div(p.n, kRows)), static_cast<unsigned>(p.cut.ranks));
  launch_clusters_ahead(call, blocks, blocks.y, kThreads, shared, kernel, problem);
  return launched(call);
}

// ---- on the device
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / 32; }

// The terms that are this block's: `count` from `first` on, in chunks of which the last may be short.
struct Share {
  int first, count, chunks;

  __device__ explicit Share(const Product &p)
      : first(static_cast<int>(blockIdx.y) * p.cut.part),
        count(max(0, min(p.cut.part, p.k - first))),
        chunks((count + kChunk - 1) / kChunk) {}
};

// Or the compiler leaves it for later, when the kernels ahead are done.
template <class T>
__device__ inline void computed_here(T *&address) {
  asm volatile("" : "+l"(address));
}

// load_streamed, or zeros.
__device__ inline uint4 load_streamed_if(bool inside, const void *from) {
  uint4 word;
  asm volatile(
      "{\n\t.reg .pred inside;\n\tsetp.ne.s32 inside, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@inside ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(word.x), "=&r"(word.y), "=&r"(word.z), "=&r"(word.w)
      : "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(inside)));
  return word;
}

// What a lane takes of the warp's 16 rows: of two, eight terms of each chunk. A row past the last is the last.
//
// In the fragments' terms the rows are two tiles of columns, of which a lane gets the results of columns pair and
// pair + 1: it loads such rows that these are four neighbours, 4 * (lane % 4) and on.
struct WeightRows {
  const bf16 *at[2];

  __device__ WeightRows(const Product &p, const Share &share) {
    const int group = lane_index() / 4, term = share.first + 8 * (lane_index() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at[i] = row(p, group / 2 * 4 + 2 * i + group % 2) + term;
      computed_here(at[i]);
    }
  }

  __device__ static const bf16 *row(const Product &p, int i) {
    const int index = static_cast<int>(blockIdx.x) * kRows + warp_index() * kWarpRows + i;
    return p.weight + min(index, p.n - 1) * p.weight_stride;
  }

  __device__ void bring(const Product &p, const Share &share) const {
    if (lane_index() >= kWarpRows || share.count == 0) return;
    bring_closer(row(p, lane_index()) + share.first, static_cast<uint32_t>(min(2 * share.count, kMostAhead)));
  }

  // Of a chunk counted from `at`, which `left` terms of the share still follow.
  __device__ void load(int chunk, int left, uint4 (&to)[2]) const {
    const bool inside = kChunk * chunk + 8 * (lane_index() % 4) < left;
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = load_streamed_if(inside, at[i] + kChunk * chunk);
  }
};

// Copies of x's part to shared memory, zeros where there is no token or no term: a warp takes every eighth token.
template <int tiles>
struct Terms {
  static constexpr int kPanel = kChunk * chunks_ahead(tiles);  // terms
  const bf16 *from;
  uint32_t to;

  __device__ Terms(const Product &p, const Share &share, const unsigned char *shared)
      : from(p.x + warp_index() * p.x_stride + share.first + 8 * lane_index()),
        to(shared_address(shared) + warp_index() * row_bytes(tiles) + 16 * lane_index()) {
    computed_here(from);
  }

  __device__ void copy(const Product &p, const Share &share) const {
    const int tokens = p.tokens - warp_index(), left = share.count - 8 * lane_index();
#pragma unroll 1
    for (int panel = 0; panel * kPanel < share.count; ++panel) {
      if (8 * lane_index() >= kPanel) break;
      const bool inside = panel * kPanel < left;
#pragma unroll
      for (int i = 0; i < 16 * tiles / kWarps; ++i) {
        const bf16 *token = from + i * (kWarps * p.x_stride) + panel * kPanel;
        copy_async_16(to + panel * panel_bytes(tiles) + i * (kWarps * row_bytes(tiles)), token,
                      inside && i * kWarps < tokens);
      }
    }
    __syncwarp();  // or the compiler has what comes after these begun first
  }
};

// sums += a chunk of the warp's rows times all tokens; `terms` has this lane's of token lane / 4.
template <int tiles>
__device__ inline void multiply_chunk(const unsigned char *terms, const uint4 (&weight)[2],
                                      float (&sums)[tiles][2][4]) {
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
    const uint4 low = *reinterpret_cast<const uint4 *>(terms + 16 * m * row_bytes(tiles));
    const uint4 high = *reinterpret_cast<const uint4 *>(terms + (16 * m + 8) * row_bytes(tiles));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply_fragments(sums[m][i], {low.x, high.x, low.y, high.y}, weight[i].x, weight[i].y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      multiply_fragments(sums[m][i], {low.z, high.z, low.w, high.w}, weight[i].z, weight[i].w);
    }
  }
}

// The warp's rows times x's part, whose copies this thread has begun. Called by all; `meanwhile` is what to do while
// the weight is on its way.
template <int tiles, class Meanwhile>
__device__ inline void multiply_share(WeightRows rows, const Share &share, const unsigned char *terms,
                                      Meanwhile &&meanwhile, float (&sums)[tiles][2][4]) {
  constexpr int kDepth = chunks_ahead(tiles), kHalf = kDepth / 2;
  uint4 weight[kDepth][2];
#pragma unroll
  for (int j = 0; j < kDepth; ++j) rows.load(j, share.count, weight[j]);
  __syncwarp();  // or the compiler has x waited for before the last of these
  meanwhile();
  wait_copies();
  __syncthreads();
  terms += lane_index() / 4 * row_bytes(tiles) + 16 * (lane_index() % 4);
  for (int chunks = share.chunks; chunks > 0; chunks -= kDepth, terms += panel_bytes(tiles)) {
    const int left = share.count - (share.chunks - chunks + kDepth) * kChunk;  // after these
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.at[i] += kDepth * kChunk;
    with_whole(chunks >= kDepth, [&](auto whole) {
#pragma unroll
      for (int j = 0; j < kDepth; ++j) {
        if (!decltype(whole)::value && j >= chunks) break;
        multiply_chunk<tiles>(terms + j * kChunk * sizeof(bf16), weight[j], sums);
        if constexpr (decltype(whole)::value) {
          if (j % kHalf != kHalf - 1) continue;
#pragma unroll
          for (int next = j + 1 - kHalf; next <= j; ++next) rows.load(next, left, weight[next]);
          __syncwarp();  // or these are begun after the other half's products
        }
      }
    });
  }
}

// ---- what the blocks of a cluster give each other
// Four results of one token, which one thread finishes: rows of the weight `row` to row + 3.
struct Place {
  int token, row;
};

// What a block gets of its rows: for each rank and warp, for each eight tokens, what the lanes hold.
template <int tiles>
struct Exchange {
  static constexpr int kOfWarp = 64 * tiles;
  float4 *received;
  uint64_t *arrived;
  int own, ranks;

  __device__ Exchange(const Product &p, unsigned char *shared)
      : received(reinterpret_cast<float4 *>(shared)),
        arrived(reinterpret_cast<uint64_t *>(shared + received_bytes(tiles))),
        own(p.cut.own),
        ranks(p.cut.ranks) {}

  __device__ int items() const { return own * kOfWarp; }  // of a thread to finish

  __device__ void begin() const {
    if (threadIdx.x == 0) expect_bytes(arrived, received_bytes(tiles));
    announce_block();
  }
  __device__ void begin_to_send() const { await_blocks(); }
  __device__ void await() const { await_bytes(arrived); }

  __device__ void send(const float (&sums)[tiles][2][4]) const {
    const int to = warp_index() * ranks / kWarps;
    const int slot = static_cast<int>(blockIdx.y) * own + (warp_index() & (own - 1));
    float4 *at = received + slot * kOfWarp + lane_index();
#pragma unroll
    for (int m = 0; m < tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&low)[4] = sums[m][0], (&high)[4] = sums[m][1];
        send_to_block(to, at + (2 * m + half) * 32, arrived,
                      make_float4(low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]));
      }
    }
  }

  __device__ Place place(int item) const {
    const int warp = static_cast<int>(blockIdx.y) * own + item / kOfWarp;
    return {item % kOfWarp / 32 * 8 + item % 32 / 4,
            static_cast<int>(blockIdx.x) * kRows + warp * kWarpRows + 4 * (item % 4)};
  }

  // Over the parts of K, in their order.
  __device__ float4 sum(int item) const {
    float4 total = received[item];
    for (int rank = 1; rank < ranks; ++rank) {
      const float4 part = received[rank * items() + item];
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    return total;
  }
};

}  // namespace sg::cuda::clusters
