// Tokens of their own, each against its cached keys: what a decoding step asks of paged_attention.
//
// A key-value head's keys are read once for all of its query heads. A warp takes 16 keys at a time, straight from
// memory into the fragments of mma.m16n8k16 without shared memory: keys and the dimensions of values are the rows of
// the products, query heads the columns. A thread takes 16 neighbouring bytes where the instruction's own layout would
// have it take 4; queries are read the same way. The next keys are under way while weights are made, the next values
// while keys are multiplied, from one split to the next too: up to 8 KB a warp. Heads of more than 128 elements are
// made by two warps, each with one half of the dimensions of keys and of values, which add up their halves of the
// logits in shared memory: neither registers nor bytes under way are then any other than those of a head of 128.
//
// The keys of a token are cut into splits. Those that a block's warps make at a time, a batch, are folded in shared
// memory, and batches into the result, both in their order. Where keys are cut depends on the position and on the
// number of key-value heads alone, and a fold is the same arithmetic wherever it is done: a token's bits depend on it
// and on its keys, never on the other tokens of the call. With few tokens the batches are blocks all over the device
// (paged_attention_batches.cuh); with many, a block makes all batches of a token.
#pragma once

#include "attention_common.cuh"
#include "attention_ptx.cuh"
#include "paged_attention.cuh"
#include "paged_attention_ptx.cuh"

namespace sg::cuda {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
constexpr int kTileKeys = 16;  // that a warp takes at a time; blocks of the cache hold a multiple of them
constexpr int kMostSplitsLog2 = 6, kMostSplits = 1 << kMostSplitsLog2;
constexpr int kLeastTiles = 2;  // of a split

// Splits of a token and key-value head, at most, as a power of two: more where few heads leave a lone sequence few warps.
__host__ __device__ inline int most_splits_log2(const PagedProblem &p) {
  return p.heads <= 2 * p.group ? kMostSplitsLog2 : kMostSplitsLog2 - 1;
}
__host__ __device__ inline int most_splits(const PagedProblem &p) { return 1 << most_splits_log2(p); }
// Neighbouring warps that make a split of heads of `dim` together, and the splits of a batch.
__host__ __device__ constexpr int split_warps(int dim) { return dim > 128 ? 2 : 1; }
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

// One key-value head of the caches, and the table of one sequence.
struct PagedHead {
  const bf16 *keys, *values;
  int64_t key_stride, value_stride;
  const int32_t *table;
  int tiles_per_block, cache_tiles;

  // The cache's tile that holds a tile of positions, or -1.
  __device__ int tile_at(int tile) const {
    const int block = tiles_per_block == 1 ? tile : tile / tiles_per_block;
    const int64_t place = static_cast<int64_t>(table[block]) * tiles_per_block + (tile - block * tiles_per_block);
    return place >= 0 && place < cache_tiles ? static_cast<int>(place) : -1;
  }
};

// The operands whose heads it is made of.
struct PagedTensors {
  const bf16 *q, *keys, *values;
  bf16 *o;
  int tiles_per_block, cache_tiles;
  LogitFactors factors;

  __device__ PagedHead head(const PagedProblem &p, const PagedIndices &at, int kv_head, int sequence) const {
    return {keys + static_cast<int64_t>(kv_head) * p.head_dim,
            values + static_cast<int64_t>(kv_head) * p.value_dim,
            p.key_stride,
            p.value_stride,
            at.block_tables + sequence * p.max_blocks,
            tiles_per_block,
            cache_tiles};
  }
};

// A warp's part of one token: COLUMNS times 8 query heads of one key-value head, whose elements are a multiple of 16.
template <int DIM, int COLUMNS>
struct DecodeWarp {
  static constexpr int kWarps = split_warps(DIM), kSplits = batch_splits(DIM);
  static constexpr int kDims = DIM / kWarps;         // of this warp
  static constexpr int kChunks = (kDims + 31) / 32;  // of a key: 8 elements a lane
  static constexpr int kParts = (kDims + 63) / 64;   // of a value: 8 elements a lane
  static constexpr int kShared = kWarps == 1 ? 1 : 2 * kDecodeWarps * COLUMNS * 32;
  uint4 queries[COLUMNS][kChunks], keys[kChunks][2], values[kParts][4];
  float sums[kParts][4][COLUMNS][4];
  float base[COLUMNS][2], total[COLUMNS][2];
  int place;   // the cache's tile in keys and values, or -1
  int places;  // of 32 of the warp's tiles, a lane each
  int walked;  // tiles whose place was taken

  // Which split of a batch, and the warp's first dimension.
  __device__ static __forceinline__ int own_split() { return static_cast<int>(threadIdx.x) / 32 / kWarps; }
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

  // q: of the key-value head's first query head.
  __device__ __forceinline__ void load_queries(const bf16 *q, int heads) {
    const int lane = lane_index();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int head = 8 * c + lane / 4;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        queries[c][i] = uint4{};
        if (head < heads && has_chunk(i)) {
          queries[c][i] = *reinterpret_cast<const uint4 *>(q + head * DIM + own_dim() + 32 * i + 8 * (lane % 4));
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

  // Rows lane / 4 and lane / 4 + 8 of a tile.
  __device__ __forceinline__ void load_keys(const PagedHead &head, int tile) {
    const int lane = lane_index();
    const bf16 *row = head.keys + (static_cast<int64_t>(tile) * kTileKeys + lane / 4) * head.key_stride;
    row += own_dim() + 8 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      keys[i][0] = keys[i][1] = uint4{};
      if (!has_chunk(i)) continue;
      keys[i][0] = load_cached(row + 32 * i);
      keys[i][1] = load_cached(row + 8 * head.key_stride + 32 * i);
    }
  }

  // Rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, t = lane % 4, of a tile. A row outside [low, high] may never have been
  // written: the nearest inside stands for it, and gets no weight.
  __device__ __forceinline__ void load_values(const PagedHead &head, int tile, int low, int high) {
    const int lane = lane_index();
    const bf16 *rows = head.values + static_cast<int64_t>(tile) * kTileKeys * head.value_stride;
    rows += own_dim() + 8 * (lane / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bf16 *row = rows + min(max(2 * (lane % 4) + i % 2 + 8 * (i / 2), low), high) * head.value_stride;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        values[part][i] = has_part(part) ? load_cached(row + 64 * part) : uint4{};
      }
    }
  }

  __device__ __forceinline__ void multiply_keys(float (&logits)[COLUMNS][4]) const {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) logits[c][i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint4 low = keys[i][0], high = keys[i][1], query = queries[c][i];
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
    if constexpr (kWarps == 2) {
      const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        *slot(shared, tile, warp, c) = {logits[c][0], logits[c][1], logits[c][2], logits[c][3]};
      }
    }
  }
  __device__ __forceinline__ void take_half(float (&logits)[COLUMNS][4], float4 *shared, int tile) const {
    if constexpr (kWarps == 2) {
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
    const int key = lane_index() / 4;
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
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[COLUMNS][2]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4(&rows)[4] = values[part];
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

  // Takes the place of `tile`, of the split that begins at tile `begin`; the warp's further splits follow `step` tiles
  // apart. 0: it has none.
  __device__ __forceinline__ void walk_to(const PagedHead &head, const KeySplits &cut, int tile, int begin, int step) {
    if (walked % 32 == 0) {
      const int n = tile - begin + lane_index();
      const int later = begin + (step == 0 ? n : n / cut.tiles * step + n % cut.tiles);
      places = later < cut.end && (step != 0 || n < cut.tiles) ? head.tile_at(later) : -1;
    }
    place = __shfl_sync(0xffffffffu, places, walked % 32);
    ++walked;
  }

  // Loads the first tile of split `split`, from which the warp goes on to every `every`-th. 0: to none, also below.
  __device__ __forceinline__ void start(const PagedHead &head, const KeySplits &cut, int split, int every) {
    const int tile = cut.begin + split * cut.tiles;
    walked = 0;
    walk_to(head, cut, tile, tile, every * cut.tiles);
    load_keys(head, max(place, 0));
    load_values(head, max(place, 0), low_of(cut, tile), high_of(cut, tile));
  }

  // Split `split` of the token's keys, whose first tile is loaded. Leaves the first tile of the next one loaded.
  __device__ __forceinline__ void see(const LogitFactors &factors, const PagedHead &head, const KeySplits &cut,
                                      int split, int every, float4 *shared) {
    const int begin = cut.begin + split * cut.tiles, end = min(begin + cut.tiles, cut.end), step = every * cut.tiles;
    clear();
    for (int tile = begin; tile < end; ++tile) {
      const int next_begin = tile + 1 < end ? begin : begin + step, next = tile + 1 < end ? tile + 1 : next_begin;
      const bool known = place >= 0, further = step == 0 ? tile + 1 < end : next < cut.end;
      float logits[COLUMNS][4];
      multiply_keys(logits);
      give_half(logits, shared, tile - begin);
      if (further) {
        walk_to(head, cut, next, next_begin, step);
        load_keys(head, max(place, 0));
      }
      take_half(logits, shared, tile - begin);
      uint32_t weights[COLUMNS][2];
      make_weights(weights, logits, factors, known, low_of(cut, tile), high_of(cut, tile));
      add_values(weights);
      if (further) load_values(head, max(place, 0), low_of(cut, next), high_of(cut, next));
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
        if (lane < 4 && own_dim() == 0) weights[head] = {base[c][j] * factors.logit, all};
        float4 *row = reinterpret_cast<float4 *>(to + head * DIM + own_dim() + 8 * (lane / 4));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          if (!has_part(part)) continue;
          const auto &s = sums[part];
          row[16 * part] = {s[0][c][j], s[0][c][2 + j], s[1][c][j], s[1][c][2 + j]};
          row[16 * part + 1] = {s[2][c][j], s[2][c][2 + j], s[3][c][j], s[3][c][2 + j]};
        }
      }
    }
  }
};

}  // namespace sg::cuda
