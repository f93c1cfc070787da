// sample(logits[R, V], sampling[R, 8], draw[R, 8], row_places[R], mask, bias; last_ids[B], counts[B, V]) -> sampled[R].
// surogate_core/ops/sample.py says what a row may ask for, and in which order.
//
// Floor: the logits once, which a greedy row comes near: a row is cut into pieces for (1), as many blocks as it takes
// to fill the device, and what follows ends at once. A row that is drawn is read again from L2: (2) sums its weights
// piece by piece and, where it is truncated, how much lies above a few levels; (3), one block a row, takes what lies
// above the highest level that holds all that is kept into shared memory, in order of ids, finds the thresholds of
// top_k, top_p and min_p by dividing the range of the logits' bits in four until one value is left, and draws.
//
// Weights are integers, multiples of 2^-40 of the largest, so that sums are exact in any order and the same bits are
// drawn in every run. Only the choice of a level looks at rounded sums; it is checked.
#include "sample_draw.cuh"

namespace sg::cuda {
namespace {

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
