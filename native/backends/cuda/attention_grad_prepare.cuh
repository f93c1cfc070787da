// What attention_grad's tiles need first: -delta[t, h] = -do . o and -lse in base 2, as rows of a head; and tables of places and
// of the order of blocks, which only depend on where documents begin.
//
// Floor: the bytes of do and o.
#pragma once

#include "attention_grad_tiles.cuh"

namespace sg::cuda::attention_tiles {

constexpr int kPrepareThreads = 256;
constexpr int kPrepareTokens = 4;  // of a group of lanes

// How many tiles of queries have a pair with tile `tile` of keys.
__device__ inline int tiles_of_queries(const AttentionShape &shape, int tile) {
  const int first = tile * kTile, last = min(first + kTile, shape.tokens) - 1;
  return static_cast<int>(ceil_div(max(queries_of(shape, last).end - first, 0), kTile));
}

// By a block: the running sum of tiles_of_queries.
__device__ inline void number_places(const AttentionShape &shape, const Between &between) {
  __shared__ int counts[kPrepareThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = lane_index(), warp = thread / 32;
  int64_t before = 0;
  for (int from = 0; from < between.tiles; from += kPrepareThreads) {
    const int tile = from + thread, own = tile < between.tiles ? tiles_of_queries(shape, tile) : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) counts[warp] = sum;
    __syncthreads();
    int64_t place = before + sum - own;
    for (int i = 0; i < kPrepareThreads / 32; ++i) {
      if (i < warp) place += counts[i];
      before += counts[i];
    }
    if (tile < between.tiles) between.first_place[tile] = static_cast<int>(min(place, int64_t{INT_MAX}));
    __syncthreads();
  }
  if (thread == 0) between.first_place[between.tiles] = static_cast<int>(min(before, int64_t{INT_MAX}));
  if (before <= between.places) return;
  for (int tile = thread; tile <= between.tiles; tile += kPrepareThreads) between.first_place[tile] = -1;
}

// By a block: order[rank] of `count` lengths, the longest first, the first first of equals.
template <class Length>
__device__ inline void put_in_order(int *order, int *lengths, int count, Length &&length) {
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kPrepareThreads) lengths[i] = length(i);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kPrepareThreads) {
    const int own = lengths[i];
    int rank = 0;
    for (int j = 0; j < count; ++j) rank += lengths[j] > own || (lengths[j] == own && j < i);
    order[rank] = i;
  }
}

__device__ inline void make_tables(const AttentionShape &shape, const Between &between) {
  number_places(shape, between);
  put_in_order(between.key_order, between.lengths, between.padded / kBlockKeys, [&](int block) {
    constexpr int tiles = kBlockKeys / kTile;
    const int last = min((block + 1) * tiles, between.tiles) - 1;
    return last - block * tiles + tiles_of_queries(shape, last);
  });
  put_in_order(between.query_order, between.lengths, between.query_blocks, [&](int block) {
    const int first = block * kBlockQueries, last = min(first + kBlockQueries, shape.tokens) - 1;
    return last / kTile - keys_of(shape, first).begin / kTile;
  });
}

// A row of do and o is read by DIM / 8 lanes, which take kPrepareTokens tokens of a head. The first block makes the tables.
template <int DIM>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare(const AttentionShape shape, const Between between, const HeadRows<const bf16> grad, const HeadRows<const bf16> o,
            const float *lse) {
  wait_for_kernels_ahead();
  if (blockIdx.x == 0) return make_tables(shape, between);
  constexpr int lanes = DIM / 8;
  const int64_t group = (static_cast<int64_t>(blockIdx.x - 1) * kPrepareThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes, head = static_cast<int>(group % shape.heads);
  const int first = static_cast<int>(group / shape.heads) * kPrepareTokens;
  const bool inside = first < between.padded;
  Pack<bf16, 8> x[kPrepareTokens] = {}, y[kPrepareTokens] = {};
#pragma unroll
  for (int i = 0; i < kPrepareTokens; ++i) {
    if (!inside || first + i >= shape.tokens) continue;
    x[i] = load_pack<8>(grad.head(head).row(first + i) + lane * 8);
    y[i] = load_pack<8>(o.head(head).row(first + i) + lane * 8);
  }
  float own = 0.0f;  // of token first + lane
#pragma unroll
  for (int i = 0; i < kPrepareTokens; ++i) {
    float a[8], b[8], sum = 0.0f;
    to_floats(x[i], a);
    to_floats(y[i], b);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum = fmaf(a[j], b[j], sum);
#pragma unroll
    for (int offset = lanes / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == i) own = sum;
  }
  if (!inside || lane >= kPrepareTokens) return;
  const int token = first + lane;
  float *const to = between.stats + 2 * (static_cast<int64_t>(head) * between.padded + token / 2 * 2) + token % 2;
  to[0] = token < shape.tokens ? lse[static_cast<int64_t>(token) * shape.heads + head] * -kLog2e : 0.0f;
  to[2] = -own;
}

}  // namespace sg::cuda::attention_tiles
