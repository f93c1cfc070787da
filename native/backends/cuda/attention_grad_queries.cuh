// dq of 256 queries of a head on compute capability 9.0: the gradients of their logits, which attention_grad_keys.cuh left,
// times the keys that they see. A block stays for several such jobs: what the next one reads comes while one ends. Two
// warpgroups have two tiles of 64 queries each; a warp has the copy engine bring a tile of keys and, as one copy, the pairs that
// it has with these queries.
//
// Floor: the bytes of the gradients, 2 for each pair.
#pragma once

#include "attention_grad_tiles.cuh"

namespace sg::cuda::attention_tiles {

template <int DIM>
struct QueryTiles {
  static constexpr int kParts = DIM / 64;
  static constexpr int kOwn = 2, kTiles = 2 * kOwn;     // tiles of queries, of a warpgroup and of the block
  static constexpr int kQueries = kTiles * kTile;
  static constexpr int kStages = DIM == 64 ? 5 : 4;
  static constexpr int kKeyPart = kTile * kSwizzledRow, kKeyBytes = kParts * kKeyPart;
  static constexpr int kStageBytes = kKeyBytes + kTiles * kPlaceBytes;
  // Offsets in shared memory: stages of keys and of places, a tile of dq of each warpgroup, barriers.
  static constexpr int kPlacesAt = kKeyBytes, kSumsAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kSumsAt + 2 * kKeyBytes;
  static constexpr int kBytes = kBarriersAt + 2 * kStages * 8;
  static_assert(kQueries == kBlockQueries && kBytes <= 226 << 10);
};

constexpr int kQueryThreads = 2 * kWarpgroup + 32;

#if SG_HOPPER

template <int DIM>
struct QueryBlock {
  using L = QueryTiles<DIM>;
  using Sums = float[DIM / 8][4];

  const AttentionShape &shape;
  const Between &between;
  unsigned char *shared;
  uint32_t base;
  int heads, job = 0;
  Turn<L::kStages> turn;
  int head, tile, last;  // tiles: the job's first, and its last that has tokens
  int begin[L::kTiles];  // the first tile of keys of each

  __device__ QueryBlock(const AttentionShape &of, const Between &with, unsigned char *bytes, int of_heads)
      : shape(of), between(with), shared(bytes), base(shared_address(bytes)), heads(of_heads) {}
  __device__ uint32_t full(int stage) const { return base + L::kBarriersAt + stage * 16; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }

  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < L::kStages; ++i) {
        barrier_init(full(i), 1);
        barrier_init(empty(i), 2 * kWarpgroup / 32);
      }
      barriers_are_there();
    }
    __syncthreads();
    wait_for_kernels_ahead();
  }

  // The block's next job, if there is one: one of each round, of every other round from the end, so that long ones and short
  // ones come together.
  __device__ bool take_job() {
    const int blocks = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
    const int number = job * blocks + (job % 2 == 0 ? own : blocks - 1 - own);
    ++job;
    if (number >= between.query_blocks * heads) return false;
    const bool valid = between.fits();
    head = number % heads;
    tile = between.query_order[number / heads] * L::kTiles;
    last = min(tile + L::kTiles, between.tiles) - 1;
#pragma unroll
    for (int i = 0; i < L::kTiles; ++i) {
      begin[i] = valid ? keys_of(shape, min((tile + i) * kTile, shape.tokens - 1)).begin / kTile : INT_MAX;
    }
    return true;
  }

  // Tile `index` of the block sees something of tile `key` of keys.
  __device__ bool sees(int index, int key) const {
    return tile + index <= last && key >= begin[index] && key <= tile + index;
  }

  // ---- by one thread: what a job reads
  __device__ void fill(const CUtensorMap &keys) {
    const int kv_head = head / shape.group;
    const unsigned char *const places = between.gradients + static_cast<int64_t>(head) * between.places * kPlaceBytes;
    for (int key = begin[0]; key <= last; ++key, turn.next()) {
      int from = L::kTiles, count = 0;
#pragma unroll
      for (int i = L::kTiles - 1; i >= 0; --i) {
        if (!sees(i, key)) continue;
        from = i;
        ++count;
      }
      const uint32_t bytes = count * kPlaceBytes, to = base + turn.stage * L::kStageBytes, barrier = full(turn.stage);
      const int64_t place = int64_t{between.first_place[key]} + tile + from - key;
      barrier_wait(empty(turn.stage), turn.parity ^ 1);
      barrier_expect(barrier, bytes + L::kKeyBytes);
      if (count > 0) copy_bytes(to + L::kPlacesAt + from * kPlaceBytes, places + place * kPlaceBytes, bytes, barrier);
      for (int part = 0; part < L::kParts; ++part) {
        copy_box(to + part * L::kKeyPart, &keys, kv_head * L::kParts + part, key * kTile, barrier);
      }
    }
  }

  // ---- by each of two warpgroups: its tiles of a job's queries
  __device__ __forceinline__ void make(int own, const HeadRows<bf16> &dq) {
    Sums sums[L::kOwn] = {};
    const int first = L::kOwn * own, own_tile = tile + first;
    const int from = own == 0 ? begin[0] : begin[L::kOwn], next = own == 0 ? begin[1] : begin[L::kOwn + 1];
    const uint32_t places = first * kPlaceBytes;
    int key = begin[0];
    pass(key, min(from, last + 1));
    add<true, false>(sums, key, min(min(next, own_tile + 1), last + 1), places);
    add<true, true>(sums, key, min(own_tile + 1, last + 1), places);
    add<false, true>(sums, key, min(own_tile + 2, last + 1), places);
    pass(key, last + 1);
#pragma unroll
    for (int i = 0; i < L::kOwn; ++i) leave(sums[i], own, first + i, dq);
  }

 private:
  // Up to tile `until` of keys: nothing; and the products of the warpgroup's first tile of queries, its second, or both.
  __device__ void pass(int &key, int until) {
    for (; key < until; ++key, turn.next()) {
      barrier_wait(full(turn.stage), turn.parity);  // else it would count as having left what was there before
      leave_stage(turn.stage);
    }
  }
  template <bool first, bool second>
  __device__ __forceinline__ void add(Sums (&sums)[L::kOwn], int &key, int until, uint32_t places) {
#pragma unroll 1
    for (; key < until; ++key, turn.next()) {
      const uint32_t stage = base + uniform(turn.stage) * L::kStageBytes;
      const uint64_t rows = plain_descriptor(stage + L::kPlacesAt + places, 128, 1024);
      const uint64_t columns = transposed_descriptor(stage, L::kKeyPart);
      barrier_wait(full(turn.stage), turn.parity);
      products_begin();
#pragma unroll
      for (int step = 0; step < kTile / 16; ++step) {
        constexpr int kRows = 16 * kSwizzledRow >> 4;
        if (first) multiply_first<1, 1>(sums[0], rows + step * kRows, columns + step * kRows, true);
        if (second) multiply_first<1, 1>(sums[1], rows + (kPlaceBytes >> 4) + step * kRows, columns + step * kRows, true);
      }
      products_commit();
      products_wait();
      leave_stage(turn.stage);
    }
  }

  __device__ void leave_stage(int stage) const {
    if (lane_index() == 0) barrier_arrive(empty(stage));
  }
  __device__ __forceinline__ void leave(const Sums &sums, int own, int index, const HeadRows<bf16> &dq) const {
    const int first = (tile + index) * kTile;
    const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane_index() / 4;
    const bool valid = between.fits();
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TokenRange range = keys_of(shape, min(first + place_row(row + 8 * i), shape.tokens - 1));
      factor[i] = valid && range.begin < range.end ? shape.scale : not_a_number();
    }
    __syncwarp();  // its rows of the tile before were read
    store_sums<DIM>(shared + L::kSumsAt + own * L::kKeyBytes, L::kKeyPart, sums, factor, dq.head(head), first, shape.tokens,
                    place_row);
  }
};

#endif  // SG_HOPPER

// Blocks share the jobs: 256 queries by their order, those of the heads side by side. Pointers and maps are of the first of
// these heads.
template <int DIM>
__global__ void __launch_bounds__(kQueryThreads, 1)
    query_gradients(const __grid_constant__ AttentionShape shape, const __grid_constant__ Between between,
                    const __grid_constant__ CUtensorMap keys, const HeadRows<bf16> dq, int heads) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  QueryBlock<DIM> block(shape, between, shared, heads);
  block.open();
  if (threadIdx.x >= 2 * kWarpgroup) {
    if (threadIdx.x != 2 * kWarpgroup) return;
    while (block.take_job()) block.fill(keys);
  } else {
    const int own = uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    while (block.take_job()) block.make(own, dq);
  }
#endif
}

}  // namespace sg::cuda::attention_tiles
