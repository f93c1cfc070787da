// dk and dv of 128 keys of a key-value head, and the gradients of all their logits, on compute capability 9.0:
//
//   p = exp2(scale log2e k q^T - lse)    dv += p do    dlogit = p (v do^T - delta)    dk += scale dlogit q
//
// over the queries that see the keys, of all heads of the group. Two warpgroups have 64 keys each. Keys are the rows of every
// product, so that what the first two give is, rounded, the left operand of the last two and stays in registers. A thread of a
// third warpgroup has the copy engine bring queries and do, steps ahead. While one warpgroup makes exponentials the products of
// the other are under way, and of its own those of a step before and a step ahead.
//
// Floor: 8 DIM FLOPs for each visible pair, at the rate of wgmma.
#pragma once

#include "attention_grad_tiles.cuh"

namespace sg::cuda::attention_tiles {

struct KeyMaps {
  CUtensorMap q, grad, k, v;
};

template <int DIM>
struct KeyTiles {
  static_assert(DIM == 64 || DIM == 128);
  static constexpr int kParts = DIM / 64;               // of 128 bytes, of a row
  static constexpr int kStep = kTile;                   // queries
  static constexpr int kStages = DIM == 64 ? 6 : 4;
  // Where registers allow: keys and values stay in them, and a step is left before its dk is done.
  static constexpr bool kHolds = DIM == 64, kLeavesLate = DIM == 64;
  static constexpr int kKeyPart = kBlockKeys * kSwizzledRow, kKeyBytes = kParts * kKeyPart;
  static constexpr int kStepPart = kStep * kSwizzledRow, kStepBytes = kParts * kStepPart;
  static constexpr int kStatBytes = kStep * static_cast<int>(sizeof(float));
  static constexpr int kBarriers = 1 + 3 * kStages;
  // Offsets in shared memory: keys, values, stages of queries and do, lse and delta of stages, what keys see, barriers.
  static constexpr int kValuesAt = kKeyBytes, kStagesAt = 2 * kKeyBytes;
  static constexpr int kStatsAt = kStagesAt + kStages * 2 * kStepBytes;
  static constexpr int kRangesAt = kStatsAt + kStages * 2 * kStatBytes;
  static constexpr int kBarriersAt = kRangesAt + kBlockKeys * static_cast<int>(sizeof(TokenRange));
  static constexpr int kBytes = kBarriersAt + kBarriers * 8;
  static_assert(kBytes <= 226 << 10);
};

constexpr int kKeyThreads = 3 * kWarpgroup;

#if SG_HOPPER

template <int DIM>
struct KeyBlock {
  using L = KeyTiles<DIM>;

  const AttentionShape &shape;
  const Between &between;
  unsigned char *shared;
  uint32_t base, keys_full;
  int kv_head, rank, first, end;  // tokens: of keys, and of the queries that see them, from `first` on

  __device__ KeyBlock(const AttentionShape &of, const Between &with, unsigned char *bytes, int kv_heads)
      : shape(of), between(with), shared(bytes), base(shared_address(bytes)), keys_full(base + L::kBarriersAt) {
    kv_head = static_cast<int>(blockIdx.x) % kv_heads;
    rank = static_cast<int>(blockIdx.x) / kv_heads;
  }
  __device__ uint32_t queries_full(int stage) const { return keys_full + 8 + stage * 24; }
  __device__ uint32_t grads_full(int stage) const { return queries_full(stage) + 8; }
  __device__ uint32_t empty(int stage) const { return queries_full(stage) + 16; }
  __device__ uint32_t queries_of_stage(int stage) const { return base + L::kStagesAt + stage * 2 * L::kStepBytes; }
  __device__ uint32_t grads_of_stage(int stage) const { return queries_of_stage(stage) + L::kStepBytes; }
  __device__ uint32_t stats_at(int stage) const { return L::kStatsAt + stage * 2 * L::kStatBytes; }
  __device__ TokenRange *ranges() const { return reinterpret_cast<TokenRange *>(shared + L::kRangesAt); }

  __device__ void open() {
    if (threadIdx.x == 0) {
      barrier_init(keys_full, 1);
      for (int i = 0; i < L::kStages; ++i) {
        barrier_init(queries_full(i), 1);
        barrier_init(grads_full(i), 1);
        barrier_init(empty(i), 2 * kWarpgroup / 32);
      }
      barriers_are_there();
    }
    wait_for_kernels_ahead();
    first = between.key_order[rank] * kBlockKeys;
    if (threadIdx.x < kBlockKeys) {
      ranges()[threadIdx.x] = queries_of(shape, min(first + static_cast<int>(threadIdx.x), shape.tokens - 1));
    }
    const int tile = first / kTile, last = min(tile + 1, between.tiles - 1);
    end = (last + between.first_place[last + 1] - between.first_place[last]) * kTile;
    __syncthreads();
  }

  // ---- by one thread: everything that the block reads
  __device__ void fill(const KeyMaps &maps) const {
    barrier_expect(keys_full, 2 * L::kKeyBytes);
    for (int part = 0; part < L::kParts; ++part) {
      copy_box(base + part * L::kKeyPart, &maps.k, kv_head * L::kParts + part, first, keys_full);
      copy_box(base + L::kValuesAt + part * L::kKeyPart, &maps.v, kv_head * L::kParts + part, first, keys_full);
    }
    Turn<L::kStages> turn;
    for (int i = 0; i < shape.group; ++i) {
      const int head = kv_head * shape.group + i;
      const float *stats = between.stats + 2 * (static_cast<int64_t>(head) * between.padded + first);
      for (int query = first; query < end; query += L::kStep, turn.next(), stats += 2 * L::kStep) {
        const uint32_t queries = queries_full(turn.stage), grads = grads_full(turn.stage);
        const uint32_t to = queries_of_stage(turn.stage);
        barrier_wait(empty(turn.stage), turn.parity ^ 1);
        barrier_expect(queries, L::kStepBytes + 2 * L::kStatBytes);
#pragma unroll
        for (int part = 0; part < L::kParts; ++part) {
          copy_box(to + part * L::kStepPart, &maps.q, head * L::kParts + part, query, queries);
        }
        copy_bytes(base + stats_at(turn.stage), stats, 2 * L::kStatBytes, queries);
        barrier_expect(grads, L::kStepBytes);
#pragma unroll
        for (int part = 0; part < L::kParts; ++part) {
          copy_box(to + L::kStepBytes + part * L::kStepPart, &maps.grad, head * L::kParts + part, query, grads);
        }
      }
    }
  }
};

// What a warpgroup has of its 64 keys.
template <int DIM>
struct KeyRows {
  using L = KeyTiles<DIM>;
  static constexpr uint32_t kPacks = kPlaceBytes / 16;
  using Logits = float[L::kStep / 8][4];
  using Packed = uint32_t[L::kStep / 16][4];
  using Sums = float[DIM / 8][4];

  const KeyBlock<DIM> &block;
  const int own;
  const Bounds bounds;
  Turn<L::kStages> turn;
  int query, before;  // the step that is made; the stage of the last one, if its dk is under way
  bool has_places;
  uint32_t keys[L::kHolds ? DIM / 16 : 1][4], values[L::kHolds ? DIM / 16 : 1][4];
  Sums key_sums = {}, value_sums = {};
  Logits weights;
  uint32_t gradients_at;  // where those of the head's first step go to, in 16 bytes

  __device__ __forceinline__ KeyRows(const KeyBlock<DIM> &of, int number)
      : block(of), own(number), bounds(bounds_of(of.ranges() + number * kTile, kTile)) {
    const int tile = block.first / kTile + own;
    has_places = tile < block.between.tiles && block.between.fits();
    barrier_wait(block.keys_full, 0);
    if constexpr (L::kHolds) {
      hold(keys, 0);
      hold(values, L::kValuesAt);
    }
  }

  // The products of a step: its slopes, while its weights are made of those of the last; its dv and the next step's weights,
  // while the gradients of its logits are; its dk.
  __device__ __forceinline__ void make_head(int head) {
    const int from = max(block.first, bounds.begin / L::kStep * L::kStep), to = min(block.end, bounds.end);
    const int tile = block.first / kTile + own;
    const int64_t row = static_cast<int64_t>(head) * block.between.places - own;
    const int place = has_places ? block.between.first_place[tile] : 0, lane = lane_index();
    gradients_at = static_cast<uint32_t>((row + place) * kPacks + warp_row() * 8 + lane % 4 * 8 + lane / 4);
    query = block.first;
    pass(min(from, block.end));
    if (query < to) {
      begin_weights();
      products_wait();
      before = -1;
#pragma unroll 1
      while (query + L::kStep < to) make_step<true>();
      make_step<false>();
      products_wait();
      leave_stage(before);
    }
    pass(block.end);
  }

  // Until all of the warpgroup's products are done.
  __device__ void sync() const {
    if (own == 0) {
      sync_warps<1, kWarpgroup>();
    } else {
      sync_warps<2, kWarpgroup>();
    }
  }
  // To where the keys or values were, which only this warpgroup read, when all of it has.
  __device__ __forceinline__ void leave_sums(const Sums &sums, int at, float scale, const HeadRows<bf16> &to) const {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TokenRange range = block.ranges()[own * kTile + warp_row() + 8 * i + lane_index() / 4];
      factor[i] = range.begin < range.end && block.between.fits() ? scale : not_a_number();
    }
    const int rows = own * kTile;
    store_sums<DIM>(block.shared + at + rows * kSwizzledRow, L::kKeyPart, sums, factor, to.head(block.kv_head),
                    block.first + rows, block.shape.tokens, [](int row) { return row; });
  }

 private:
  __device__ void leave_stage(int of) const {
    if (lane_index() == 0) barrier_arrive(block.empty(of));
  }
  // Steps that see none of the keys. What left a stage before it was full would count as having left what was there before.
  __device__ void pass(int until) {
    for (; query < until; query += L::kStep, turn.next()) {
      barrier_wait(block.queries_full(turn.stage), turn.parity);
      barrier_wait(block.grads_full(turn.stage), turn.parity);
      leave_stage(turn.stage);
    }
  }
  __device__ static int warp_row() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16; }

  // The rows of 16 keys (or values) that the warp has, as left operands.
  __device__ __forceinline__ void hold(uint32_t (&held)[DIM / 16][4], int at) const {
    const int lane = lane_index(), row = own * kTile + warp_row() + lane % 16;
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      load_matrices(held[step], block.base + at + step / 4 * L::kKeyPart + swizzled(row, step % 4 * 2 + lane / 16));
    }
  }
  // sums = the warpgroup's keys (or values) times the rows of a stage, or sums += that.
  template <bool adds, class Held>
  __device__ __forceinline__ void multiply_own(Logits &sums, const Held &held, int at, uint32_t stage_rows) const {
    const uint64_t rows = tile_descriptor(block.base + at + own * kTile * kSwizzledRow);
    const uint64_t columns = tile_descriptor(stage_rows);
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
      const int part = step / 4, within = step % 4 * 2;
      const uint64_t right = columns + part * (L::kStepPart >> 4) + within;
      if constexpr (L::kHolds) {
        multiply_first(sums, held[step], right, adds || step > 0);
      } else {
        multiply_first(sums, rows + part * (L::kKeyPart >> 4) + within, right, adds || step > 0);
      }
    }
    products_commit();
  }
  __device__ __forceinline__ static void add(Sums &sums, const Packed &weights, uint32_t stage_rows) {
    const uint64_t rows = transposed_descriptor(stage_rows, L::kStepPart);
#pragma unroll
    for (int step = 0; step < L::kStep / 16; ++step) {
      multiply_transposed(sums, weights[step], rows + step * (16 * kSwizzledRow >> 4));
    }
    products_commit();
  }
  __device__ __forceinline__ static void pack(Packed &packed, const Logits &from) {
#pragma unroll
    for (int step = 0; step < L::kStep / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[step][i] = pack_bf16(from[2 * step + i / 2][i % 2 * 2], from[2 * step + i / 2][i % 2 * 2 + 1]);
      }
    }
  }

  __device__ __forceinline__ void begin_weights() {
    barrier_wait(block.queries_full(turn.stage), turn.parity);
    products_begin();
    multiply_own<false>(weights, keys, 0, block.queries_of_stage(turn.stage));
  }
  template <bool more>
  __device__ __forceinline__ void make_step() {
    const int now = turn.stage = uniform(turn.stage);
    const uint32_t stats = block.base + block.stats_at(now) + lane_index() % 4 * 16;
    Logits slopes;
    float2 shifts[L::kStep / 8];
#pragma unroll
    for (int nt = 0; nt < L::kStep / 8; ++nt) {
      const float4 of_two = load_four(stats + nt * 64);
#pragma unroll
      for (int i = 0; i < 4; ++i) slopes[nt][i] = i % 2 == 0 ? of_two.z : of_two.w;
      shifts[nt] = {of_two.x, of_two.y};
    }
    barrier_wait(block.grads_full(now), turn.parity);
    products_begin();
    multiply_own<true>(slopes, values, L::kValuesAt, block.grads_of_stage(now));
#pragma unroll
    for (int nt = 0; nt < L::kStep / 8; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[nt][i] = fast_exp2(fmaf(weights[nt][i], block.shape.logit_factor, i % 2 == 0 ? shifts[nt].x : shifts[nt].y));
      }
    }
    if (!bounds.cover(query, L::kStep)) hide();
    Packed packed, gradients;
    pack(packed, weights);
    turn.next();
    query += L::kStep;
    products_begin();
    add(value_sums, packed, block.grads_of_stage(now));
    if constexpr (more) begin_weights();
    products_wait_but<more ? 2 : 1>();
    if (L::kLeavesLate && before >= 0) leave_stage(before);
#pragma unroll
    for (int nt = 0; nt < L::kStep / 8; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pair = packed[nt / 2][nt % 2 * 2 + i / 2];
        slopes[nt][i] *= __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
      }
    }
    pack(gradients, slopes);
    products_begin();
    add(key_sums, gradients, block.queries_of_stage(now));
    leave_gradients(gradients, (query - L::kStep - block.first) / kTile);
    products_wait_but<L::kLeavesLate ? 1 : 0>();
    before = now;
    if (more && !L::kLeavesLate) leave_stage(before);
  }
  __device__ static float4 load_four(uint32_t at) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "r"(at));
    return four;
  }
  __device__ __forceinline__ void hide() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const TokenRange range = block.ranges()[own * kTile + warp_row() + 8 * i + lane_index() / 4];
#pragma unroll
      for (int nt = 0; nt < L::kStep / 8; ++nt) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = query + nt * 8 + lane_index() % 4 * 2 + j;
          if (at < range.begin || at >= range.end) weights[nt][2 * i + j] = 0.0f;
        }
      }
    }
  }
  // In the order of registers, so that a thread stores 16 bytes; see place_row.
  __device__ __forceinline__ void leave_gradients(const Packed &gradients, uint32_t place) const {
    if (!has_places) return;
    uint4 *const to = reinterpret_cast<uint4 *>(block.between.gradients) + (gradients_at + place * kPacks);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t(&first)[4] = gradients[2 * half], (&second)[4] = gradients[2 * half + 1];
        to[(i * 8 + half * 4) * 8] = make_uint4(first[i], first[2 + i], second[i], second[2 + i]);
      }
    }
  }
};

#endif  // SG_HOPPER

// Blocks: tiles of 128 keys by their order, those of the key-value heads side by side. The pointers and maps are of the first of
// these heads.
template <int DIM>
__global__ void __launch_bounds__(kKeyThreads, 1)
    key_gradients(const __grid_constant__ AttentionShape shape, const __grid_constant__ Between between,
                  const __grid_constant__ KeyMaps maps, const HeadRows<bf16> dk, const HeadRows<bf16> dv, int kv_heads) {
#if SG_HOPPER
  extern __shared__ __align__(1024) unsigned char shared[];
  KeyBlock<DIM> block(shape, between, shared, kv_heads);
  block.open();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<24>();
    if (threadIdx.x == 2 * kWarpgroup) block.fill(maps);
  } else {
    take_registers<240>();
    KeyRows<DIM> rows(block, uniform(static_cast<int>(threadIdx.x) / kWarpgroup));
#pragma unroll 1
    for (int i = 0; i < shape.group; ++i) rows.make_head(block.kv_head * shape.group + i);
    rows.sync();
    rows.leave_sums(rows.key_sums, 0, shape.scale, dk);
    rows.leave_sums(rows.value_sums, KeyTiles<DIM>::kValuesAt, 1.0f, dv);
  }
#endif
}

}  // namespace sg::cuda::attention_tiles
