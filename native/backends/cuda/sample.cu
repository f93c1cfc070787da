// sample(logits[R, V], sampling[R, 8], draw[R, 8], row_places[R], mask, bias; last_ids[B], counts[B, V]) -> sampled[R].
// surogate_core/ops/sample.py says what a row may ask for, and in which order.
//
// Floor: the logits once, which a greedy row comes near: a row is cut into pieces for (1), as many blocks as it takes to
// fill the device, and what follows ends at once. A row that is drawn is read again from L2: (2) sums its weights piece by
// piece and, where it is truncated, how much lies above a few levels; (3), one block a row, takes what lies above the
// highest level that holds all that is kept into shared memory, in order of ids, finds the thresholds of top_k, top_p and
// min_p by dividing the range of the logits' bits in four until one value is left, and draws.
//
// Weights are integers, multiples of 2^-40 of the largest, so that sums are exact in any order and the same bits are drawn
// in every run. Only the choice of a level looks at rounded sums; it is checked.
#include <cfloat>

#include "best.cuh"
#include "philox.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

enum { kMasked = 1, kBiased = 2, kPenalised = 4 };
constexpr int32_t kTimes = (1 << 30) - 1;  // bits of a count that say how often an id was generated
constexpr int kThreads = 256, kPiece = kThreads * 32;
constexpr int kDrawThreads = 1024, kPerThread = 4, kTile = kDrawThreads * kPerThread;
constexpr int kCandidates = kTile;  // that shared memory holds
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

// ---- (1)

template <int N, bool packed, class T>
__device__ inline void read_within(const T *from, int64_t left, T (&to)[N]) {
  Pack<T, N> pack{};
  if constexpr (packed) {
    if (left > 0) pack = load_pack<N>(from);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < left) pack.at[k] = from[k];
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = pack.at[k];
}

// N logits of a row from `column` on, a multiple of N, after penalties, bias and mask.
template <int N, bool packed>
__device__ inline void adjust(const Problem &p, const Row &row, int64_t index, int column, float (&x)[N]) {
  const int left = p.width - column;
  if (row.draw.flags & kPenalised) {
    int32_t counts[N];
    read_within<N, packed>(p.counts + static_cast<int64_t>(row.place) * p.width + column, left, counts);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (counts[k] != 0) x[k] = x[k] > 0.0f ? x[k] / row.sampling.repetition : x[k] * row.sampling.repetition;
      const int times = counts[k] & kTimes;
      if (times > 0) x[k] = x[k] - row.sampling.presence - row.sampling.frequency * static_cast<float>(times);
    }
  }
  if (row.draw.flags & kBiased) {
    float bias[N];
    read_within<N, packed>(p.bias + static_cast<int64_t>(row.place) * p.width + column, left, bias);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] += bias[k];
  }
  if (row.draw.flags & kMasked && left > 0) {
    const uint32_t word = p.mask[index * p.mask_words + column / 32] >> column % 32;
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = word >> k & 1 ? x[k] : -INFINITY;
  }
}

template <int N, bool packed, class T>
__global__ void __launch_bounds__(kThreads) prepare_pieces(Problem p, const T *logits) {
  wait_for_kernels_ahead();
  __shared__ Best of_warp[kThreads / 32];
  const int64_t index = blockIdx.x / p.pieces;
  const Row row(p, index);
  if (row.place < 0) return;
  const bool copies = !row.is_greedy() && (row.modified || !p.direct);
  const int begin = static_cast<int>(blockIdx.x % p.pieces) * kPiece + static_cast<int>(threadIdx.x) * N;
  Best best = no_best();
#pragma unroll 4
  for (int i = 0; i < kPiece; i += kThreads * N) {
    const int column = begin + i, left = p.width - column;
    float x[N];
    load_within<N, packed>(logits + index * p.width + column, left, x);
    if (row.modified) adjust<N, packed>(p, row, index, column, x);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      x[k] = clean(x[k]);
      if (k < left) best = better(best, {x[k], column + k});
    }
    if (copies) store_upto<N, true>(p.adjusted + index * p.stride + column, left, x);
  }
  best = warp_best(best);
  if (lane_index() == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = warp_best(threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : no_best());
  if (threadIdx.x == 0) p.found[blockIdx.x] = best;
}

// ---- (2)

__global__ void __launch_bounds__(kThreads) weigh_pieces(Problem p) {
  wait_for_kernels_ahead();
  constexpr int kWarps = kThreads / 32, kPacks = kPiece / (kThreads * 4);
  __shared__ Sums of_warp[kWarps];
  const int64_t index = blockIdx.x / p.pieces;
  const Row row(p, index);
  if (row.place < 0 || row.is_greedy()) return;
  const Scale scale(row, row_best(p, index).value);
  if (scale.most == -INFINITY) return;
  const bool truncated = row.is_truncated(p.width);
  const int begin = static_cast<int>(blockIdx.x % p.pieces) * kPiece + static_cast<int>(threadIdx.x) * 4;
  const float *from = drawn_row(p, row, index) + begin;
  Pack<float, 4> packs[kPacks];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int left = p.width - begin - j * kThreads * 4;
#pragma unroll
    for (int k = 0; k < 4; ++k) packs[j].at[k] = -INFINITY;
    if (left >= 4) {
      packs[j] = load_pack<4>(from + j * kThreads * 4);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (k < left) packs[j].at[k] = from[j * kThreads * 4 + k];
      }
    }
  }
  Sums sums{};
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float x = clean(packs[j].at[k]), share = scale.share(x);
      sums.weight += Scale::integer(share);
      if (!truncated) continue;
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        if (x >= scale.level(l)) ++sums.count_of[l], sums.weight_of[l] += share;
      }
    }
  }
  sums = warp_sums(sums);
  if (lane_index() == 0) of_warp[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) {
    sums.weight += of_warp[warp].weight;
    for (int l = 0; l < kLevels; ++l) {
      sums.count_of[l] += of_warp[warp].count_of[l];
      sums.weight_of[l] += of_warp[warp].weight_of[l];
    }
  }
  p.sums[blockIdx.x] = sums;
}

// ---- (3)

constexpr int kDrawWarps = kDrawThreads / 32;

// What the block shares. Sums of warps are written to the two halves of `of_warp` in turn, so that one barrier a sum does.
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
      const unsigned long long below = __shfl_sync(0xffffffffu, value, lane_index() >= offset ? lane_index() - offset : 0);
      if (lane_index() >= offset) value += below;
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
      const uint32_t second = high - first < step ? high : first + step, third = high - second < step ? high : second + step;
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

  // Takes what is at least at the cut into shared memory, in order of ids; returns how many there are, which may be more
  // than it has room for.
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

  // The first id at which the sum over what is at least `least` exceeds `target`, which is below the sum of all. Thread 0
  // gets it.
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

__device__ int32_t draw_truncated(const Problem &p, const Row &row, const float *logits, const Sums *sums, Drawer &drawer) {
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

// ---- the call

int64_t pieces_of(const sg_tensor *logits) { return ceil_div(logits->shape[1], kPiece); }

bool is_matrix(const sg_tensor *t, int32_t dtype, int64_t rows, int64_t columns) {
  return t->dtype == dtype && t->rank == 2 && t->shape[0] == rows && t->shape[1] == columns;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *sampling = input(call, 1), *draw = input(call, 2), *at = input(call, 3);
  const sg_tensor *mask = input(call, 4), *bias = input(call, 5), *counts = output(call, 2);
  const sg_tensor *sampled = output(call, 0), *last_ids = output(call, 1);
  if (!logits || !sampling || !draw || !at || !sampled || !last_ids || !all_dense(call)) return 0;
  if (logits->rank != 2 || !is_activation(logits)) return 0;
  const int64_t rows = logits->shape[0], width = logits->shape[1];
  // So many weights of 2^40 fit 64 bits, and so many blocks a grid.
  if (width < 1 || width > (1 << 22) || rows * pieces_of(logits) > INT32_MAX) return 0;
  if (!is_matrix(sampling, SG_F32, rows, 8) || !is_matrix(draw, SG_I32, rows, 8)) return 0;
  if (at->dtype != SG_I32 || at->rank != 1 || at->shape[0] != rows || !same_shape(at, sampled)) return 0;
  if (sampled->dtype != SG_I32 || last_ids->dtype != SG_I32 || last_ids->rank != 1) return 0;
  const int64_t places = last_ids->shape[0];
  if (places > INT32_MAX) return 0;
  if (mask && !is_matrix(mask, SG_I32, rows, ceil_div(width, 32))) return 0;
  if (bias && !is_matrix(bias, SG_F32, places, width)) return 0;
  if (counts && !is_matrix(counts, SG_I32, places, width)) return 0;
  return 10;
}

struct Layout {
  int64_t stride;  // of adjusted rows, in elements
  size_t found, sums, adjusted, size;

  explicit Layout(const sg_tensor *logits) {
    const size_t rows = static_cast<size_t>(logits->shape[0]), of_row = static_cast<size_t>(pieces_of(logits));
    stride = ceil_div(logits->shape[1], 8) * 8;
    found = 0;
    sums = (rows * of_row * sizeof(Best) + 255) / 256 * 256;
    adjusted = sums + (rows * of_row * sizeof(Sums) + 255) / 256 * 256;
    size = adjusted + rows * static_cast<size_t>(stride) * sizeof(float);
  }
};
size_t workspace(const sg_call *call) { return Layout(call->inputs[0]).size; }

template <class T>
Problem describe(const sg_call *call) {
  const sg_tensor *logits = input(call, 0);
  const Layout layout(logits);
  char *memory = static_cast<char *>(call->workspace);
  Problem p{};
  p.sampling = data<const Sampling>(input(call, 1));
  p.draw = data<const Draw>(input(call, 2));
  p.row_places = data<const int32_t>(input(call, 3));
  p.mask = data<const uint32_t>(input(call, 4));
  p.bias = data<const float>(input(call, 5));
  p.sampled = data<int32_t>(output(call, 0));
  p.last_ids = data<int32_t>(output(call, 1));
  p.counts = data<int32_t>(output(call, 2));
  p.width = static_cast<int>(logits->shape[1]);
  p.places = static_cast<int>(output(call, 1)->shape[0]);
  p.pieces = static_cast<int>(pieces_of(logits));
  p.mask_words = static_cast<int>(ceil_div(p.width, 32));
  p.direct = std::is_same_v<T, float> && can_pack<4>(data<const T>(logits), p.width);
  p.logits = p.direct ? data<const float>(logits) : nullptr;
  p.found = reinterpret_cast<Best *>(memory + layout.found);
  p.sums = reinterpret_cast<Sums *>(memory + layout.sums);
  p.adjusted = reinterpret_cast<float *>(memory + layout.adjusted);
  p.stride = layout.stride;
  return p;
}

int32_t run(const sg_call *call) {
  const sg_tensor *logits = input(call, 0);
  const auto rows = static_cast<unsigned>(logits->shape[0]);
  if (rows == 0) return SG_OK;
  with_type(logits, [&]<class T>(T) {
    constexpr int N = 16 / sizeof(T);
    const Problem p = describe<T>(call);
    const T *from = data<const T>(logits);
    const unsigned blocks = rows * static_cast<unsigned>(p.pieces);
    const bool packed = can_pack<N>(from, p.width) && can_pack<4>(p.bias, p.width) && can_pack<4>(p.counts, p.width);
    auto prepare = packed ? prepare_pieces<N, true, T> : prepare_pieces<N, false, T>;
    launch_ahead(call, blocks, kThreads, 0, prepare, p, from);
    launch_ahead(call, blocks, kThreads, 0, weigh_pieces, p);
    launch_ahead(call, rows, kDrawThreads, 0, draw_rows, p);
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("sample", "cuda", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
