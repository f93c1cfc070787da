// What the kernels of sample.cu ask of a row: how it is drawn, its logits, and how these become weights.
#pragma once

#include <cfloat>

#include "best.cuh"
#include "philox.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

enum { kMasked = 1, kBiased = 2, kPenalised = 4 };
constexpr int32_t kTimes = (1 << 30) - 1;  // bits of a count that say how often an id was generated
constexpr int kThreads = 256, kPiece = kThreads * 32;
constexpr int kLevels = 4;

struct Sampling {
  float temperature, top_p, min_p, presence, frequency, repetition, unused[2];
};
struct Draw {
  uint32_t seed[2], position, choice;
  int32_t top_k, flags, logprobs, target;
};
static_assert(sizeof(Sampling) == 32 && sizeof(Draw) == 32);

// Of a piece of a row that is drawn.
struct Sums {
  unsigned long long weight;
  int count_of[kLevels];  // of what is at least at the level; of truncated rows only, as the next
  float weight_of[kLevels];
};

struct Problem {
  const Sampling *sampling;
  const Draw *draw;
  const int32_t *row_places;
  const uint32_t *mask;  // null where absent, as the next two
  const float *bias;
  int32_t *counts, *sampled, *last_ids;
  int width, places, pieces, mask_words;
  bool direct;               // drawn rows without changes are read where they are
  const float *logits;       // [R, V], where direct
  float *adjusted;           // [R, stride]
  int64_t stride;            // a multiple of 8
  Best *found;               // [R, pieces]
  Sums *sums;                // [R, pieces]
};

// ---- what every kernel asks of a row

struct Row {
  Sampling sampling;
  Draw draw;
  int place;  // -1: the row is not sampled
  bool modified;

  __device__ Row(const Problem &p, int64_t row) : sampling(p.sampling[row]), draw(p.draw[row]) {
    const int flags = draw.flags, at = p.row_places[row];
    const bool lacks = (flags & kMasked && p.mask == nullptr) || (flags & kBiased && p.bias == nullptr) ||
                       (flags & kPenalised && p.counts == nullptr);
    place = at >= 0 && at < p.places && !lacks ? at : -1;
    modified = (flags & (kMasked | kBiased | kPenalised)) != 0;
  }
  __device__ bool is_greedy() const { return !(sampling.temperature > 0.0f); }
  __device__ bool limits_count(int width) const { return draw.top_k > 0 && draw.top_k < width; }
  __device__ bool limits_weight() const { return sampling.top_p < 1.0f; }
  __device__ bool is_truncated(int width) const {
    return limits_count(width) || limits_weight() || sampling.min_p > 0.0f;
  }
};

__device__ inline const float *drawn_row(const Problem &p, const Row &row, int64_t index) {
  return p.direct && !row.modified ? p.logits + index * p.width : p.adjusted + index * p.stride;
}

// NaN counts as -infinity, infinity as the largest number.
__device__ inline float clean(float x) { return fminf(fmaxf(x, -INFINITY), FLT_MAX); }

// Every warp finds it for itself, from what the pieces left.
__device__ inline Best row_best(const Problem &p, int64_t row) {
  Best best = no_best();
  for (int piece = lane_index(); piece < p.pieces; piece += 32) best = better(best, p.found[row * p.pieces + piece]);
  return warp_best(best);
}

// How a row's logits become weights and levels.
struct Scale {
  float most, factor, temperature;

  __device__ Scale(const Row &row, float most_)
      : most(most_), factor(fminf(fmaxf(1.0f / row.sampling.temperature, FLT_MIN), FLT_MAX) * 1.44269504088896341f),
        temperature(row.sampling.temperature) {
    factor = fminf(factor, FLT_MAX);
  }
  // e^((x - most) / temperature), which is at most 1.
  __device__ float share(float x) const {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"((x - most) * factor));
    return result;
  }
  static __device__ unsigned long long integer(float share) { return __float2ull_rz(share * 1099511627776.0f); }
  __device__ unsigned long long weight(float x) const { return integer(share(x)); }
  __device__ float level(int i) const {
    const float levels[kLevels] = {-2.0f, -5.0f, -9.0f, -14.0f};
    return fmaxf(most + levels[i] * temperature, -FLT_MAX);
  }
};

__device__ inline unsigned long long warp_sum(unsigned long long value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline Sums warp_sums(Sums sums) {
  sums.weight = warp_sum(sums.weight);
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    sums.count_of[l] = __reduce_add_sync(0xffffffffu, sums.count_of[l]);
    sums.weight_of[l] = sg::cuda::warp_sum(sums.weight_of[l]);
  }
  return sums;
}

}  // namespace
}  // namespace sg::cuda
