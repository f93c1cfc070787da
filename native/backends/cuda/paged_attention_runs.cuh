// Runs of tokens that go on where the token before them left off, against the cached keys of their sequence: what a
// chunk of a prompt asks of paged_attention.
//
// A block takes one head of a window of 128 tokens, finds the runs in it, and makes one after the other as attention.cu
// makes a tile of queries; a window of one long run, the common one, is one tile. Where a tile is of 64 queries (heads
// of 256), two blocks share the window: each takes its half of every run. Windows that see most come first. Keys and
// values come through the table, 64 at a time, the next ones while these are used. Heads are padded with zeros in
// shared memory to 64, 128 or 256. Padding gives rows of 0 here; tokens that stand alone are not touched.
//
// Floor: 2 (head_dim + value_dim) FLOPs for each visible pair and head, at the rate of mma.sync.
#pragma once

#include "attention_forward.cuh"
#include "paged_attention_decode.cuh"

namespace sg::cuda {

constexpr int kRunKeys = 64;  // of a tile of keys
constexpr int kRunPlaces = kRunKeys / kTileKeys;
static_assert(kWindowTokens == kAttentionThreads);

struct Run {
  int first, count;  // tokens
  int sequence, position;  // of the first
};

// Where the cache holds the tiles of 16 of a run's keys, while it is walked over them: lane l of each warp knows the
// place of tile 32 n + l, kMissing for one that is not there, kUnseen for one that no token of the run sees.
struct RunPlaces {
  static constexpr int kMissing = -1, kUnseen = -2;
  int places;

  // Those from the tile of `key` on.
  __device__ __forceinline__ void find(const PagedHead &head, int key, const Bounds &bounds) {
    const int tile = key / kTileKeys + lane_index();
    places = tile * kTileKeys < bounds.end ? head.tile_at(tile) : kUnseen;
  }
  // Those of the tile of keys that begins at `key`, a tile further each time. They are looked up long before. Keys that
  // the cache does not hold are added to `missing`, to be seen after the next barrier.
  __device__ __forceinline__ void take(int (&taken)[kRunPlaces], const PagedHead &head, int key, const Bounds &bounds,
                                       TokenRange *missing) {
    const int lane = (key / kTileKeys - bounds.begin / kTileKeys) % 32;
    if (lane == 0 && places == kMissing) {
      const int first = key + lane_index() * kTileKeys;
      atomicMin(&missing->begin, max(first, bounds.begin));
      atomicMax(&missing->end, min(first + kTileKeys, bounds.end));
    }
#pragma unroll
    for (int i = 0; i < kRunPlaces; ++i) taken[i] = __shfl_sync(0xffffffffu, places, lane + i);
    if (lane + kRunPlaces == 32) find(head, key + kRunKeys, bounds);
  }
};

// Of the tiles that heads of `dim` are padded to.
constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Starts to load a tile of keys or values; zeros past DIM, and for rows that no token of the run sees, which may hold
// anything.
template <int DIM>
__device__ __forceinline__ void load_paged_tile(unsigned char *tile, const bf16 *cache, int64_t stride,
                                                const int (&places)[kRunPlaces], int key, const Bounds &bounds) {
  constexpr int chunks = padded_dim(DIM) / 8, step = kAttentionThreads / chunks;
  static_assert(kTileKeys % step == 0);
  const uint32_t chunk = threadIdx.x % chunks, own = threadIdx.x / chunks;
  const bool in_row = chunks * 8 == DIM || chunk * 8 < DIM;
  const uint32_t row_bytes = static_cast<uint32_t>(stride) * sizeof(bf16);
  const unsigned char *const from = reinterpret_cast<const unsigned char *>(cache) + own * row_bytes + chunk * 16;
  const uint32_t to = shared_address(tile) + own * kRowBytes<padded_dim(DIM)>;
  const uint32_t seen = key + own - bounds.begin, all = bounds.end - bounds.begin;  // wraps before the first
#pragma unroll
  for (int i = 0; i < kRunKeys / step; ++i) {
    const int row = i * step, place = places[row / kTileKeys];
    const bool valid = in_row && place >= 0 && seen + row < all;
    const uint64_t at = static_cast<uint64_t>(max(place, 0)) * (kTileKeys * row_bytes) + row % kTileKeys * row_bytes;
    copy_async_16(to + row * kRowBytes<padded_dim(DIM)> + ((chunk ^ ((own + row) & 7)) << 4), from + at, valid);
  }
}

// Tiles of keys and of values that lie in shared memory at a time. Heads of 256 leave room for one of each.
constexpr int run_stages(int padded) { return padded <= 128 ? 2 : 1; }

template <int DIM, bool CAPPED>
struct RunTiles {
  using Maps = NoMaps;
  static constexpr int kDim = padded_dim(DIM), kStages = run_stages(kDim);
  static constexpr int kTileBytes = kRunKeys * kRowBytes<kDim>;
  using Tile = ForwardTile<kDim>;
  static constexpr int kQueries = Tile::kQueries, kBlocks = Tile::kBlocks;
  static_assert(kWindowTokens % kQueries == 0 && Tile::kKeys == kRunKeys);
  static constexpr size_t kBytes =
      Tile::kQueries * kRowBytes<kDim> + 2 * kStages * kTileBytes + (Tile::kQueries + 1) * sizeof(TokenRange);
  const HeadRows<const bf16> &rows_of_queries;
  unsigned char *queries, *keys, *values;
  TokenRange *ranges, *missing;  // keys that tokens see; keys that the cache does not hold lie in `missing`

  __device__ RunTiles(const Maps &, const HeadRows<const bf16> &q, unsigned char *shared)
      : rows_of_queries(q),
        queries(shared),
        keys(queries + Tile::kQueries * kRowBytes<kDim>),
        values(keys + kStages * kTileBytes),
        ranges(reinterpret_cast<TokenRange *>(values + kStages * kTileBytes)),
        missing(ranges + Tile::kQueries) {}

  // Where the warp's lanes read.
  struct Addresses {
    uint32_t queries, keys, values;
  };

  // o of a run of at most kQueries tokens, for one head. By all threads of the block.
  __device__ __forceinline__ void make(const PagedProblem &p, const LogitFactors &factors, const Run &run,
                                       int query_head, const PagedHead &head, const HeadRows<bf16> &o) const {
    load_tile<kDim, Tile::kQueries>(queries, rows_of_queries.head(query_head), run.first, run.first + run.count);
    const int position = run.position + min(static_cast<int>(threadIdx.x), run.count - 1);
    const int window = static_cast<int>(min(p.window, static_cast<int64_t>(1) << 30));
    const int first_key = window > 0 ? max(position - window + 1, 0) : 0;
    if (threadIdx.x < Tile::kQueries) ranges[threadIdx.x] = {first_key, position + 1};
    if (threadIdx.x == 0) *missing = {INT_MAX, 0};
    __syncthreads();
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    const Bounds block = bounds_of(ranges, Tile::kQueries);
    Bounds warp = bounds_of(ranges + warp_row, Tile::kWarpRows);
    if (warp_row >= run.count) warp.end = 0;  // none of the warp's rows is a token
    const Addresses at = {shared_address(queries) + warp_row * kRowBytes<kDim> + lane_by_rows<kDim>(),
                          shared_address(keys) + lane_by_columns<kDim>(),
                          shared_address(values) + lane_by_rows<kDim>()};
    ForwardWarp<kDim, CAPPED> state;
    state.clear();
    if constexpr (kStages == 2) {
      walk_two_stages(state, factors, head, at, ranges + warp_row, block, warp);
    } else {
      walk_one_stage(state, factors, head, at, ranges + warp_row, block, warp);
    }
    float factor[Tile::kRowTiles][2], all[Tile::kRowTiles][2];
    state.means(factor, all);
    spoil(factor, ranges + warp_row);
    unsigned char *const own = queries + warp_row * kRowBytes<kDim>;  // no other warp reads these queries
    put_fragments<kDim>(own, state.sums, factor);
    __syncwarp();
    store_rows<kDim, Tile::kWarpRows, kDim>(own, o, run.first + warp_row, run.first + run.count, 0);
  }

  // The next tile's keys and values arrive while one is used, a barrier a tile.
  __device__ __forceinline__ void walk_two_stages(ForwardWarp<kDim, CAPPED> &state, const LogitFactors &factors,
                                                  const PagedHead &head, const Addresses &at, const TokenRange *rows,
                                                  const Bounds &block, const Bounds &warp) const {
    const int begin = block.begin / kTileKeys * kTileKeys;
    RunPlaces places;
    places.find(head, begin, block);
    load_stage(head, places, begin, block, 0);
    for (int key = begin, stage = 0; key < block.end; key += kRunKeys, stage ^= kTileBytes) {
      wait_copies();
      __syncthreads();  // the tile is here, and the last one was used
      if (key + kRunKeys < block.end) load_stage(head, places, key + kRunKeys, block, stage ^ kTileBytes);
      if (!warp.touch(key, kRunKeys)) continue;
      uint32_t weights[Tile::kRowTiles][Tile::kKeyTiles / 2][4];
      state.see_keys(weights, at.queries, at.keys + stage, factors.tangent, factors.logit, rows, warp, key);
      multiply_packed<kDim>(state.sums, weights, at.values + stage);
    }
  }
  // `stage`: bytes from the first stage's tiles.
  __device__ __forceinline__ void load_stage(const PagedHead &head, RunPlaces &places, int key, const Bounds &bounds,
                                             int stage) const {
    int taken[kRunPlaces];
    places.take(taken, head, key, bounds, missing);
    load_paged_tile<DIM>(keys + stage, head.keys, head.key_stride, taken, key, bounds);
    load_paged_tile<DIM>(values + stage, head.values, head.value_stride, taken, key, bounds);
  }

  // Keys of the next tile arrive while values are used, values while keys are.
  __device__ __forceinline__ void walk_one_stage(ForwardWarp<kDim, CAPPED> &state, const LogitFactors &factors,
                                                 const PagedHead &head, const Addresses &at, const TokenRange *rows,
                                                 const Bounds &block, const Bounds &warp) const {
    const int begin = block.begin / kTileKeys * kTileKeys;
    RunPlaces places;
    places.find(head, begin, block);
    int taken[kRunPlaces];
    places.take(taken, head, begin, block, missing);
    load_paged_tile<DIM>(keys, head.keys, head.key_stride, taken, begin, block);
    for (int key = begin; key < block.end; key += kRunKeys) {
      const bool seen = warp.touch(key, kRunKeys);
      uint32_t weights[Tile::kRowTiles][Tile::kKeyTiles / 2][4];
      wait_copies();
      __syncthreads();  // keys are here, and the last tile's values were used
      load_paged_tile<DIM>(values, head.values, head.value_stride, taken, key, block);
      if (seen) state.see_keys(weights, at.queries, at.keys, factors.tangent, factors.logit, rows, warp, key);
      wait_copies();
      __syncthreads();  // values are here, and the keys were used
      if (key + kRunKeys < block.end) {
        places.take(taken, head, key + kRunKeys, block, missing);
        load_paged_tile<DIM>(keys, head.keys, head.key_stride, taken, key + kRunKeys, block);
      }
      if (seen) multiply_packed<kDim>(state.sums, weights, at.values);
    }
  }

  // Rows that see keys which are missing become NaN. `rows`: the warp's ranges.
  __device__ __forceinline__ void spoil(float (&factor)[Tile::kRowTiles][2], const TokenRange *rows) const {
    if (missing->begin >= missing->end) return;
#pragma unroll
    for (int mt = 0; mt < Tile::kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TokenRange range = rows[mt * 16 + half * 8 + lane_index() / 4];
        if (range.begin < missing->end && range.end > missing->begin) factor[mt][half] = not_a_number();
      }
    }
  }
};

// The `rank`-th window in the order of what they see, most first, so that no long one is left for the end; in the order
// of their tokens, last first, where there are many. `seen`: kWindowTokens + 1 elements. By all threads of a block.
__device__ inline int find_window(const PagedIndices &at, int tokens, int rank, int *seen) {
  const int windows = (tokens + kWindowTokens - 1) / kWindowTokens, own = static_cast<int>(threadIdx.x);
  if (windows == 1 || windows > kWindowTokens) return windows - 1 - rank;
  if (own < windows) {  // its first or its last token sees most, or nearly so
    const int first = own * kWindowTokens, last = min(first + kWindowTokens, tokens) - 1;
    seen[own] = max(at.sequence_ids[first] < 0 ? -1 : at.positions[first],
                    at.sequence_ids[last] < 0 ? -1 : at.positions[last]);
  }
  __syncthreads();
  if (own < windows) {
    int before = 0;
    for (int i = 0; i < windows; ++i) before += seen[i] > seen[own] || (seen[i] == seen[own] && i > own);
    if (before == rank) seen[kWindowTokens] = own;
  }
  __syncthreads();
  return seen[kWindowTokens];
}

// Parts of a window's runs, a block each.
template <class Tiles>
constexpr int kRunParts = kWindowTokens / Tiles::kQueries;

// Block (rank of a window, part of its runs, head) of run_blocks. Tiles: RunTiles, or PromptTiles.
template <int DIM, class Tiles>
__device__ __forceinline__ void make_runs(const PagedProblem &p, const PagedIndices &at, const PagedTensors &t,
                                          const typename Tiles::Maps &maps, const HeadRows<const bf16> &q,
                                          const HeadRows<bf16> &o, int tokens, int block, unsigned char *shared) {
  __shared__ int seen[kWindowTokens + 1];
  __shared__ TokenBits links;  // whether a token goes on with the next one
  constexpr int kQueries = Tiles::kQueries, kParts = kRunParts<Tiles>;
  const int head = block % p.heads, place = block / p.heads;
  const int skipped = place % kParts * kQueries;  // tokens of a run that others take
  const int first = find_window(at, tokens, place / kParts, seen) * kWindowTokens;
  const int token = first + static_cast<int>(threadIdx.x);
  links.put(token + 1 < tokens && goes_on(p, at, token));
  if (token < tokens && at.sequence_ids[token] < 0) {
    uint4 *const row = reinterpret_cast<uint4 *>(t.o + token * p.o_stride + static_cast<int64_t>(head) * DIM);
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) row[i] = uint4{};
  }
  __syncthreads();
  if (!links.any()) return;

  Tiles tiles(maps, q, shared);
  for (int begin = links.find(0, true); begin < kWindowTokens;) {
    const int end = links.find(begin, false) + 1;  // a link is not in the window's last place
    const int sequence = at.sequence_ids[first + begin];
    const int count = kParts == 1 ? end - begin : min(end - begin - skipped, kQueries);
    const Run run = {first + begin + skipped, count, sequence, at.positions[first + begin] + skipped};
    if (kParts == 1 || run.count > 0) {
      tiles.make(p, t.factors, run, head, t.head(p, at, head / p.group, sequence), o.head(head));
      __syncthreads();  // the tiles are free
    }
    begin = links.find(end, true);
  }
}

template <class Tiles>
int64_t run_blocks(const PagedProblem &p, int tokens) {
  return ceil_div(tokens, kWindowTokens) * kRunParts<Tiles> * p.heads;
}

}  // namespace sg::cuda
