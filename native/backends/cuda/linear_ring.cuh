// Products of up to 128 tokens with a bf16 weight on compute capability 9.0: y[T, N] = alpha x[T, K] weight[N, K]^T + bias +
// addend, where x of few tokens may be normed first and the two halves of N be a gated unit, as rms_norm_linear.cuh reads it.
//
// Floor: the bytes of the weight. A block takes 64 rows of it (32 of the gate and the 32 that belong to them), in chunks of
// 64 terms that the copy engine brings to a ring of stages in shared memory, each with the same terms of all tokens. One
// thread asks for them; two warpgroups multiply them in turn. Of weights that nothing writes while programs run, the
// first stages are asked for before the kernels ahead have ended: two blocks fit a multiprocessor, so that the weights of
// a product come while the one before it still works, and behind it there is only x to read. Few tiles are shared by the
// blocks of a cluster, each with a part of K; they send their sums to the one that has the row, which adds them in order.
//
// More than 32 tokens are slices of 64, a block each for every tile. All of them read the weight, and every block reads x, by
// way of the second-level cache, at some 5 TB/s: a library's larger tiles are ahead where that is more than some 40 MB.
//
// A norm, of up to eight tokens: x arrives as it is, and the warpgroup multiplies its chunk by the norm's weight, rounds it
// to bf16 where it lies, and adds up the squares; a token's sums are scaled by its norm at the end.
#pragma once

#include <algorithm>

#include "cluster.cuh"
#include "hopper.cuh"
#include "rms_norm_linear.cuh"
#include "tile_map.h"

namespace sg::cuda {

constexpr int kRingTokens = 128;  // the most; with a norm kFewTokens
constexpr int kWholeTokens = 32;  // the most that every block takes all of
constexpr int kSliceTokens = 64;  // that a block takes where there are more
constexpr int kRingRows = 64;    // of the weight, of a tile: those of a warpgroup's product
constexpr int kHalfRows = 32;    // of the gate, of a gated tile
constexpr int kRingTerms = 64;   // of a chunk: a row of 128 bytes
constexpr int kRingGroups = 2;
constexpr int kSumThreads = kRingGroups * kWarpgroup, kRingThreads = kSumThreads + 32;
constexpr int kMostStages = 16;
constexpr int kWeightBytes = kRingRows * kSwizzledRow;
constexpr int kSumStride = kRingRows + 4;     // floats from token to token: lanes that store sums meet different banks
constexpr int kQuads = kRingRows / 4;         // of a token's sums
constexpr int kRingBlocks = 2;                // of a multiprocessor
constexpr int kRingShared = 113 << 10;        // bytes of a block
constexpr int kLeastChunks = 4;               // of a block of a cluster

struct RingProblem : NormedProblem {
  const void *addend;
  void *y;
  bool y_bf16;
  bool quads;          // four columns of y and of the addend can be moved at a time
  bool fixed;          // nothing writes the weights while programs run
  int tiles, rounds, stages;
  int splits_log2;     // of the blocks of a cluster
};

// How a block lays out its shared memory: stages, their norm weights, sums, squares, barriers. A block of a cluster makes one
// tile: where others have sums it has what it is sent, and leaves its own where the second warpgroup's first stage was, if
// they fit there. A stage is always the same warpgroup's, so their number is even: a barrier tells one phase from the next,
// and no more.
template <int TOKENS, class X, bool normed>
struct RingLayout {
  static constexpr int kBoxes = sizeof(X) / 2;  // of 128 bytes a token, of a chunk
  static constexpr int kTermBytes = TOKENS * kSwizzledRow * kBoxes;
  static constexpr int kStageBytes = kWeightBytes + kTermBytes;
  static constexpr int kFactorBytes = normed ? kRingTerms * 4 : 0;
  static constexpr int kSumBytes = TOKENS * kSumStride * 4;
  static constexpr int kSquareBytes = normed ? kRingGroups * TOKENS * 4 : 0;
  static constexpr int kBarrierBytes = (2 * kMostStages + 1) * 8 + 8;
  static constexpr int kSentSums = TOKENS * kRingRows * 4, kSentSquares = normed ? kMostCluster * TOKENS * 4 : 0;
  static constexpr bool sums_in_stage(bool cluster) { return cluster && kSumBytes <= kStageBytes; }
  static constexpr int around(bool cluster) {
    const int sent = cluster ? kSentSums + kSentSquares : 0, sums = sums_in_stage(cluster) ? 0 : kSumBytes;
    return sent + sums + kSquareBytes + kBarrierBytes;
  }
  static constexpr int stages(bool cluster) {
    const int room = (kRingShared - around(cluster)) / (kStageBytes + kFactorBytes);
    return std::min(kMostStages, room / kRingGroups * kRingGroups);
  }
  static constexpr int bytes(int stages, bool cluster) { return around(cluster) + stages * (kStageBytes + kFactorBytes); }
  static_assert(kTermBytes % 1024 == 0);
  static_assert(stages(true) >= kRingGroups && (!normed || TOKENS == kFewTokens));
};

#if SG_HOPPER

template <int TOKENS, class X, bool normed, bool gated>
struct Ring {
  using Layout = RingLayout<TOKENS, X, normed>;
  static constexpr int kColumns = gated ? kHalfRows : kRingRows;  // of y, of a tile
  static constexpr int kHalves = kRingRows / kColumns;            // parts of a tile that lie apart in the weight

  const RingProblem &p;
  unsigned char *stages, *factors;
  float *sums, *squares;
  float4 *sent;
  float *sent_squares;
  Inbox *inbox;
  uint32_t ring, full, empty;
  int splits, rank, first_chunk, chunks, tiles, first_token, tokens;

  __device__ Ring(const RingProblem &problem, unsigned char *shared) : p(problem) {
    if (shared_address(shared) % 1024 != 0) __trap();  // swizzled tiles are aligned to that
    stages = shared;
    factors = stages + p.stages * Layout::kStageBytes;
    splits = 1 << p.splits_log2;
    unsigned char *const results = factors + p.stages * Layout::kFactorBytes;
    sent = reinterpret_cast<float4 *>(results);
    sent_squares = reinterpret_cast<float *>(results + Layout::kSentSums);
    first_token = static_cast<int>(blockIdx.z) * TOKENS;
    tokens = min(p.product.tokens - first_token, TOKENS);
    unsigned char *const behind = results + (splits > 1 ? Layout::kSentSums + Layout::kSentSquares : 0);
    const bool in_stage = Layout::sums_in_stage(splits > 1);
    sums = reinterpret_cast<float *>(in_stage ? stages + Layout::kStageBytes : behind);
    squares = reinterpret_cast<float *>(behind + (in_stage ? 0 : Layout::kSumBytes));
    unsigned char *const barriers = reinterpret_cast<unsigned char *>(squares) + Layout::kSquareBytes;
    inbox = reinterpret_cast<Inbox *>(barriers) + 2 * kMostStages;
    ring = shared_address(stages);
    full = shared_address(barriers);
    empty = full + kMostStages * 8;
    rank = static_cast<int>(blockIdx.y);
    const int first_round = p.rounds * rank >> p.splits_log2;
    first_chunk = first_round * kRingGroups;
    chunks = (p.rounds * (rank + 1) >> p.splits_log2) * kRingGroups - first_chunk;
    tiles = (p.tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }

  __device__ void open() const {
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int s = 0; s < p.stages; ++s) {
        barrier_init(full + 8 * s, 1);
        barrier_init(empty + 8 * s, kWarpgroup / 32);
      }
      barriers_are_there();
      if (splits > 1) open_inbox(inbox, tokens * (kRingRows * 4 + (normed ? splits * 4 : 0)));
    }
    __syncthreads();
    if (splits > 1) ready_for_sends();
  }

  // Which of the block's chunks, counted over all of its tiles.
  struct Place {
    int tile, chunk = 0, stage = 0;
    uint32_t parity = 0;

    __device__ explicit Place(int first) : tile(first) {}
    __device__ void next(const Ring &r) {
      if (++chunk == r.chunks) {
        chunk = 0;
        tile += static_cast<int>(gridDim.x);
      }
      if (++stage == r.p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
  };

  __device__ uint32_t bytes_of_factors(int term) const {
    return static_cast<uint32_t>(max(min(kRingTerms, static_cast<int>(p.product.k) - term), 0) * p.norm.element_bytes());
  }
  __device__ int row_of(const Place &at, int half) const {
    return at.tile * kColumns + half * static_cast<int>(p.product.n / 2);
  }
  __device__ void bring_weight_closer(const void *map, const Place &at) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      bring_tile_closer(map, (first_chunk + at.chunk) * kRingTerms, row_of(at, half));
    }
  }
  __device__ void ask_for_weight(const void *map, const Place &at) const {
    const int term = (first_chunk + at.chunk) * kRingTerms;
    const uint32_t to = ring + at.stage * Layout::kStageBytes, barrier = full + 8 * at.stage;
    const uint32_t bytes = normed ? bytes_of_factors(term) : 0;
    barrier_expect(barrier, Layout::kStageBytes + bytes);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      copy_tile(to + half * (kWeightBytes / kHalves), map, term, row_of(at, half), barrier);
    }
    if constexpr (normed) {
      const char *from = static_cast<const char *>(p.norm.data) + term * p.norm.element_bytes();
      if (bytes > 0) copy_bytes(shared_address(factors) + at.stage * Layout::kFactorBytes, from, bytes, barrier);
    }
  }
  __device__ void ask_for_terms(const void *map, const Place &at) const {
    const uint32_t to = ring + at.stage * Layout::kStageBytes + kWeightBytes;
#pragma unroll
    for (int box = 0; box < Layout::kBoxes; ++box) {
      const int term = (first_chunk + at.chunk) * kRingTerms + box * (kRingTerms / Layout::kBoxes);
      copy_tile(to + box * TOKENS * kSwizzledRow, map, term, first_token, full + 8 * at.stage);
    }
  }

  // By one thread: everything that the block reads of weights and x.
  __device__ void fill(const void *weight, const void *x) const {
    const int total = tiles * chunks, ahead = min(p.stages, total);
    bring_map_closer(x);
    Place at(static_cast<int>(blockIdx.x)), behind = at;
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, at.next(*this)) {
      p.fixed ? ask_for_weight(weight, at) : bring_weight_closer(weight, at);
    }
    wait_for_kernels_ahead();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i, behind.next(*this)) {
      if (!p.fixed) ask_for_weight(weight, behind);
      ask_for_terms(x, behind);
    }
#pragma unroll 1
    for (int i = ahead; i < total; ++i, at.next(*this)) {
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
      ask_for_weight(weight, at);
      ask_for_terms(x, at);
    }
  }

  __device__ static void sync_group(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(kWarpgroup) : "memory");
  }
  __device__ static void sync_groups() { sync_warps<1, kSumThreads>(); }

  // A warpgroup takes every second of the block's chunks.
  struct Turn {
    int stage, term;
    uint32_t parity = 0;

    __device__ void next(const Ring &r) {
      term += kRingGroups * kRingTerms;
      stage += kRingGroups;
      if (stage >= r.p.stages) {
        stage -= r.p.stages;
        parity ^= 1;
      }
    }
  };

  // Eight terms of a token in a warpgroup's chunk of x, as they came: the first threads have some.
  using Terms = Pack<X, 8>;
  __device__ static int own_row() { return static_cast<int>(threadIdx.x) % kWarpgroup / 8; }
  __device__ static int own_unit() { return static_cast<int>(threadIdx.x) % 8; }
  __device__ static bool has_terms() { return own_row() < TOKENS; }
  __device__ unsigned char *terms_of(int stage) const { return stages + stage * Layout::kStageBytes + kWeightBytes; }

  // A warpgroup makes terms of its next chunk of x: bf16(x * norm weight) where they lie, zeros from K on.
  __device__ void norm_terms(const Turn &turn, int group, Terms &terms) const {
    const unsigned char *const from = terms_of(turn.stage);
    if (has_terms()) {
      if constexpr (sizeof(X) == 2) {
        memcpy(&terms, from + swizzled(own_row(), own_unit()), 16);
      } else {
        const unsigned char *box = from + own_unit() / 4 * TOKENS * kSwizzledRow;
        memcpy(&terms.at[0], box + swizzled(own_row(), own_unit() % 4 * 2), 16);
        memcpy(&terms.at[4], box + swizzled(own_row(), own_unit() % 4 * 2 + 1), 16);
      }
    }
    if constexpr (sizeof(X) == 4) sync_group(group);  // all have read what is written over
    const bool exact = sizeof(X) == 2 && p.norm.dtype == SG_BF16 && p.norm.offset == 0.0f;
    if (has_terms()) exact ? write_terms<true>(turn, terms) : write_terms<false>(turn, terms);
    stores_before_products();
    sync_group(group);
  }
  // in_pairs: both factors are bf16, so their product is rounded once without leaving it.
  template <bool in_pairs>
  __device__ void write_terms(const Turn &turn, const Terms &terms) const {
    const bool inside = turn.term + own_unit() * 8 < p.product.k;
    const unsigned char *own = factors + turn.stage * Layout::kFactorBytes;
    uint4 word;
    if constexpr (in_pairs) {
      uint4 factor = {};
      if (inside) factor = *reinterpret_cast<const uint4 *>(own + own_unit() * 16);
      memcpy(&word, &terms, sizeof(word));
      word = {multiply_pairs(word.x, factor.x), multiply_pairs(word.y, factor.y), multiply_pairs(word.z, factor.z),
              multiply_pairs(word.w, factor.w)};
    } else {
      float factor[8] = {}, values[8];
      if (inside) {
        Weight norm = p.norm;
        norm.data = own;
        norm.load_pack<8>(own_unit() * 8, factor);
      }
      to_floats<8>(terms, values);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] *= factor[j];
      word = {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
              pack_bf16(values[6], values[7])};
    }
    *reinterpret_cast<uint4 *>(terms_of(turn.stage) + swizzled(own_row(), own_unit())) = word;
  }
  __device__ static void add_squares(const Terms &terms, float &square) {
    if (!has_terms()) return;
    float values[8], even = 0.0f, odd = 0.0f;
    to_floats<8>(terms, values);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      even = fmaf(values[j], values[j], even);
      odd = fmaf(values[j + 1], values[j + 1], odd);
    }
    square += even + odd;
  }

  __device__ void multiply_chunk(int stage, float (&d)[TOKENS / 2]) const {
    const uint32_t weight = ring + stage * Layout::kStageBytes, terms = weight + kWeightBytes;
#pragma unroll
    for (int i = 0; i < kRingTerms / 16; ++i) {
      multiply_tiles(d, tile_descriptor(weight) + 2 * i, tile_descriptor(terms) + 2 * i);
    }
  }

  // A warpgroup's chunks of a tile. Squares are added up while the products are under way.
  __device__ void multiply(int group, Turn &turn, float (&d)[TOKENS / 2], float &square) const {
#pragma unroll 1
    for (int done = 0; done < chunks; done += kRingGroups) {
      barrier_wait(full + 8 * turn.stage, turn.parity);
      Terms terms;
      if constexpr (normed) norm_terms(turn, group, terms);
      products_begin();
      multiply_chunk(turn.stage, d);
      products_commit();
      if constexpr (normed) add_squares(terms, square);
      products_wait();
      if (lane_index() == 0) barrier_arrive(empty + 8 * turn.stage);
      turn.next(*this);
    }
  }

  // body(float of shared memory, sum) for each sum that this thread has.
  template <class Body>
  __device__ void with_sums(float (&d)[TOKENS / 2], Body &&body) const {
    const int lane = lane_index(), row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      body(sums[token * kSumStride + row + i / 2 % 2 * 8], d[i]);
    }
  }

  // The sums of both warpgroups, over the block's part of K, to shared memory.
  __device__ void leave_sums(int group, float (&d)[TOKENS / 2], float square) const {
    if (group == 1) with_sums(d, [](float &place, float sum) { place = sum; });
    if constexpr (normed) {
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) square += __shfl_xor_sync(0xffffffffu, square, offset);
      if (own_unit() == 0 && has_terms()) squares[group * TOKENS + own_row()] = square;
    }
    sync_groups();
    if (group == 0) with_sums(d, [](float &place, float sum) { place += sum; });
    sync_groups();
  }

  // Of each quad of a half of the tile's rows a block of the cluster has an equal share.
  static constexpr int kHalfQuads = kQuads / kHalves;
  __device__ int quads() const { return kHalfQuads >> p.splits_log2; }
  __device__ float4 *sent_by(int from, int token, int half, int quad) const {
    return sent + (((from * tokens + token) * kHalves + half) * quads() + quad);
  }
  // To each block of the cluster what it finishes.
  __device__ void send_sums() const {
    const int each = quads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kQuads * tokens; i += kSumThreads) {
      const int token = i / kQuads, half = i % kQuads / kHalfQuads, quad = i % kHalfQuads;
      const float4 sum = *reinterpret_cast<const float4 *>(sums + token * kSumStride + i % kQuads * 4);
      send(sum, sent_by(rank, token, half, quad & (each - 1)), inbox, quad * splits / kHalfQuads);
    }
    if constexpr (normed) {
      const int token = static_cast<int>(threadIdx.x);
      if (token < tokens) {
        const float square = squares[token] + squares[TOKENS + token];
#pragma unroll 1
        for (int to = 0; to < splits; ++to) send(square, sent_squares + rank * TOKENS + token, inbox, to);
      }
    }
  }

  // Four rows of the tile times a token, over all of K; `quad` of those that this block finishes.
  __device__ void gather(int token, int half, int quad, float (&to)[4]) const {
    const auto *own = reinterpret_cast<const float4 *>(sums + token * kSumStride) + half * kHalfQuads + quad;
    float4 sum = splits == 1 ? *own : *sent_by(0, token, half, quad);
#pragma unroll 1
    for (int from = 1; from < splits; ++from) {
      const float4 more = *sent_by(from, token, half, quad);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
  }
  __device__ float factor_of(int token) const {
    if constexpr (!normed) return p.product.alpha;
    float square = splits == 1 ? squares[token] + squares[TOKENS + token] : sent_squares[token];
#pragma unroll 1
    for (int from = 1; from < splits; ++from) square += sent_squares[from * TOKENS + token];
    return p.product.alpha * rsqrtf(square / static_cast<float>(p.product.k) + p.eps);
  }

  // sum = factor sum + bias, for four neighbouring rows of the weight from `row` on.
  __device__ void scale(float factor, int64_t row, float (&sum)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum[j] *= factor;
      if (p.product.bias != nullptr && row + j < p.product.n) sum[j] += bias_at(p.product, row + j);
    }
  }
  // body(data) as what y and the addend hold.
  template <class Body>
  __device__ void with_result_type(Body &&body) const {
    p.y_bf16 ? body(static_cast<bf16 *>(p.y)) : body(static_cast<float *>(p.y));
  }

  __device__ void finish(int tile) const {
    const int64_t count = p.product.n / kHalves;
    const int each = quads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < each * tokens; i += kSumThreads) {
      const int token = i * splits / kHalfQuads, quad = i & (each - 1);
      const int64_t column = int64_t{tile} * kColumns + (rank * each + quad) * 4, left = count - column;
      float value[4], added[4] = {};
      if (p.addend != nullptr && left > 0) {
        with_result_type([&]<class Y>(Y *) {
          const Y *from = static_cast<const Y *>(p.addend) + (first_token + token) * p.product.addend_stride + column;
          p.quads ? load<4>(from, added) : load_upto<4, false>(from, left, added);
        });
      }
      if (splits > 1) wait_for_inbox(inbox);
      if (left <= 0) continue;
      const float factor = factor_of(token);
      gather(token, 0, quad, value);
      scale(factor, column, value);
#pragma unroll
      for (int j = 0; j < 4; ++j) value[j] += added[j];
      if constexpr (gated) {
        float up[4];
        gather(token, 1, quad, up);
        scale(factor, count + column, up);
        multiply_activated(p.activation, value, up);
      }
      with_result_type([&]<class Y>(Y *y) {
        Y *to = y + (first_token + token) * p.product.y_stride + column;
        p.quads ? store<4>(to, value) : store_upto<4, false>(to, left, value);
      });
    }
  }

  // By the two warpgroups.
  __device__ void make_tiles() const {
    const int group = static_cast<int>(threadIdx.x) / kWarpgroup, first_term = (first_chunk + group) * kRingTerms;
    Turn turn{group, first_term};
    if (splits > 1) wait_until_ready();
    wait_for_kernels_ahead();
    int tile = static_cast<int>(blockIdx.x);
    for (int made = 0; made < tiles; ++made, tile += static_cast<int>(gridDim.x)) {
      if (made > 0) sync_groups();  // the sums of the tile before have been read
      float d[TOKENS / 2] = {}, square = 0.0f;
      turn.term = first_term;
      multiply(group, turn, d, square);
      leave_sums(group, d, square);
      if (splits > 1) send_sums();
      finish(tile);
    }
    if (splits > 1) wait_for_inbox(inbox);
  }
};

#endif  // SG_HOPPER

template <int TOKENS, class X, bool normed, bool gated>
__global__ void __launch_bounds__(kRingThreads, kRingBlocks)
    linear_ring(const RingProblem p, const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  const Ring<TOKENS, X, normed, gated> ring(p, shared);
  ring.open();
  if (threadIdx.x >= kSumThreads) {
    if (threadIdx.x == kSumThreads) ring.fill(&weight, &x);
    return;
  }
  ring.make_tiles();
#endif
}

// Whether it is ahead of a library's. Beside other kernels two microseconds are gained that it does not gain by itself, as its
// blocks come while the kernel ahead works.
inline bool is_quick(const FewProblem &p) {
  constexpr int64_t kMostBytes = 40 << 20;
  const int64_t blocks = ceil_div(p.n, kRingRows) * ceil_div(p.tokens, kSliceTokens);
  return p.tokens <= kWholeTokens || 2 * blocks * p.k * (kRingRows + kSliceTokens) <= kMostBytes;
}

// Whether the kernel is there for a call that read_few or read_normed can read.
inline bool ring_supports(const NormedProblem &p, const sg_tensor *x, const sg_tensor *weight) {
  return device().architecture == 90 && p.product.tokens > 0 && p.product.k > 0 &&
         p.product.k % 8 == 0 && p.product.n < INT32_MAX - 2 * kRingRows && can_map_tiles(x) && can_map_tiles(weight);
}

template <int TOKENS, class X, bool normed, bool gated>
int32_t launch_ring(const sg_call *call, RingProblem &p, const sg_tensor *x, const sg_tensor *weight) {
  using Layout = RingLayout<TOKENS, X, normed>;
  constexpr int kColumns = gated ? kHalfRows : kRingRows;
  CUtensorMap weight_map, x_map;
  if (!map_tiles(weight, kColumns, &weight_map) || !map_tiles(x, TOKENS, &x_map)) {
    return fail(call, "%s: x and the weight begin at multiples of 16 bytes for this kernel", call->op);
  }
  const int units = device().units;
  p.tiles = static_cast<int>(ceil_div(gated ? p.product.n / 2 : p.product.n, kColumns));
  p.rounds = static_cast<int>(ceil_div(p.product.k, kRingTerms * kRingGroups));
  p.splits_log2 = 0;
  int splits = 1;
  const int slices = static_cast<int>(ceil_div(p.product.tokens, TOKENS)), chunks = p.rounds * kRingGroups;
  while (splits < kMostCluster && 4 * splits * p.tiles * slices <= 3 * units && chunks / (2 * splits) >= kLeastChunks) {
    splits *= 2;
    ++p.splits_log2;
  }
  const int blocks = splits > 1 ? p.tiles : std::min(p.tiles, kRingBlocks * units / slices);
  const int64_t most = ceil_div(p.tiles, blocks) * ceil_div(p.rounds, splits) * kRingGroups;
  p.stages = static_cast<int>(std::min<int64_t>(most, Layout::stages(splits > 1)));
  const int bytes = Layout::bytes(p.stages, splits > 1);
  const auto kernel = linear_ring<TOKENS, X, normed, gated>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  launch_clusters_ahead(call,
                        dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(splits), static_cast<unsigned>(slices)),
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
  const auto packs = [&](const void *data, int64_t stride) {
    return p.y_bf16 ? can_pack<4>(static_cast<const bf16 *>(data), stride)
                    : can_pack<4>(static_cast<const float *>(data), stride);
  };
  const bool many = p.product.tokens > 1;
  p.quads = y->shape[1] % 4 == 0 && packs(p.y, many ? p.product.y_stride : 0) &&
            (addend == nullptr || packs(p.addend, many ? p.product.addend_stride : 0));
  if constexpr (!normed) {
    if (p.product.tokens > kWholeTokens) return launch_ring<kSliceTokens, X, normed, gated>(call, p, x, weight);
    if (p.product.tokens > 16) return launch_ring<kWholeTokens, X, normed, gated>(call, p, x, weight);
    if (p.product.tokens > kFewTokens) return launch_ring<16, X, normed, gated>(call, p, x, weight);
  }
  return launch_ring<kFewTokens, X, normed, gated>(call, p, x, weight);
}

}  // namespace sg::cuda
