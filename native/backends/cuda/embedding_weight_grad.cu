// embedding_weight_grad(tokens[T], dy[T, D]) -> dweight[V, D] f32: dweight[tokens[t]] += scale * dy[t]. Tokens outside
// [0, V) are skipped.
//
// Floor: dy once, and a row of dweight read and written for each distinct token. No atomics, and sums whose order is
// fixed by the tokens alone:
//   1. rank_tokens  up to 8192 keys (token, position): the place of a key is the number of keys below it, counted.
//                   These are T^2 comparisons, which take a device about a microsecond at 4096.
//   1. sort_tiles   more keys: tiles of 512, of 2048 where there are many, are sorted in shared memory
//   2. rank_keys    a key's place is its place in its tile plus, from a binary search in every other tile, the number
//                   of keys below it. Lanes of a warp search tiles side by side.
//                   Rows that sum_runs begins with are asked for as soon as their places are known.
//   3. sum_runs     the sorted keys are cut into segments of 32. A warp adds the rows of a segment, in order, for some
//                   columns; runs of one token that lie within go to dweight at once. A run that begins before the
//                   segment leaves its part in heads[segment], one that begins here and goes on in tails[segment].
//   4. join_runs    where a run crosses segments: its tail and the heads that follow, in order.
// So a token that fills the batch (padding) is summed by as many warps as any other tokens.
#include "prefetch.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

using Key = unsigned long long;  // token << 32 | position; a token outside the table sorts behind all others
constexpr Key kNoKey = ~0ull;
constexpr uint32_t kNoToken = 0xffffffffu, kBehindAll = 0x7fffffffu;  // the same in 31 bits; no table is that long
// A tile is sorted by half as many threads, which meet after each of its steps: small tiles take a fifth of the time of
// large ones, as long as a lane of rank_keys has one of them to search. The order of all keys is the same.
constexpr int kSmallTile = 512, kLargeTile = 2048;
constexpr int64_t kMostInSmallTiles = 32 * kSmallTile;
constexpr int kMostCounted = 8192;  // keys; 32 KB of tokens in shared memory
constexpr int kCountedEach = 4;     // of a warp
constexpr int kSegment = 32;      // keys, one a lane
constexpr int kColumns = 32 * 8;  // of a warp: eight a lane, as two packs of four half of this apart
constexpr int kRowsInFlight = 4;
constexpr int kSumBlocks = 2;     // of sum_runs on a multiprocessor, by their registers

__device__ inline uint32_t token_of(Key key) { return static_cast<uint32_t>(key >> 32); }
__device__ inline int64_t position_of(Key key) { return static_cast<int64_t>(key & 0xffffffffu); }

// A token of the table; any other sorts behind all of them.
__device__ inline uint32_t known_token(int64_t token, int64_t vocabulary) {
  return token >= 0 && token < vocabulary ? static_cast<uint32_t>(token) : kNoToken;
}

// A bitonic network; every block sorts one tile.
template <int kTile>
__global__ void __launch_bounds__(kTile / 2)
    sort_tiles(const int32_t *tokens, int64_t num_tokens, int64_t vocabulary, Key *sorted) {
  constexpr int kSortThreads = kTile / 2;
  __shared__ Key keys[kTile];
  wait_for_kernels_ahead();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kTile;
  for (int i = threadIdx.x; i < kTile; i += kSortThreads) {
    const int64_t t = begin + i;
    Key key = kNoKey;
    if (t < num_tokens) {
      key = static_cast<Key>(known_token(tokens[t], vocabulary)) << 32 | static_cast<Key>(t);
    }
    keys[i] = key;
  }
  for (int size = 2; size <= kTile; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      __syncthreads();
      const int low = 2 * threadIdx.x - (threadIdx.x & (stride - 1)), high = low + stride;
      const Key a = keys[low], b = keys[high];
      if ((a > b) == ((low & size) == 0)) {
        keys[low] = b;
        keys[high] = a;
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTile; i += kSortThreads) {
    if (begin + i < num_tokens) sorted[begin + i] = keys[i];
  }
}

// The rows of dy and dweight, and the places whose keys' rows come first: those that a warp of sum_runs begins with.
struct FirstRows {
  const char *dy, *dweight;
  uint32_t dy_bytes, dweight_bytes;  // of a row
  int64_t places;                    // beyond these the warps of sum_runs do not run at once; 0: rows are no packs
};
__device__ inline void bring_rows_of(const FirstRows &rows, Key key, int64_t place) {
  if (place >= rows.places || place % kSegment >= kRowsInFlight || token_of(key) == kNoToken) return;
  bring_closer(rows.dy + position_of(key) * rows.dy_bytes, rows.dy_bytes);
  bring_closer(rows.dweight + static_cast<int64_t>(token_of(key)) * rows.dweight_bytes, rows.dweight_bytes);
}

// How many of tokens [begin, end) are below each of a warp's tokens (`next` 0) or not above them (1): by the sign of a
// difference of 31 bits, which takes two instructions where a comparison takes three.
__device__ inline void count_below(const uint32_t *tokens, int begin, int end, const uint32_t (&own)[kCountedEach],
                                   uint32_t next, uint32_t (&below)[kCountedEach]) {
#pragma unroll 8
  for (int i = begin + lane_index(); i < end; i += 32) {
    const uint32_t token = tokens[i];
#pragma unroll
    for (int k = 0; k < kCountedEach; ++k) below[k] += (token - (own[k] + next)) >> 31;
  }
}

// A warp places kCountedEach keys that lie side by side.
__global__ void __launch_bounds__(kWarpTaskThreads)
    rank_tokens(const int32_t *tokens, int num_tokens, int64_t vocabulary, FirstRows rows, Key *sorted) {
  __shared__ uint32_t known[kMostCounted];
  constexpr int kOfBlock = kWarpTaskThreads / 32 * kCountedEach;
  const int mine = static_cast<int>(blockIdx.x) * kOfBlock + static_cast<int>(threadIdx.x);
  if (threadIdx.x < kOfBlock && mine < num_tokens) bring_closer(tokens + mine);
  wait_for_kernels_ahead();
  for (int i = threadIdx.x; i < num_tokens; i += kWarpTaskThreads) {
    known[i] = min(known_token(tokens[i], vocabulary), kBehindAll);
  }
  __syncthreads();
  const int first = static_cast<int>(warp_task()) * kCountedEach, last = min(first + kCountedEach, num_tokens);
  if (first >= num_tokens) return;
  uint32_t own[kCountedEach], below[kCountedEach] = {};
#pragma unroll
  for (int k = 0; k < kCountedEach; ++k) own[k] = first + k < last ? known[first + k] : kBehindAll;
  count_below(known, 0, first, own, 1, below);
  count_below(known, last, num_tokens, own, 0, below);
#pragma unroll
  for (int k = 0; k < kCountedEach; ++k) {
    uint32_t place = __reduce_add_sync(0xffffffffu, below[k]);
#pragma unroll
    for (int other = 0; other < kCountedEach; ++other) {
      place += own[other] < own[k] || (other < k && own[other] == own[k]);
    }
    if (lane_index() != k || first + k >= last) continue;
    const uint32_t token = own[k] == kBehindAll ? kNoToken : own[k];
    const Key key = static_cast<Key>(token) << 32 | static_cast<Key>(first + k);
    sorted[place] = key;
    bring_rows_of(rows, key, place);
  }
}

// A warp places one key.
template <int kTile>
__global__ void __launch_bounds__(kWarpTaskThreads)
    rank_keys(const Key *tiles, int64_t num_tokens, FirstRows rows, Key *sorted) {
  wait_for_kernels_ahead();
  const int64_t index = warp_task();
  if (index >= num_tokens) return;
  const Key key = tiles[index];
  const int64_t own = index / kTile, num_tiles = (num_tokens + kTile - 1) / kTile;
  int below = 0;
  for (int64_t tile = lane_index(); tile < num_tiles; tile += 32) {
    if (tile == own) continue;
    const Key *keys = tiles + tile * kTile;
    const int64_t left = num_tokens - tile * kTile;
    // keys[0 .. first) are below the key, keys[last ..] are not.
    int first = 0, last = left < kTile ? static_cast<int>(left) : kTile;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (keys[middle] < key) {
        first = middle + 1;
      } else {
        last = middle;
      }
    }
    below += first;
  }
  below = __reduce_add_sync(0xffffffffu, below);
  if (lane_index() != 0) return;
  const int64_t place = index % kTile + below;
  sorted[place] = key;
  bring_rows_of(rows, key, place);
}

struct Sizes {
  int64_t tokens, width;
  int64_t segments, column_chunks;
};

__device__ inline uint32_t token_at(const Key *sorted, int64_t index, int64_t num_tokens) {
  return index >= 0 && index < num_tokens ? token_of(sorted[index]) : kNoToken;
}

// A lane's eight columns of a row, `left` columns before the row's end. Side by side, two stores of a warp would each
// touch half of every 32-byte sector of f32.
template <bool packed, class T>
__device__ inline void load_lane(const T *row, int64_t left, float (&to)[8]) {
  float halves[2][4];
  load_within<4, packed>(row, left, halves[0]);
  load_within<4, packed>(row + kColumns / 2, left - kColumns / 2, halves[1]);
#pragma unroll
  for (int k = 0; k < 8; ++k) to[k] = halves[k / 4][k % 4];
}
template <bool packed>
__device__ inline void store_lane(float *row, int64_t left, const float (&from)[8]) {
  const float halves[2][4] = {{from[0], from[1], from[2], from[3]}, {from[4], from[5], from[6], from[7]}};
  store_within<4, packed>(row, left, halves[0]);
  store_within<4, packed>(row + kColumns / 2, left - kColumns / 2, halves[1]);
}

template <bool packed>
__device__ inline void add_to(float *dweight, int64_t left, float scale, const float (&sum)[8],
                              const float (&before)[8]) {
  float after[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) after[k] = fmaf(sum[k], scale, before[k]);
  store_lane<packed>(dweight, left, after);
}

template <bool packed, class G>
__global__ void __launch_bounds__(kWarpTaskThreads)
    sum_runs(Sizes sizes, const Key *sorted, const G *dy, float scale, float *dweight, float *heads, float *tails) {
  wait_for_kernels_ahead();
  const int64_t task = warp_task(), segment = task / sizes.column_chunks;
  if (segment >= sizes.segments) return;
  const int lane = lane_index();
  const int64_t column = task % sizes.column_chunks * kColumns + 4 * lane, left = sizes.width - column;
  const int64_t begin = segment * kSegment;
  const Key key = begin + lane < sizes.tokens ? sorted[begin + lane] : kNoKey;
  const uint32_t token = token_of(key);
  const int count = __popc(__ballot_sync(0xffffffffu, token != kNoToken));  // these come first
  if (count == 0) return;
  const uint32_t next = lane == 31 ? token_at(sorted, begin + kSegment, sizes.tokens)
                                   : token_at(sorted, begin + lane + 1, sizes.tokens);
  const uint32_t run_ends = __ballot_sync(0xffffffffu, next != token);
  const bool begins_before = token_at(sorted, begin - 1, sizes.tokens) == __shfl_sync(0xffffffffu, token, 0);
  bool is_head = begins_before;  // the run that is being summed
  float sum[8] = {};
  for (int first = 0; first < count; first += kRowsInFlight) {
    float rows[kRowsInFlight][8], before[kRowsInFlight][8];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const Key at = __shfl_sync(0xffffffffu, key, first + j);
      const bool used = first + j < count;
      load_lane<packed>(dy + (used ? position_of(at) : 0) * sizes.width + column, used ? left : 0, rows[j]);
      const bool ends = used && (run_ends >> (first + j) & 1u) != 0;
      load_lane<packed>(dweight + (used ? token_of(at) : 0) * sizes.width + column, ends ? left : 0, before[j]);
    }
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const Key at = __shfl_sync(0xffffffffu, key, first + j);
      if (first + j >= count) break;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += rows[j][k];
      const bool ends = (run_ends >> (first + j) & 1u) != 0;
      if (!ends && first + j < kSegment - 1) continue;
      if (is_head) {
        store_lane<packed>(heads + segment * sizes.width + column, left, sum);
      } else if (!ends) {
        store_lane<packed>(tails + segment * sizes.width + column, left, sum);
      } else {
        add_to<packed>(dweight + token_of(at) * sizes.width + column, left, scale, sum, before[j]);
      }
      is_head = false;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] = 0.0f;
    }
  }
}

template <bool packed>
__global__ void __launch_bounds__(kWarpTaskThreads)
    join_runs(Sizes sizes, const Key *sorted, float scale, float *dweight, const float *heads, const float *tails) {
  wait_for_kernels_ahead();
  const int64_t task = warp_task(), segment = task / sizes.column_chunks;
  if (segment >= sizes.segments) return;
  const int64_t column = task % sizes.column_chunks * kColumns + 4 * lane_index(), left = sizes.width - column;
  const int64_t begin = segment * kSegment, end = begin + kSegment;
  const uint32_t token = token_at(sorted, end - 1, sizes.tokens);
  if (token == kNoToken || token_at(sorted, end, sizes.tokens) != token) return;  // no run goes on
  if (begin > 0 && token_at(sorted, begin - 1, sizes.tokens) == token) return;    // it began before: not ours to join
  int64_t parts = 0;  // segments behind this one that the run reaches: those whose first key is the run's
  uint32_t reached;
  do {
    const int64_t index = end + (parts + lane_index()) * kSegment;
    reached = __ballot_sync(0xffffffffu, token_at(sorted, index, sizes.tokens) == token);
    parts += __popc(reached);
  } while (reached == 0xffffffffu);
  float sum[8], before[8];
  float *to = dweight + token * sizes.width + column;
  load_lane<packed>(tails + segment * sizes.width + column, left, sum);
  load_lane<packed>(to, left, before);
#pragma unroll 4
  for (int64_t part = 0; part < parts; ++part) {
    float head[8];
    load_lane<packed>(heads + (segment + 1 + part) * sizes.width + column, left, head);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum[k] += head[k];
  }
  add_to<packed>(to, left, scale, sum, before);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *dy = input(call, 1), *dweight = output(call, 0);
  if (!tokens || !dy || !dweight || tokens->dtype != SG_I32 || tokens->rank != 1 || !all_dense(call)) return 0;
  if (dy->rank != 2 || dweight->rank != 2 || !is_activation(dy) || dweight->dtype != SG_F32) return 0;
  if (dy->shape[0] != tokens->shape[0] || dy->shape[1] != dweight->shape[1]) return 0;
  return dy->shape[0] < INT32_MAX && dweight->shape[0] < INT32_MAX ? 10 : 0;
}

Sizes sizes_of(const sg_tensor *dy) {
  return {dy->shape[0], dy->shape[1], ceil_div(dy->shape[0], kSegment), ceil_div(dy->shape[1], kColumns)};
}
// Of the keys, once sorted by tile and once as a whole; heads and tails follow.
size_t key_bytes(const Sizes &sizes) { return static_cast<size_t>(ceil_div(sizes.tokens, 32) * 32) * sizeof(Key); }

size_t workspace(const sg_call *call) {
  const Sizes sizes = sizes_of(call->inputs[1]);
  return 2 * key_bytes(sizes) + static_cast<size_t>(2 * sizes.segments * sizes.width) * sizeof(float);
}

template <bool packed, class G>
void sum_rows(const sg_call *call, const Sizes &sizes, const Key *sorted, const G *dy, float *heads) {
  const float scale = static_cast<float>(attr_float(call, "scale", 1.0));
  float *dweight = data<float>(output(call, 0)), *tails = heads + sizes.segments * sizes.width;
  const unsigned blocks = warp_task_blocks(sizes.segments * sizes.column_chunks);
  launch_ahead(call, blocks, kWarpTaskThreads, 0, sum_runs<packed, G>, sizes, sorted, dy, scale, dweight, heads, tails);
  if (sizes.segments == 1) return;
  launch_ahead(call, blocks, kWarpTaskThreads, 0, join_runs<packed>, sizes, sorted, scale, dweight, heads, tails);
}

FirstRows first_rows(const sg_call *call, const Sizes &sizes) {
  const sg_tensor *dy = input(call, 1), *dweight = output(call, 0);
  const auto dy_bytes = static_cast<uint32_t>(sizes.width * (dy->dtype == SG_BF16 ? 2 : 4));
  const auto dweight_bytes = static_cast<uint32_t>(sizes.width * 4);
  const auto *from = static_cast<const char *>(dy->data), *to = static_cast<const char *>(dweight->data);
  const bool packs = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | dy_bytes) % 16 == 0;
  const int64_t warps = device().units * kSumBlocks * (kWarpTaskThreads / 32);
  return {from, to, dy_bytes, dweight_bytes, packs ? ceil_div(warps, sizes.column_chunks) * kSegment : 0};
}

// These leave all keys in order, in one of the two places for them in the workspace.
const Key *count_keys(const sg_call *call, const Sizes &sizes) {
  Key *sorted = static_cast<Key *>(call->workspace);
  const int64_t warps = ceil_div(sizes.tokens, kCountedEach);
  launch_ahead(call, warp_task_blocks(warps), kWarpTaskThreads, 0, rank_tokens, data<const int32_t>(input(call, 0)),
               static_cast<int>(sizes.tokens), output(call, 0)->shape[0], first_rows(call, sizes), sorted);
  return sorted;
}
template <int kTile>
const Key *sort_keys(const sg_call *call, const Sizes &sizes) {
  char *workspace = static_cast<char *>(call->workspace);
  Key *tiles = reinterpret_cast<Key *>(workspace), *ranked = reinterpret_cast<Key *>(workspace + key_bytes(sizes));
  const auto num_tiles = static_cast<unsigned>(ceil_div(sizes.tokens, kTile));
  launch_ahead(call, num_tiles, kTile / 2, 0, sort_tiles<kTile>, data<const int32_t>(input(call, 0)), sizes.tokens,
               output(call, 0)->shape[0], tiles);
  launch_ahead(call, warp_task_blocks(sizes.tokens), kWarpTaskThreads, 0, rank_keys<kTile>, tiles, sizes.tokens,
               first_rows(call, sizes), ranked);
  return ranked;
}

int32_t run(const sg_call *call) {
  const sg_tensor *dy = input(call, 1), *dweight = output(call, 0);
  const Sizes sizes = sizes_of(dy);
  if (sizes.tokens == 0 || sizes.width == 0) return SG_OK;
  const Key *sorted = sizes.tokens <= kMostCounted        ? count_keys(call, sizes)
                      : sizes.tokens <= kMostInSmallTiles ? sort_keys<kSmallTile>(call, sizes)
                                                          : sort_keys<kLargeTile>(call, sizes);
  char *workspace = static_cast<char *>(call->workspace);
  float *heads = reinterpret_cast<float *>(workspace + 2 * key_bytes(sizes));
  with_type(dy, [&]<class G>(G) {
    const G *rows = data<const G>(dy);
    if (can_pack<4>(rows, sizes.width) && can_pack<4>(data<float>(dweight), sizes.width)) {
      sum_rows<true>(call, sizes, sorted, rows, heads);
    } else {
      sum_rows<false>(call, sizes, sorted, rows, heads);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("embedding_weight_grad", "cuda", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
