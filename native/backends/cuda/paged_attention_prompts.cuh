// Runs of tokens on compute capability 9.0, heads of 64 or 128: what paged_attention_runs.cuh makes, by products of a
// warpgroup.
//
// A block is one warpgroup and takes 128 queries of a head as two halves of 64. The copy engine brings keys and values, 64
// at a time, from where the table says: the next ones while these are used. While the exponentials of one half are made the
// other half's products are under way, and two or three blocks share a multiprocessor. Weights go from the first product to
// the second in registers. A half that sees nothing of a tile leaves it out.
//
// Floor: 2 (head_dim + value_dim) FLOPs for each visible pair and head, at the rate of wgmma.
#pragma once

#include "paged_attention_runs.cuh"

namespace sg::cuda {

struct PromptMaps {
  CUtensorMap queries, keys, values;
};

// The maps of a call. False where the driver refuses.
inline bool map_prompts(const sg_call *call, PromptMaps *maps) {
  return map_heads(input(call, 0), 1, kWindowTokens, &maps->queries) &&
         map_heads(input(call, 1), 1, kTileKeys, &maps->keys) && map_heads(input(call, 2), 1, kTileKeys, &maps->values);
}

template <int DIM>
struct PromptTiles {
  static_assert(DIM == 64 || DIM == 128);
  using Maps = PromptMaps;
  using State = ForwardWarp<DIM, false>;
  static constexpr int kQueries = kWindowTokens, kHalf = 64;  // queries of a tile, and of a product
  static constexpr int kBlocks = DIM == 64 ? 3 : 2;           // on a multiprocessor
  static constexpr int kParts = DIM / 64;                     // of 128 bytes, of a row
  static constexpr int kQueryPart = kQueries * kSwizzledRow, kKeyPart = kRunKeys * kSwizzledRow;  // bytes
  static constexpr int kTileBytes = kParts * kKeyPart, kStages = 2;
  static constexpr int kBarriers = 1 + 2 * kStages;
  static constexpr size_t kBytes =
      kParts * kQueryPart + 2 * kStages * kTileBytes + kBarriers * sizeof(uint64_t) + sizeof(TokenRange);
  static constexpr int kOutside = 1 << 30;  // a row that no cache has: zeros

#if SG_HOPPER
  const Maps &maps;
  unsigned char *shared;
  uint32_t queries, stages, queries_full, full;  // full: of keys and of values, of each stage
  TokenRange *missing;
  int tiles = 0, runs = 0;  // made so far

  // By all threads of the block. bytes: kBytes, at a multiple of 1024.
  __device__ PromptTiles(const Maps &of, const HeadRows<const bf16> &, unsigned char *bytes)
      : maps(of), shared(bytes), queries(shared_address(bytes)) {
    stages = queries + kParts * kQueryPart;
    queries_full = stages + 2 * kStages * kTileBytes;
    full = queries_full + 8;
    missing = reinterpret_cast<TokenRange *>(bytes + (full + 2 * kStages * 8 - queries));
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBarriers; ++i) barrier_init(queries_full + 8 * i, 1);
      barriers_are_there();
    }
    __syncthreads();
  }

  // Which keys the rows of a run's tile see.
  struct Sight {
    int position, count, window;

    __device__ int begin(int row) const { return max(position + row - window + 1, 0); }
    __device__ int end(int row) const { return position + row + 1; }
    __device__ int last_row(int half) const { return min(half * kHalf + kHalf, count) - 1; }
    __device__ bool touches(int half, int key) const {
      return half * kHalf < count && key < end(last_row(half)) && key + kRunKeys > begin(half * kHalf);
    }
    __device__ bool covers(int half, int key) const {
      return key >= begin(last_row(half)) && key + kRunKeys <= end(half * kHalf);
    }
  };
  // Of row lane / 4 + 8 i of the warp's rows of a half.
  __device__ static int row_of(int half, int i) {
    return half * kHalf + static_cast<int>(threadIdx.x) / 32 * 16 + 8 * i + lane_index() / 4;
  }

  // o of a run of at most kQueries tokens, for one head. By all threads of the block.
  __device__ __forceinline__ void make(const PagedProblem &p, const LogitFactors &factors, const Run &run, int query_head,
                                       const PagedHead &head, const HeadRows<bf16> &o) {
    const Sight sight = {run.position, run.count, p.window > 0 ? static_cast<int>(min(p.window, int64_t{1} << 30)) : 1 << 30};
    const Bounds block = {sight.begin(0), sight.end(run.count - 1), 0, 0};
    const int begin = block.begin / kTileKeys * kTileKeys, first_tile = tiles;
    const bool asks = threadIdx.x < 32;
    RunPlaces places;
    if (threadIdx.x == 0) *missing = {INT_MAX, 0};
    if (asks) {
      ask_for_queries(run, query_head);
      places.find(head, begin, block);
      ask(head, places, begin, block, tiles);
    }
    State state;
    state.clear();
    for (int key = begin; key < block.end; key += kRunKeys, ++tiles) {
      __syncthreads();  // the last tile was used
      if (asks && key + kRunKeys < block.end) ask(head, places, key + kRunKeys, block, tiles + 1);
      if (tiles == first_tile) barrier_wait(queries_full, runs & 1);
      if (key + kRunKeys > block.end) clear_values(block.end - key);
      const bool first = sight.touches(0, key), second = sight.touches(1, key);
      if (first && second) {
        see_both(state, factors, sight, key);
      } else if (first) {
        see<0>(state, factors, sight, key);
      } else {
        see<1>(state, factors, sight, key);
      }
    }
    ++runs;
    leave(state, sight, run, o);
  }

 private:
  __device__ static uint32_t parity(int tile) { return tile / kStages & 1; }
  __device__ uint32_t keys_full(int tile) const { return full + tile % kStages * 16; }
  __device__ uint32_t values_full(int tile) const { return keys_full(tile) + 8; }
  __device__ uint32_t keys_of(int tile) const { return stages + tile % kStages * 2 * kTileBytes; }
  __device__ uint32_t values_of(int tile) const { return keys_of(tile) + kTileBytes; }

  __device__ __forceinline__ void ask_for_queries(const Run &run, int query_head) const {
    if (lane_index() == 0) barrier_expect(queries_full, kParts * kQueryPart);
    __syncwarp();
    const int part = lane_index();
    if (part < kParts) {
      copy_box(queries + part * kQueryPart, &maps.queries, query_head * kParts + part, run.first, queries_full);
    }
  }
  // A tile of keys and of values, 16 rows of a part a lane.
  __device__ __forceinline__ void ask(const PagedHead &head, RunPlaces &places, int key, const Bounds &bounds,
                                      int tile) const {
    constexpr int kCopies = kRunPlaces * kParts;
    int taken[kRunPlaces], own = 0;
    places.take(taken, head, key, bounds, missing);
    const int lane = lane_index(), i = lane % kRunPlaces, part = lane / kRunPlaces % kParts;
#pragma unroll
    for (int j = 0; j < kRunPlaces; ++j) own = i == j ? taken[j] : own;
    if (lane == 0) {
      barrier_expect(keys_full(tile), kTileBytes);
      barrier_expect(values_full(tile), kTileBytes);
    }
    __syncwarp();
    const int x = head.index * kParts + part, y = own >= 0 ? own * kTileKeys : kOutside;
    const uint32_t to = part * kKeyPart + i * kTileKeys * kSwizzledRow;
    if (lane < kCopies) {
      copy_box(keys_of(tile) + to, &maps.keys, x, y, keys_full(tile));
    } else if (lane < 2 * kCopies) {
      copy_box(values_of(tile) + to, &maps.values, x, y, values_full(tile));
    }
  }

  // Zeros for the values from row `end` of the tile on, up to those that lie outside: they may hold anything.
  __device__ __forceinline__ void clear_values(int end) const {
    if (end % kTileKeys == 0) return;
    barrier_wait(values_full(tiles), parity(tiles));
    const int rows = kTileKeys - end % kTileKeys;
    for (int i = static_cast<int>(threadIdx.x); i < rows * kParts * 8; i += kAttentionThreads) {
      const int part = i / (rows * 8), row = end + i / 8 % rows;
      unsigned char *const values = shared + (values_of(tiles) - queries) + part * kKeyPart;
      *reinterpret_cast<uint4 *>(values + row * kSwizzledRow + i % 8 * 16) = uint4{};
    }
    stores_before_products();
    __syncthreads();
  }

  using Logits = float[kRunKeys / 8][4];
  using Weights = uint32_t[kRunKeys / 16][4];
  using Sums = float[DIM / 8][4];

  __device__ __forceinline__ void multiply_keys(Logits &logits, int half) const {
    const uint64_t rows = tile_descriptor(queries + half * kHalf * kSwizzledRow), columns = tile_descriptor(keys_of(tiles));
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      const int part = step / 4, within = step % 4 * 2;
      multiply_first(logits, rows + part * (kQueryPart >> 4) + within, columns + part * (kKeyPart >> 4) + within, step > 0);
    }
    products_commit();
  }
  __device__ __forceinline__ void multiply_values(Sums &sums, const Weights &weights) const {
    const uint64_t rows = transposed_descriptor(values_of(tiles), kKeyPart);
#pragma unroll
    for (int step = 0; step < kRunKeys / 16; ++step) {
      multiply_transposed(sums, weights[step], rows + step * (16 * kSwizzledRow >> 4));
    }
    products_commit();
  }
  template <int half>
  __device__ __forceinline__ void weigh(Weights &weights, Logits &logits, State &state, const LogitFactors &factors,
                                        const Sight &sight, int key) const {
    if (!sight.covers(half, key)) mask(logits, sight, half, key);
    softmax_step(logits, state.sums[half], state.base[half], state.total[half], factors.logit);
#pragma unroll
    for (int step = 0; step < kRunKeys / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&from)[4] = logits[2 * step + i / 2];
        weights[step][i] = pack_bf16(from[i % 2 * 2], from[i % 2 * 2 + 1]);
      }
    }
  }
  __device__ __forceinline__ static void mask(Logits &logits, const Sight &sight, int half, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row_of(half, i), begin = sight.begin(row) - key, end = sight.end(row) - key;
#pragma unroll
      for (int nt = 0; nt < kRunKeys / 8; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = nt * 8 + lane_index() % 4 * 2 + j;
          if (at < begin || at >= end) logits[nt][2 * i + j] = -INFINITY;
        }
      }
    }
  }

  // One tile of keys and values, for both halves and for one.
  __device__ __forceinline__ void see_both(State &state, const LogitFactors &factors, const Sight &sight, int key) const {
    Logits first, second;
    Weights weights, more;
    barrier_wait(keys_full(tiles), parity(tiles));
    products_begin();
    multiply_keys(first, 0);
    multiply_keys(second, 1);
    products_wait_but<1>();
    weigh<0>(weights, first, state, factors, sight, key);
    barrier_wait(values_full(tiles), parity(tiles));
    products_begin();
    multiply_values(state.sums[0], weights);
    products_wait_but<1>();
    weigh<1>(more, second, state, factors, sight, key);
    products_begin();
    multiply_values(state.sums[1], more);
    products_wait();
  }
  template <int half>
  __device__ __forceinline__ void see(State &state, const LogitFactors &factors, const Sight &sight, int key) const {
    Logits logits;
    Weights weights;
    barrier_wait(keys_full(tiles), parity(tiles));
    products_begin();
    multiply_keys(logits, half);
    products_wait();
    weigh<half>(weights, logits, state, factors, sight, key);
    barrier_wait(values_full(tiles), parity(tiles));
    products_begin();
    multiply_values(state.sums[half], weights);
    products_wait();
  }

  // The means go to where the queries were, each warp's to its own rows, and from there to o.
  __device__ __forceinline__ void leave(const State &state, const Sight &sight, const Run &run,
                                        const HeadRows<bf16> &o) const {
    float factor[2][2], all[2][2];
    state.means(factor, all);
    __syncthreads();  // the queries were used; `missing` is known
    const bool spoilt = missing->begin < missing->end;
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row_of(half, i);
        const bool blind = spoilt && sight.begin(row) < missing->end && sight.end(row) > missing->begin;
        const float f = blind ? not_a_number() : factor[half][i];
#pragma unroll
        for (int nt = 0; nt < DIM / 8; ++nt) {
          unsigned char *const to = shared + nt / 8 * kQueryPart + swizzled(row, nt % 8) + lane % 4 * 4;
          const float(&from)[4] = state.sums[half][nt];
          *reinterpret_cast<uint32_t *>(to) = pack_bf16(from[2 * i] * f, from[2 * i + 1] * f);
        }
      }
    }
    __syncwarp();
    constexpr int kUnits = DIM / 8;
#pragma unroll 4
    for (int i = lane; i < 2 * 16 * kUnits; i += 32) {
      const int own = i / kUnits, unit = i % kUnits;
      const int row = own / 16 * kHalf + static_cast<int>(threadIdx.x) / 32 * 16 + own % 16;
      if (row >= run.count) continue;
      const unsigned char *const from = shared + unit / 8 * kQueryPart + swizzled(row, unit % 8);
      *reinterpret_cast<uint4 *>(o.row(run.first + row) + unit * 8) = *reinterpret_cast<const uint4 *>(from);
    }
    stores_before_products();  // and before the copies of the next run's queries
  }
#else
  __device__ PromptTiles(const Maps &, const HeadRows<const bf16> &, unsigned char *) {}
  __device__ void make(const PagedProblem &, const LogitFactors &, const Run &, int, const PagedHead &,
                       const HeadRows<bf16> &) {}
#endif
};

}  // namespace sg::cuda
