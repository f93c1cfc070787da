// Runs of tokens that go on where the token before them left off, against the cached keys of their sequence: what a
// chunk of a prompt asks of paged_attention.
//
// A block takes one head of a window of 128 tokens, finds the runs in it, and makes one after the other as attention.cu
// makes a tile of queries; a window of one long run, the common one, is one tile. Where a tile is of 64 queries (heads
// of 256), two blocks share the window: each takes its half of every run. Keys and values come through the table, 64 at
// a time. Heads are padded with zeros in shared memory to 64, 128 or 256. Padding gives rows of 0 here; tokens that
// stand alone are not touched.
//
// Floor: 2 (head_dim + value_dim) FLOPs for each visible pair and head, at the rate of mma.sync.
#pragma once

#include "attention_forward.cuh"
#include "paged_attention_decode.cuh"

namespace sg::cuda {

constexpr int kRunKeys = 64;  // of a tile of keys
constexpr int kRunPlaces = kRunKeys / kTileKeys;
static_assert(kWindowTokens == kAttentionThreads);

// Which tokens of a window go on with the next one, a bit each.
struct Links {
  uint32_t words[kWindowTokens / 32];

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

struct Run {
  int first, count;  // tokens
  int sequence, position;  // of the first
};

// Where the cache holds the four tiles of 16 of the keys [key, key + kRunKeys): -1 for one that is not there, or that
// no token of the run sees.
__device__ __forceinline__ void find_places(int (&places)[kRunPlaces], const PagedHead &head, int key,
                                            const Bounds &bounds) {
#pragma unroll
  for (int i = 0; i < kRunPlaces; ++i) {
    const int first = key + i * kTileKeys;
    places[i] = first < bounds.end && first + kTileKeys > bounds.begin ? head.tile_at(first / kTileKeys) : -1;
  }
}

// Of the tiles that heads of `dim` are padded to.
constexpr int padded_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Starts to load a tile of keys or values; zeros past DIM, and for rows that no token of the run sees, which may hold
// anything.
template <int DIM>
__device__ __forceinline__ void load_paged_tile(unsigned char *tile, const bf16 *cache, int64_t stride,
                                                const int (&places)[kRunPlaces], int key, const Bounds &bounds) {
  constexpr int chunks = padded_dim(DIM) / 8, step = kAttentionThreads / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks, own = static_cast<int>(threadIdx.x) / chunks;
  const bool in_row = chunks * 8 == DIM || chunk * 8 < DIM;
  const uint32_t to = shared_address(tile);
#pragma unroll
  for (int i = 0; i < kRunKeys / step; ++i) {
    const int row = own + i * step, place = places[i * step / kTileKeys];
    const bool valid = in_row && place >= 0 && key + row >= bounds.begin && key + row < bounds.end;
    const int64_t at = valid ? static_cast<int64_t>(place) * kTileKeys + row % kTileKeys : 0;
    const uint32_t place_of_chunk = to + row * kRowBytes<padded_dim(DIM)> + ((chunk ^ (row & 7)) << 4);
    copy_async_16(place_of_chunk, cache + at * stride + chunk * 8, valid);
  }
}

template <int DIM, bool CAPPED>
struct RunTiles {
  static constexpr int kDim = padded_dim(DIM);
  using Tile = ForwardTile<kDim>;
  static_assert(kWindowTokens % Tile::kQueries == 0 && Tile::kKeys == kRunKeys);
  unsigned char *queries, *keys, *values;
  TokenRange *ranges;

  __device__ explicit RunTiles(unsigned char *shared)
      : queries(shared),
        keys(queries + Tile::kQueries * kRowBytes<kDim>),
        values(keys + kRunKeys * kRowBytes<kDim>),
        ranges(reinterpret_cast<TokenRange *>(values + kRunKeys * kRowBytes<kDim>)) {}

  // o of a run of at most kQueries tokens, for one head. By all threads of the block.
  __device__ __forceinline__ void make(const PagedProblem &p, const LogitFactors &factors, const Run &run,
                                       const HeadRows<const bf16> &q, const PagedHead &head,
                                       const HeadRows<bf16> &o) const {
    load_tile<kDim, Tile::kQueries>(queries, q, run.first, run.first + run.count);
    const int position = run.position + min(static_cast<int>(threadIdx.x), run.count - 1);
    const int window = static_cast<int>(min(p.window, static_cast<int64_t>(1) << 30));
    const int first_key = window > 0 ? max(position - window + 1, 0) : 0;
    if (threadIdx.x < Tile::kQueries) ranges[threadIdx.x] = {first_key, position + 1};
    __syncthreads();
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    const Bounds block = bounds_of(ranges, Tile::kQueries);
    const Bounds warp = bounds_of(ranges + warp_row, Tile::kWarpRows);
    TokenRange missing = {INT_MAX, 0};  // keys that the cache does not hold

    const uint32_t query_rows = shared_address(queries) + warp_row * kRowBytes<kDim> + lane_by_rows<kDim>();
    const uint32_t key_columns = shared_address(keys) + lane_by_columns<kDim>();
    const uint32_t value_rows = shared_address(values) + lane_by_rows<kDim>();
    ForwardWarp<kDim, CAPPED> state;
    state.clear();
    const int begin = block.begin / kTileKeys * kTileKeys;
    int places[kRunPlaces];
    find_places(places, head, begin, block);
    load_paged_tile<DIM>(keys, head.keys, head.key_stride, places, begin, block);
    for (int key = begin; key < block.end; key += kRunKeys) {
      const bool seen = warp_row < run.count && warp.touch(key, kRunKeys);
      note_missing(&missing, places, key, block);
      int next[kRunPlaces];
      find_places(next, head, key + kRunKeys, block);
      uint32_t weights[Tile::kRowTiles][Tile::kKeyTiles / 2][4];
      wait_copies();
      __syncthreads();  // keys are here, and the last tile's values were used
      load_paged_tile<DIM>(values, head.values, head.value_stride, places, key, block);
      if (seen) {
        state.see_keys(weights, query_rows, key_columns, factors.tangent, factors.logit, ranges + warp_row, warp, key);
      }
      wait_copies();
      __syncthreads();  // values are here, and the keys were used
      if (key + kRunKeys < block.end) {
        load_paged_tile<DIM>(keys, head.keys, head.key_stride, next, key + kRunKeys, block);
      }
      if (seen) multiply_packed<kDim>(state.sums, weights, value_rows);
#pragma unroll
      for (int i = 0; i < kRunPlaces; ++i) places[i] = next[i];
    }
    float factor[Tile::kRowTiles][2], all[Tile::kRowTiles][2];
    state.means(factor, all);
    spoil(factor, missing, warp_row);
    unsigned char *const own = queries + warp_row * kRowBytes<kDim>;  // no other warp reads these queries
    put_fragments<kDim>(own, state.sums, factor);
    __syncwarp();
    store_rows<kDim, Tile::kWarpRows, kDim>(own, o, run.first + warp_row, run.first + run.count, 0);
  }

  // Every thread knows every tile's places.
  __device__ static __forceinline__ void note_missing(TokenRange *missing, const int (&places)[kRunPlaces], int key,
                                                      const Bounds &bounds) {
#pragma unroll
    for (int i = 0; i < kRunPlaces; ++i) {
      const int first = max(key + i * kTileKeys, bounds.begin), end = min(key + (i + 1) * kTileKeys, bounds.end);
      if (places[i] >= 0 || first >= end) continue;
      missing->begin = min(missing->begin, first);
      missing->end = max(missing->end, end);
    }
  }

  // Rows that see keys which are missing become NaN.
  __device__ __forceinline__ void spoil(float (&factor)[Tile::kRowTiles][2], const TokenRange &missing,
                                        int warp_row) const {
    if (missing.begin >= missing.end) return;
#pragma unroll
    for (int mt = 0; mt < Tile::kRowTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const TokenRange range = ranges[warp_row + mt * 16 + half * 8 + static_cast<int>(threadIdx.x) % 32 / 4];
        if (range.begin < missing.end && range.end > missing.begin) factor[mt][half] = not_a_number();
      }
    }
  }
};

// Block (head, part of a window's runs, window): one-dimensional, the last windows, which tend to see most, first.
template <int DIM, bool CAPPED>
__global__ void __launch_bounds__(kAttentionThreads, ForwardTile<padded_dim(DIM)>::kBlocks)
    paged_runs(PagedProblem p, PagedIndices at, PagedTensors t, HeadRows<const bf16> q, HeadRows<bf16> o, int tokens) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Links links;
  wait_for_kernels_ahead();
  constexpr int kQueries = ForwardTile<padded_dim(DIM)>::kQueries, kParts = kWindowTokens / kQueries;
  const int head = static_cast<int>(blockIdx.x) % p.heads;
  const int place = (static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x)) / p.heads;
  const int window = place / kParts, skipped = place % kParts * kQueries;  // tokens of a run that others take
  const int first = window * kWindowTokens, token = first + static_cast<int>(threadIdx.x);
  const bool links_on = token + 1 < tokens && goes_on(p, at, token);
  const uint32_t word = __ballot_sync(0xffffffffu, links_on);
  if (threadIdx.x % 32 == 0) links.words[threadIdx.x / 32] = word;
  if (token < tokens && at.sequence_ids[token] < 0) {
    uint4 *const row = reinterpret_cast<uint4 *>(t.o + token * p.o_stride + static_cast<int64_t>(head) * DIM);
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) row[i] = uint4{};
  }
  __syncthreads();
  if (!links.any()) return;

  const RunTiles<DIM, CAPPED> tiles(shared);
  const LogitFactors factors(p);
  for (int begin = links.find(0, true); begin < kWindowTokens;) {
    const int end = links.find(begin, false) + 1;  // a link is not in the window's last place
    const int sequence = at.sequence_ids[first + begin];
    const int count = kParts == 1 ? end - begin : min(end - begin - skipped, kQueries);
    const Run run = {first + begin + skipped, count, sequence, at.positions[first + begin] + skipped};
    if (kParts == 1 || run.count > 0) {
      tiles.make(p, factors, run, q.head(head), t.head(p, at, head / p.group, sequence), o.head(head));
      __syncthreads();  // the tiles are free
    }
    begin = links.find(end, true);
  }
}

template <int DIM>
inline void launch_runs(const sg_call *call, const PagedProblem &p, const PagedTensors &t, int tokens) {
  using Tile = ForwardTile<padded_dim(DIM)>;
  const auto kernel = p.softcap > 0.0f ? paged_runs<DIM, true> : paged_runs<DIM, false>;
  const int shared = static_cast<int>(Tile::kBytes);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  const int64_t blocks = ceil_div(tokens, kWindowTokens) * (kWindowTokens / Tile::kQueries) * p.heads;
  launch_ahead(call, static_cast<unsigned>(blocks), kAttentionThreads, static_cast<size_t>(shared), kernel, p,
               paged_indices(call), t, HeadRows<const bf16>(input(call, 0)), HeadRows<bf16>(output(call, 0)), tokens);
}

}  // namespace sg::cuda
