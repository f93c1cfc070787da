// Tokens of their own, each against its cached keys: what a decoding step asks of paged_attention.
//
// A key-value head's keys are read once for all of its query heads. A warp takes 16 keys at a time (paged_attention_tiles.cuh)
// into the fragments of mma.m16n8k16: keys and the dimensions of values are the rows of the products, query heads the
// columns. The next keys are under way while weights are made, the next values while keys are multiplied, from one split to
// the next too. Heads of more than 128 elements are made by two warps, each with one half of the dimensions of keys and of
// values, which add up their halves of the logits in shared memory: neither registers nor bytes under way are then any other
// than those of a head of 128.
//
// The rows of a lone token's earlier positions were written by runs of a program that are over. So where nothing writes
// positions and tables either, the first tiles are asked for before the kernels ahead have ended: all but the one with
// the token's own row.
//
// The keys of a token are cut into splits. Those that a block's warps make at a time, a batch, are folded in shared
// memory, and batches into the result, both in their order. Where keys are cut depends on the position and on the
// number of key-value heads alone, and a fold is the same arithmetic wherever it is done: a token's bits depend on it
// and on its keys, never on the other tokens of the call. With few tokens the batches are blocks all over the device
// (paged_attention_batches.cuh); with many, a block makes all batches of a token.
#pragma once

#include "attention_common.cuh"
#include "paged_attention_tiles.cuh"

namespace sg::cuda {

constexpr int kMostSplitsLog2 = 6, kMostSplits = 1 << kMostSplitsLog2;
constexpr int kLeastTiles = 2;  // of a split

// Splits of a token and key-value head, at most, as a power of two: more where few heads leave a lone sequence few warps.
__host__ __device__ inline int most_splits_log2(const PagedProblem &p) {
  return p.heads <= 2 * p.group ? kMostSplitsLog2 : kMostSplitsLog2 - 1;
}
__host__ __device__ inline int most_splits(const PagedProblem &p) { return 1 << most_splits_log2(p); }
// The splits of a batch.
__host__ __device__ constexpr int batch_splits(int dim) { return kDecodeWarps / split_warps(dim); }

// Tokens are told apart within aligned windows of this many: those that go on where the token before them left off, and
// those that stand alone.
constexpr int kWindowTokens = 128;

struct LogitFactors {
  float logit;    // logits in base 2 are this times the product q.k, or times its capped tangent
  float tangent;  // 0: logits are not capped

  explicit LogitFactors(const PagedProblem &p)
      : logit((p.softcap > 0.0f ? p.softcap : p.scale) * kLog2e),
        tangent(p.softcap > 0.0f ? p.scale / p.softcap : 0.0f) {}
};

// Whether a token of a sequence has a row in the table for its position.
__device__ inline bool is_known(const PagedProblem &p, int sequence, int position) {
  return sequence >= 0 && sequence < p.sequences && position >= 0 && position < p.max_blocks * p.block_size;
}

// Whether token + 1 goes on where `token` leaves off, within their window. Both are tokens of the call.
__device__ inline bool goes_on(const PagedProblem &p, const PagedIndices &at, int token) {
  if ((token + 1) % kWindowTokens == 0) return false;
  const int sequence = at.sequence_ids[token], position = at.positions[token];
  const int next_sequence = at.sequence_ids[token + 1], next_position = at.positions[token + 1];
  return sequence == next_sequence && static_cast<int64_t>(position) + 1 == next_position &&
         is_known(p, sequence, position) && is_known(p, sequence, next_position);
}

// A bit for each token of a window, or for each thread of a block of as many.
struct TokenBits {
  uint32_t words[kWindowTokens / 32];

  // The thread's own. By all threads of a block, of which there are kWindowTokens; a barrier has to follow.
  __device__ void put(bool value) {
    const uint32_t word = __ballot_sync(0xffffffffu, value);
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = word;
  }
  __device__ bool any() const { return (words[0] | words[1] | words[2] | words[3]) != 0; }
  // The first index from `from` on whose bit is `value`, or kWindowTokens.
  __device__ int find(int from, bool value) const {
    for (int index = from; index < kWindowTokens; index = (index / 32 + 1) * 32) {
      const uint32_t word = (value ? words[index / 32] : ~words[index / 32]) >> index % 32;
      if (word != 0) return index + __ffs(static_cast<int>(word)) - 1;
    }
    return kWindowTokens;
  }
};

// Neither padding nor part of a run.
__device__ inline bool is_alone(const PagedProblem &p, const PagedIndices &at, int tokens, int token) {
  if (at.sequence_ids[token] < 0) return false;
  return !(token > 0 && goes_on(p, at, token - 1)) && !(token + 1 < tokens && goes_on(p, at, token));
}

// How the tiles of 16 keys that a position sees are cut.
struct KeySplits {
  int first, position;  // the keys that are seen, both included
  int begin, end;       // their tiles
  int tiles, splits;    // tiles of a split

  __device__ KeySplits(const PagedProblem &p, int at) : position(at) {
    first = p.window > 0 && position >= p.window ? position - static_cast<int>(p.window) + 1 : 0;
    begin = first / kTileKeys, end = position / kTileKeys + 1;
    tiles = max(kLeastTiles, ((end - begin - 1) >> most_splits_log2(p)) + 1);
    splits = static_cast<int>(static_cast<unsigned>(end - begin + tiles - 1) / static_cast<unsigned>(tiles));
  }
  __device__ int own_tile() const { return end - 1; }
};

// What a split or a batch leaves of one head: sums of weighted values beside these.
struct SplitWeights {
  float peak;   // of the logits, in base 2; weights are relative to it
  float total;  // of the weights
};

// Splits or batches added up, in their order, for one element of a head's result.
struct Fold {
  float peak = -INFINITY, total = 0.0f;

  // The factors of what is there, and of what comes.
  __device__ void add(const SplitWeights &split, float *before, float *after) {
    const float next = fmaxf(peak, split.peak);
    *before = fast_exp2(peak - next), *after = fast_exp2(split.peak - next);
    peak = next;
    total = fmaf(total, *before, split.total * *after);
  }
};
__device__ inline float folded(float sum, float before, float split, float after) {
  return fmaf(sum, before, split * after);
}
__device__ inline float4 folded(const float4 &sum, float before, const float4 &split, float after) {
  return {folded(sum.x, before, split.x, after), folded(sum.y, before, split.y, after),
          folded(sum.z, before, split.z, after), folded(sum.w, before, split.w, after)};
}

// The operands whose heads it is made of.
struct PagedTensors {
  const bf16 *q, *keys, *values;
  bf16 *o;
  int tiles_per_block, cache_tiles;
  bool early;  // positions, tables, and rows of earlier positions can be read before the kernels ahead have ended
  LogitFactors factors;

  __device__ PagedHead head(const PagedProblem &p, const PagedIndices &at, int kv_head, int sequence) const {
    return {keys + static_cast<int64_t>(kv_head) * p.head_dim,
            values + static_cast<int64_t>(kv_head) * p.value_dim,
            p.key_stride,
            p.value_stride,
            at.block_tables + sequence * p.max_blocks,
            tiles_per_block,
            cache_tiles,
            kv_head};
  }
};

// Whether tiles come through rings.
inline bool has_ring() {
#ifdef SUROGATE_HOPPER
  return device().architecture == 90;
#else
  return false;
#endif
}
// The maps of a call's caches. False where the driver refuses.
inline bool map_caches(const sg_call *, const PagedProblem &, NoMaps *) { return true; }
inline bool map_caches(const sg_call *call, const PagedProblem &p, TileMaps *maps) {
  const int parts = p.head_dim / split_warps(p.head_dim) / 64;
  return map_heads(input(call, 1), parts, kTileKeys, &maps->keys) && map_heads(input(call, 2), parts, kTileKeys, &maps->values);
}

constexpr int kReservedShared = 2 << 10;  // of a block's shared memory, by the system and the kernel's own

// Lets each of a kernel's `blocks` have `bytes`, and multiprocessors divide their memory for as many of these as there will be
// on one: the rest is a first-level cache, which products behind it may be made of.
template <class Kernel>
void take_shared(Kernel kernel, int bytes, int64_t blocks) {
  const int64_t each = ceil_div(blocks, device().units), all = static_cast<int64_t>(device().shared_memory);
  const int64_t percent = std::min<int64_t>(ceil_div(100 * each * (bytes + kReservedShared), all), 100);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, static_cast<int>(percent));
}

// A warp's part of one token: COLUMNS times 8 query heads of one key-value head, whose elements are a multiple of 16.
template <int DIM, int COLUMNS, class Tiles>
struct DecodeWarp : WarpDims<DIM> {
  using Dims = WarpDims<DIM>;
  static constexpr int kSplits = batch_splits(DIM), kChunks = Dims::kChunks, kParts = Dims::kParts;
  static constexpr int kShared = Dims::kWarps == 1 ? 1 : 2 * kDecodeWarps * COLUMNS * 32;
  uint4 queries[COLUMNS][kChunks];
  float sums[kParts][4][COLUMNS][4];
  float base[COLUMNS][2], total[COLUMNS][2];
  Tiles &tiles;
  int &number;     // of the tile that is seen next
  uint32_t known;  // a bit for each tile under way: whether the cache has it

  // The warp's tiles, in their order: those of its split, or of all its splits, `kSplits` apart.
  struct Walk {
    int begin, tiles, end;  // the first tile; of a split; past the last split's
    int asked;              // tiles
    int places;             // where the cache holds 32 of them, a lane each

    __device__ __forceinline__ int tile(int i) const {
      const int split = static_cast<int>(static_cast<unsigned>(i) / static_cast<unsigned>(tiles));
      return begin + i + split * (kSplits - 1) * tiles;
    }
  } walk;

  __device__ DecodeWarp(Tiles &from, int &first) : tiles(from), number(first) {}

  // Which split of a batch.
  __device__ static __forceinline__ int own_split() { return static_cast<int>(threadIdx.x) / 32 / Dims::kWarps; }

  // q: of the key-value head's first query head.
  __device__ __forceinline__ void load_queries(const bf16 *q, int heads) {
    const int lane = lane_index();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int head = 8 * c + lane / 4;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        queries[c][i] = uint4{};
        if (head < heads && Dims::has_chunk(i)) {
          queries[c][i] = *reinterpret_cast<const uint4 *>(q + head * DIM + Dims::own_dim() + 32 * i + 8 * (lane % 4));
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      base[c][0] = base[c][1] = -INFINITY;
      total[c][0] = total[c][1] = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[part][i / 4][c][i % 4] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(float (&logits)[COLUMNS][4]) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[c][i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 low = tiles.key(number, i, 0), high = tiles.key(number, i, 1);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const uint4 query = queries[c][i];
        multiply_fragments(logits[c], {low.x, high.x, low.y, high.y}, query.x, query.y);
        multiply_fragments(logits[c], {low.z, high.z, low.w, high.w}, query.z, query.w);
      }
    }
  }

  // The warp's half of the logits, for its neighbour; and the neighbour's, to be added: both then have the same bits.
  // `shared`: kShared elements. Tiles of a split take one half of it and the other by turns, so that a warp which is
  // ahead writes what its neighbour has read.
  __device__ static __forceinline__ float4 *slot(float4 *shared, int tile, int warp, int column) {
    return shared + ((tile % 2 * kDecodeWarps + warp) * COLUMNS + column) * 32 + lane_index();
  }
  __device__ __forceinline__ void give_half(const float (&logits)[COLUMNS][4], float4 *shared, int tile) const {
    if constexpr (Dims::kWarps == 2) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        *slot(shared, tile, warp, c) = {logits[c][0], logits[c][1], logits[c][2], logits[c][3]};
      }
    }
  }
  __device__ __forceinline__ void take_half(float (&logits)[COLUMNS][4], float4 *shared, int tile) const {
    if constexpr (Dims::kWarps == 2) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
      sync_pair(1 + own_split());
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const float4 half = *slot(shared, tile, warp ^ 1, c);
        logits[c][0] += half.x, logits[c][1] += half.y, logits[c][2] += half.z, logits[c][3] += half.w;
      }
    }
  }

  // Logits of a tile become weights, packed for the product with values; what was summed shrinks where the base moves.
  // Keys outside [low, high] get none; all are NaN where the tile is not known.
  __device__ __forceinline__ void make_weights(uint32_t (&weights)[COLUMNS][2], float (&logits)[COLUMNS][4],
                                               const LogitFactors &factors, bool known, int low, int high) {
    const int key = key_row(0);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      float shrink[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float peak = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &logit = logits[c][2 * half + j];
          if (factors.tangent > 0.0f) logit = fast_tanh(logit * factors.tangent);
          if (key + 8 * half < low || key + 8 * half > high) logit = -INFINITY;
          if (!known) logit = not_a_number();
          peak = fmaxf(peak, logit);
        }
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 4));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 8));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 16));
        const float next = fmaxf(base[c][j], peak), shift = next * factors.logit;
        shrink[j] = fast_exp2(fmaf(base[c][j], factors.logit, -shift));
        base[c][j] = next;
        float sum = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float &logit = logits[c][2 * half + j];
          logit = fast_exp2(fmaf(logit, factors.logit, -shift));
          sum += logit;
        }
        total[c][j] = fmaf(total[c][j], shrink[j], sum);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[part][i / 4][c][i % 4] *= shrink[i % 2];
      }
      // Keys by heads, as the logits came, turned into heads by keys.
      weights[c][0] = transpose_matrix(pack_bf16(logits[c][0], logits[c][1]));
      weights[c][1] = transpose_matrix(pack_bf16(logits[c][2], logits[c][3]));
    }
  }

  // A product of 16 dimensions takes dimensions 8 (lane / 4) + 2 i and the next, of each lane, as its rows lane / 4
  // and lane / 4 + 8.
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[COLUMNS][2], int low, int high) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint4 rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[i] = tiles.value(number, part, i, low, high);
      add_pairs<0>(part, rows[0].x, rows[1].x, rows[2].x, rows[3].x, weights);
      add_pairs<1>(part, rows[0].y, rows[1].y, rows[2].y, rows[3].y, weights);
      add_pairs<2>(part, rows[0].z, rows[1].z, rows[2].z, rows[3].z, weights);
      add_pairs<3>(part, rows[0].w, rows[1].w, rows[2].w, rows[3].w, weights);
    }
  }
  template <int i>
  __device__ __forceinline__ void add_pairs(int part, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                            const uint32_t (&weights)[COLUMNS][2]) {
    const uint32_t rows[4] = {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                              __byte_perm(c, d, 0x7632)};
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      multiply_fragments(sums[part][i][column], rows, weights[column][0], weights[column][1]);
    }
  }

  static __device__ __forceinline__ int low_of(const KeySplits &cut, int tile) {
    return max(cut.first - tile * kTileKeys, 0);
  }
  static __device__ __forceinline__ int high_of(const KeySplits &cut, int tile) {
    return min(cut.position - tile * kTileKeys, kTileKeys - 1);
  }

  // The warp's next tile that lies before `limit`, to be asked for as number n: its place in the cache, which is the first
  // where the cache does not have it. -1: there is no such tile. `tile`: which it is.
  __device__ __forceinline__ int next_place(const PagedHead &head, int limit, int n, int *tile) {
    *tile = walk.tile(walk.asked);
    if (*tile >= limit) return -1;
    if (walk.asked % 32 == 0) {
      const int later = walk.tile(walk.asked + lane_index());
      walk.places = later < walk.end ? head.tile_at(later) : -1;
    }
    const int place = __shfl_sync(0xffffffffu, walk.places, walk.asked % 32);
    ++walk.asked;
    const uint32_t bit = 1u << n % Tiles::kDepth;
    known = place >= 0 ? known | bit : known & ~bit;
    return max(place, 0);
  }

  // The warp is to see split `split`, and every kSplits-th behind it where `all`.
  __device__ __forceinline__ void walk_over(const KeySplits &cut, int split, bool all) {
    walk.begin = cut.begin + split * cut.tiles;
    walk.tiles = cut.tiles;
    walk.end = all ? cut.end : min(walk.begin + cut.tiles, cut.end);
    walk.asked = 0;
    known = 0;
  }
  // Asks for those of the first tiles that lie before `limit` and were not asked for.
  __device__ __forceinline__ void start(const PagedHead &head, const KeySplits &cut, int limit) {
#pragma unroll
    for (int i = 0; i < Tiles::kDepth; ++i) {
      if (i < walk.asked) continue;
      int tile;
      const int place = next_place(head, min(limit, walk.end), number + i, &tile);
      if (place < 0) break;
      tiles.ask_for_keys(head, place, number + i);
      tiles.ask_for_values(head, place, number + i, low_of(cut, tile), high_of(cut, tile));
    }
  }

  // The next split of the warp's.
  __device__ __forceinline__ void see(const LogitFactors &factors, const PagedHead &head, const KeySplits &cut,
                                      int split, float4 *shared) {
    const int begin = cut.begin + split * cut.tiles, end = min(begin + cut.tiles, cut.end);
    clear();
    for (int tile = begin; tile < end; ++tile, ++number) {
      const int low = low_of(cut, tile), high = high_of(cut, tile);
      const bool is_known = (known >> number % Tiles::kDepth & 1) != 0;
      float logits[COLUMNS][4];
      tiles.wait_for_keys(number);
      multiply_keys(logits);
      give_half(logits, shared, tile - begin);
      int next;
      const int place = next_place(head, walk.end, number + Tiles::kDepth, &next);
      if (place >= 0) tiles.ask_for_keys(head, place, number + Tiles::kDepth);
      take_half(logits, shared, tile - begin);
      uint32_t weights[COLUMNS][2];
      make_weights(weights, logits, factors, is_known, low, high);
      tiles.wait_for_values(number);
      add_values(weights, low, high);
      if (place >= 0) {
        tiles.ask_for_values(head, place, number + Tiles::kDepth, low_of(cut, next), high_of(cut, next));
      }
    }
  }

  // sums [heads, DIM], the warp's part, and weights [heads] of the split. 16-byte aligned.
  __device__ __forceinline__ void leave(float *to, SplitWeights *weights, int heads, const LogitFactors &factors) {
    const int lane = lane_index();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float all = total[c][j];
        all += __shfl_xor_sync(0xffffffffu, all, 4);
        all += __shfl_xor_sync(0xffffffffu, all, 8);
        all += __shfl_xor_sync(0xffffffffu, all, 16);
        const int head = 8 * c + 2 * (lane % 4) + j;
        if (head >= heads) continue;
        if (lane < 4 && Dims::own_dim() == 0) weights[head] = {base[c][j] * factors.logit, all};
        float4 *row = reinterpret_cast<float4 *>(to + head * DIM + Dims::own_dim() + 8 * (lane / 4));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (!Dims::has_part(part)) continue;
          const auto &s = sums[part];
          row[16 * part] = {s[0][c][j], s[0][c][2 + j], s[1][c][j], s[1][c][2 + j]};
          row[16 * part + 1] = {s[2][c][j], s[2][c][2 + j], s[3][c][j], s[3][c][2 + j]};
        }
      }
    }
  }
};

}  // namespace sg::cuda
