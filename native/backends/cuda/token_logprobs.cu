// token_logprobs(logits[R, V], sampled[R], draw[R, 8]) -> logprob[R], top_ids[R, 20], top_logprobs[R, 20].
//
// Floor: the logits of the rows that ask, once; a call in which none asks is two launches. A block takes a piece of a
// row and keeps it in registers: its largest logit, its sum of exponentials, and its likeliest tokens one after
// another, each the best of what is left. One block a row then does the same with what the pieces left.
#include <cfloat>

#include "best.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPerThread = 16, kPiece = kThreads * kPerThread;  // elements of a row in one block
constexpr int kJoined = 8;                                      // entries of the pieces' lists in one thread
constexpr int kMost = 20;
constexpr float kLeast = -9999.0f;
constexpr int kDraw = 8, kWanted = 6, kTarget = 7;  // columns of draw

struct Piece {
  float sum;  // of e^(x - best[0].value); 0 where all are -infinity
  Best best[kMost];
};

struct Problem {
  const int32_t *sampled, *draw;
  float *logprob, *top_logprobs;
  int32_t *top_ids;
  int width, pieces;
  Piece *found;  // [R, pieces]

  __device__ int wanted(int64_t row) const {
    const int asked = draw[row * kDraw + kWanted];
    return asked < kMost ? asked : kMost;
  }
};

// NaN counts as -infinity, infinity as the largest number.
__device__ inline float clean(float x) { return fminf(fmaxf(x, -INFINITY), FLT_MAX); }

// The best of a block; every thread gets it. `scratch` has two halves, which calls take in turn.
__device__ inline Best block_best(Best best, Best (&scratch)[2][kWarps], int turn) {
  best = warp_best(best);
  if (lane_index() == 0) scratch[turn % 2][threadIdx.x / 32] = best;
  __syncthreads();
  return warp_best(lane_index() < kWarps ? scratch[turn % 2][lane_index()] : no_best());
}

// The `wanted` best of a block's entries, in order: E a thread, of which entry k is at(k). Those that are none are
// no_best(), and come out last. Thread 0 writes them to `best`.
template <int E, class At>
__device__ inline void select(int wanted, At &&at, Best *best) {
  __shared__ Best scratch[2][kWarps];
  uint32_t taken = 0;
  auto best_left = [&] {
    Best mine = no_best();
#pragma unroll
    for (int k = 0; k < E; ++k) {
      if (!(taken >> k & 1)) mine = better(mine, at(k));
    }
    return mine;
  };
  Best mine = best_left();
  for (int i = 0; i < wanted; ++i) {
    const Best chosen = block_best(mine, scratch, i);
    if (threadIdx.x == 0) best[i] = chosen;
    if (mine.index != chosen.index || chosen.index == INT_MAX) continue;  // indices are distinct
#pragma unroll
    for (int k = 0; k < E; ++k) {
      if (at(k).index == chosen.index) taken |= 1u << k;
    }
    mine = best_left();
  }
}

template <int N, bool packed, class T>
__global__ void __launch_bounds__(kThreads) scan_pieces(Problem p, const T *logits) {
  wait_for_kernels_ahead();
  __shared__ float scratch[32];
  __shared__ Best list[kMost];
  const int64_t row = blockIdx.x / p.pieces;
  const int wanted = p.wanted(row);
  if (wanted < 0) return;
  constexpr int kPacks = kPerThread / N;
  const int begin = static_cast<int>(blockIdx.x % p.pieces) * kPiece + static_cast<int>(threadIdx.x) * N;
  float x[kPacks][N];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int column = begin + j * kThreads * N;
    load_within<N, packed>(logits + row * p.width + column, p.width - column, x[j]);
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) x[j][k] = clean(x[j][k]);
  }
  select<kPerThread>(wanted > 1 ? wanted : 1, [&](int entry) {
    const int column = begin + entry / N * kThreads * N + entry % N;
    return column < p.width ? Best{x[entry / N][entry % N], column} : no_best();
  }, list);
  __syncthreads();
  const float most = list[0].value;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (begin + j * kThreads * N + k < p.width) sum += expf(x[j][k] - most);
    }
  }
  sum = block_sum(sum, scratch);
  Piece &piece = p.found[blockIdx.x];
  if (threadIdx.x == 0) piece.sum = most == -INFINITY ? 0.0f : sum;
  if (threadIdx.x < wanted || threadIdx.x == 0) piece.best[threadIdx.x] = list[threadIdx.x];
}

template <class T>
__global__ void __launch_bounds__(kThreads) join_pieces(Problem p, const T *logits) {
  wait_for_kernels_ahead();
  __shared__ float scratch[32];
  __shared__ Best list[kMost];
  const int64_t row = blockIdx.x;
  const int wanted = p.wanted(row), listed = wanted > 1 ? wanted : 1, thread = static_cast<int>(threadIdx.x);
  int32_t *ids = p.top_ids + row * kMost;
  float *top = p.top_logprobs + row * kMost;
  if (wanted < 0) {
    if (thread < kMost) ids[thread] = -1, top[thread] = 0.0f;
    if (thread == 0) p.logprob[row] = 0.0f;
    return;
  }
  const Piece *pieces = p.found + row * p.pieces;
  Best entries[kJoined];
#pragma unroll
  for (int k = 0; k < kJoined; ++k) {
    const int entry = thread + k * kThreads;
    entries[k] = entry < p.pieces * listed ? pieces[entry / listed].best[entry % listed] : no_best();
  }
  select<kJoined>(listed, [&](int k) { return entries[k]; }, list);
  __syncthreads();
  const float most = list[0].value;
  float sum = 0.0f;
  for (int piece = thread; piece < p.pieces; piece += kThreads) {
    if (pieces[piece].sum > 0.0f) sum += pieces[piece].sum * expf(pieces[piece].best[0].value - most);
  }
  const float log_sum = logf(block_sum(sum, scratch));
  auto logprob = [&](float x) { return x == -INFINITY ? kLeast : fmaxf(x - most - log_sum, kLeast); };
  if (thread < kMost) {
    const bool is_one = thread < wanted && list[thread].index != INT_MAX;
    ids[thread] = is_one ? list[thread].index : -1;
    top[thread] = is_one ? logprob(list[thread].value) : 0.0f;
  }
  if (thread == 0) {
    const int32_t asked = p.draw[row * kDraw + kTarget], target = asked >= 0 ? asked : p.sampled[row];
    const bool known = target >= 0 && target < p.width;
    p.logprob[row] = known ? logprob(clean(to_float(logits[row * p.width + target]))) : kLeast;
  }
}

int64_t pieces_of(const sg_tensor *logits) { return ceil_div(logits->shape[1], kPiece); }

int32_t supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *sampled = input(call, 1), *draw = input(call, 2);
  const sg_tensor *logprob = output(call, 0), *ids = output(call, 1), *top = output(call, 2);
  if (!logits || !sampled || !draw || !logprob || !ids || !top || !all_dense(call)) return 0;
  if (logits->rank != 2 || !is_activation(logits) || logits->shape[1] < 1) return 0;
  // The lists of a row's pieces are joined in one block.
  if (logits->shape[1] > INT32_MAX || pieces_of(logits) * kMost > kJoined * kThreads) return 0;
  const int64_t rows = logits->shape[0];
  if (rows * pieces_of(logits) > INT32_MAX) return 0;
  if (sampled->dtype != SG_I32 || num_elements(sampled) != rows || draw->dtype != SG_I32) return 0;
  if (num_elements(draw) != rows * kDraw || logprob->dtype != SG_F32 || num_elements(logprob) != rows) return 0;
  if (ids->dtype != SG_I32 || top->dtype != SG_F32 || num_elements(ids) != rows * kMost) return 0;
  return same_shape(ids, top) ? 10 : 0;
}

size_t workspace(const sg_call *call) {
  const sg_tensor *logits = call->inputs[0];
  return static_cast<size_t>(logits->shape[0] * pieces_of(logits)) * sizeof(Piece);
}

int32_t run(const sg_call *call) {
  const sg_tensor *logits = input(call, 0);
  const auto rows = static_cast<unsigned>(logits->shape[0]);
  if (rows == 0) return SG_OK;
  const Problem p{data<const int32_t>(input(call, 1)),  data<const int32_t>(input(call, 2)),
                  data<float>(output(call, 0)),         data<float>(output(call, 2)),
                  data<int32_t>(output(call, 1)),       static_cast<int>(logits->shape[1]),
                  static_cast<int>(pieces_of(logits)),  static_cast<Piece *>(call->workspace)};
  with_type(logits, [&]<class T>(T) {
    constexpr int N = 16 / sizeof(T);
    const T *from = data<const T>(logits);
    auto scan = can_pack<N>(from, p.width) ? scan_pieces<N, true, T> : scan_pieces<N, false, T>;
    launch_ahead(call, rows * static_cast<unsigned>(p.pieces), kThreads, 0, scan, p, from);
    launch_ahead(call, rows, kThreads, 0, join_pieces<T>, p, from);
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("token_logprobs", "cuda", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
