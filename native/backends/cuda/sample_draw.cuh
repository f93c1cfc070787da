// The last kernel of sample.cu, one block a row: candidates, thresholds, and the draw.
#pragma once

#include "sample.cuh"

namespace sg::cuda {
namespace {

constexpr int kDrawThreads = 1024, kPerThread = 4, kTile = kDrawThreads * kPerThread;
constexpr int kCandidates = kTile;  // that shared memory holds
constexpr int kDrawWarps = kDrawThreads / 32;

// What the block shares. Sums of warps are written to the two halves of `of_warp` in turn, so that one barrier a sum
// does.
struct Shared {
  unsigned long long of_warp[2][3][kDrawWarps];
  float candidates[kCandidates];
  int32_t ids[kCandidates];
  int32_t result;
};

// Logits to draw from: candidates, or a row or a piece of one, whose ids begin at first_id.
struct Source {
  const float *logits;
  const int32_t *ids;  // null: first_id and on
  int count, first_id;
};

// Unsigned integers in the order of floats.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float from_ordered(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// One block's work on one row.
struct Drawer {
  Shared &shared;
  const Scale &scale;
  int half = 0;

  // Sums over the block; every thread gets them.
  template <int N>
  __device__ void sum(unsigned long long (&values)[N]) {
    const int warp = threadIdx.x / 32, lane = lane_index();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = warp_sum(values[i]);
      if (lane == 0) shared.of_warp[half][i][warp] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = warp_sum(shared.of_warp[half][i][lane]);
    half ^= 1;
  }

  // The sum over the threads before this one; `total` is that over all.
  __device__ unsigned long long sum_before(unsigned long long value, unsigned long long *total) {
    const int warp = threadIdx.x / 32, lane = lane_index();
    const unsigned long long upto = scan(value);
    if (lane == 31) shared.of_warp[half][0][warp] = upto;
    __syncthreads();
    const unsigned long long warps_upto = scan(shared.of_warp[half][0][lane]);
    half ^= 1;
    *total = __shfl_sync(0xffffffffu, warps_upto, 31);
    const unsigned long long before_warp = __shfl_sync(0xffffffffu, warps_upto, warp > 0 ? warp - 1 : 0);
    return (warp > 0 ? before_warp : 0) + upto - value;
  }
  static __device__ unsigned long long scan(unsigned long long value) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int from = lane_index() - offset;
      const unsigned long long below = __shfl_sync(0xffffffffu, value, from >= 0 ? from : 0);
      if (from >= 0) value += below;
    }
    return value;
  }

  template <bool counts>
  __device__ unsigned long long measure(float x) const {
    return counts ? 1 : scale.weight(x);
  }

  // The sum over what is at least `least`.
  __device__ unsigned long long weight_from(const Source &source, float least) {
    unsigned long long total[1] = {0};
    for (int i = threadIdx.x; i < source.count; i += kDrawThreads) {
      const float x = clean(source.logits[i]);
      if (x >= least) total[0] += scale.weight(x);
    }
    sum(total);
    return total[0];
  }

  // The largest t >= least for which the sum over what is at least t is `wanted` or more; `least` where none is.
  template <bool counts>
  __device__ float threshold(const Source &source, float least, unsigned long long wanted) {
    uint32_t low = ordered(least), high = ordered(scale.most);
    while (low < high) {
      const uint32_t step = (high - low) / 4 + ((high - low) % 4 != 0), first = low + step;
      const uint32_t second = high - first < step ? high : first + step;
      const uint32_t third = high - second < step ? high : second + step;
      unsigned long long sums[3] = {0, 0, 0};
      for (int i = threadIdx.x; i < source.count; i += kDrawThreads) {
        const float x = clean(source.logits[i]);
        const uint32_t key = ordered(x);
        if (key < first) continue;
        const unsigned long long value = measure<counts>(x);
        sums[0] += value;
        if (key >= second) sums[1] += value;
        if (key >= third) sums[2] += value;
      }
      sum(sums);
      if (sums[2] >= wanted) {
        low = third;
      } else if (sums[1] >= wanted) {
        low = second, high = third - 1;
      } else if (sums[0] >= wanted) {
        low = first, high = second - 1;
      } else {
        high = first - 1;
      }
    }
    return from_ordered(low);
  }

  // Takes what is at least at the cut into shared memory, in order of ids; returns how many there are, which may be
  // more than it has room for.
  __device__ int collect(const Source &row, float cut) {
    int held = 0;
    for (int begin = 0; begin < row.count; begin += kTile) {
      const int first = begin + static_cast<int>(threadIdx.x) * kPerThread;
      float x[kPerThread];
      unsigned long long here = 0, total;
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) x[k] = -INFINITY;
      if (first + kPerThread <= row.count) {
        load<kPerThread>(row.logits + first, x);
      } else {
        for (int k = 0; k < kPerThread; ++k) {
          if (first + k < row.count) x[k] = row.logits[first + k];
        }
      }
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        x[k] = clean(x[k]);
        here += x[k] >= cut;
      }
      int at = held + static_cast<int>(sum_before(here, &total));
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        if (!(x[k] >= cut)) continue;
        if (at < kCandidates) shared.candidates[at] = x[k], shared.ids[at] = first + k;
        ++at;
      }
      held += static_cast<int>(total);
    }
    __syncthreads();
    return held;
  }

  // The first id at which the sum over what is at least `least` exceeds `target`, which is below the sum of all.
  // Thread 0 gets it.
  __device__ int32_t pick(const Source &source, float least, unsigned long long target) {
    unsigned long long before_tile = 0;
    for (int begin = 0; begin < source.count; begin += kTile) {
      const int first = begin + static_cast<int>(threadIdx.x) * kPerThread;
      unsigned long long weights[kPerThread], here = 0, total;
#pragma unroll
      for (int k = 0; k < kPerThread; ++k) {
        const float x = first + k < source.count ? clean(source.logits[first + k]) : -INFINITY;
        weights[k] = x >= least ? scale.weight(x) : 0;
        here += weights[k];
      }
      unsigned long long sum = before_tile + sum_before(here, &total);
      if (sum <= target && target < sum + here) {
        int chosen = 0;
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
          if (sum <= target) chosen = k;
          sum += weights[k];
        }
        shared.result = source.ids != nullptr ? source.ids[first + chosen] : source.first_id + first + chosen;
      }
      before_tile += total;
      if (before_tile > target) break;
    }
    __syncthreads();
    return shared.result;
  }
};

__device__ inline unsigned long long target_of(const Draw &draw, unsigned long long total) {
  uint32_t words[4];
  philox({draw.position, draw.choice, 0, 1}, draw.seed[0], draw.seed[1], words);
  return __umul64hi(static_cast<unsigned long long>(words[0]) << 32 | words[1], total);
}

// Those of all pieces; every warp finds them for itself.
__device__ inline Sums sums_of_row(const Problem &p, const Sums *sums) {
  Sums all{};
  for (int piece = lane_index(); piece < p.pieces; piece += 32) {
    all.weight += sums[piece].weight;
    for (int l = 0; l < kLevels; ++l) {
      all.count_of[l] += sums[piece].count_of[l];
      all.weight_of[l] += sums[piece].weight_of[l];
    }
  }
  return warp_sums(all);
}

// Of a row that is not truncated: the piece first, by the sums that are there.
__device__ int32_t draw_whole(const Problem &p, const Row &row, const float *logits, const Sums *sums, Drawer &drawer) {
  unsigned long long target = target_of(row.draw, sums_of_row(p, sums).weight), before = 0;
  int piece = 0;
  for (int first = 0; first < p.pieces; first += 32) {
    const unsigned long long weight = first + lane_index() < p.pieces ? sums[first + lane_index()].weight : 0;
    const unsigned long long upto = before + Drawer::scan(weight);
    const unsigned beyond = __ballot_sync(0xffffffffu, target < upto);
    if (beyond != 0) {
      const int lane = __ffs(static_cast<int>(beyond)) - 1;
      piece = first + lane;
      target -= __shfl_sync(0xffffffffu, upto - weight, lane);
      break;
    }
    before = __shfl_sync(0xffffffffu, upto, 31);
  }
  const int begin = piece * kPiece, left = p.width - begin;
  return drawer.pick({logits + begin, nullptr, left < kPiece ? left : kPiece, begin}, -INFINITY, target);
}

__device__ inline unsigned long long share_of(float top_p, unsigned long long weight) {
  return static_cast<unsigned long long>(static_cast<double>(fmaxf(top_p, 0.0f)) * static_cast<double>(weight));
}

// What candidates have at least. `wanted`: what top_p leaves of the row's weight.
__device__ float first_cut(const Problem &p, const Row &row, const Sums &all, const Scale &scale, float min_p_least,
                           unsigned long long wanted) {
  if (!row.limits_count(p.width) && !row.limits_weight()) return fmaxf(min_p_least, -FLT_MAX);
  const float enough = static_cast<float>(wanted) * (1.0001f / 1099511627776.0f);
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    const bool suffices = row.limits_count(p.width) ? all.count_of[l] >= row.draw.top_k : all.weight_of[l] >= enough;
    if (suffices) return scale.level(l);
  }
  return -FLT_MAX;
}

__device__ int32_t draw_truncated(const Problem &p, const Row &row, const float *logits, const Sums *sums,
                                  Drawer &drawer) {
  const Scale &scale = drawer.scale;
  const bool limits_count = row.limits_count(p.width), limits_weight = row.limits_weight();
  const bool limits_min = row.sampling.min_p > 0.0f;
  const float min_p_least =
      limits_min ? scale.most + scale.temperature * logf(fminf(row.sampling.min_p, 1.0f)) : -INFINITY;
  const Sums all = sums_of_row(p, sums);
  unsigned long long wanted = share_of(row.sampling.top_p, all.weight);  // where top_p acts on the whole row
  float cut = first_cut(p, row, all, scale, min_p_least, wanted);
  const Source whole{logits, nullptr, p.width, 0};
  const int held = drawer.collect(whole, cut);
  Source source{drawer.shared.candidates, drawer.shared.ids, held, 0};
  const bool lacks = limits_weight && !limits_count && held <= kCandidates && drawer.weight_from(source, cut) < wanted;
  if (held > kCandidates || lacks) {
    source = whole;
    cut = lacks ? -FLT_MAX : cut;
  }
  float least = cut;
  if (limits_count) least = drawer.threshold<true>(source, least, row.draw.top_k);
  if (limits_weight) {
    if (limits_count) wanted = share_of(row.sampling.top_p, drawer.weight_from(source, least));
    least = drawer.threshold<false>(source, least, wanted > 0 ? wanted : 1);
  }
  if (limits_min) least = fmaxf(least, min_p_least);
  return drawer.pick(source, least, target_of(row.draw, drawer.weight_from(source, least)));
}

__global__ void __launch_bounds__(kDrawThreads) draw_rows(Problem p) {
  wait_for_kernels_ahead();
  __shared__ Shared shared;
  const int64_t index = blockIdx.x;
  const Row row(p, index);
  int32_t id = -1;
  if (row.place >= 0) {
    const Best best = row_best(p, index);
    if (best.value != -INFINITY) {
      id = best.index;
      if (!row.is_greedy()) {
        const Scale scale(row, best.value);
        Drawer drawer{shared, scale};
        const float *logits = drawn_row(p, row, index);
        const Sums *sums = p.sums + index * p.pieces;
        id = row.is_truncated(p.width) ? draw_truncated(p, row, logits, sums, drawer)
                                       : draw_whole(p, row, logits, sums, drawer);
      }
    }
  }
  if (threadIdx.x != 0) return;
  p.sampled[index] = id;
  if (row.place < 0) return;
  p.last_ids[row.place] = id;
  if (id >= 0 && row.draw.flags & kPenalised) ++p.counts[static_cast<int64_t>(row.place) * p.width + id];
}

}  // namespace
}  // namespace sg::cuda
