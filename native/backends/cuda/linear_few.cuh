// What products of a few tokens share, whatever format the weight has: the call as they read it, and the end of a
// block, which adds what its warps made, scales it, adds bias and addend, and stores it.
//
// Each block takes at most eight tokens. Calls of more are taken too, eight at a time, which reads the weight again for
// each: for those who ask that a token's bits do not depend on how many there are.
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

constexpr int kFewTokens = 8;  // of a block: the columns of mma.m16n8k16
constexpr int kFewWarps = 8, kFewThreads = 32 * kFewWarps;
constexpr int kFewStride = kFewTokens + 1;  // floats from row to row of a partial sum in shared memory

struct FewProblem {
  int tokens;
  int64_t n, k;
  int64_t x_stride, addend_stride, y_stride;  // elements from token to token
  float alpha;
  const void *bias;
  int32_t bias_dtype;
};

// A kernel whose results for a token have the same bits whatever other tokens there are.
constexpr sg_kernel row_invariant(sg_kernel kernel) {
  kernel.traits |= SG_TRAIT_ROW_INVARIANT;
  return kernel;
}

// The call without its weight; false where a kernel of this family cannot run it.
inline bool read_few(const sg_call *call, FewProblem *problem) {
  const sg_tensor *x = input(call, 0), *weight = input(call, 1), *bias = input(call, 2), *addend = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!x || !weight || !y || x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (x->dtype != SG_BF16 || !is_activation(y) || !has_dense_rows(x) || !has_dense_rows(y)) return false;
  const int64_t tokens = x->shape[0], n = weight->shape[0], k = weight->shape[1];
  if (k >= INT32_MAX - 4096 || ceil_div(tokens, kFewTokens) * ceil_div(n, 16) >= INT32_MAX) return false;
  if (x->shape[1] != k || y->shape[0] != tokens || y->shape[1] != n) return false;
  if (bias != nullptr) {
    if (bias->rank != 1 || bias->shape[0] != n || !is_dense(bias)) return false;
    if (!is_activation(bias) && bias->dtype != SG_F16) return false;
  }
  if (addend != nullptr) {
    if (addend->dtype != y->dtype || !same_shape(addend, y) || !has_dense_rows(addend)) return false;
  }
  *problem = {static_cast<int>(tokens),
              n,
              k,
              x->strides[0],
              addend != nullptr ? addend->strides[0] : 0,
              y->strides[0],
              static_cast<float>(attr_float(call, "alpha", 1.0)),
              bias != nullptr ? bias->data : nullptr,
              bias != nullptr ? bias->dtype : 0};
  return true;
}

__device__ inline float bias_at(const FewProblem &p, int64_t column) {
  if (p.bias_dtype == SG_BF16) return to_float(static_cast<const bf16 *>(p.bias)[column]);
  if (p.bias_dtype == SG_F16) return to_float(static_cast<const f16 *>(p.bias)[column]);
  return static_cast<const float *>(p.bias)[column];
}

// Scores: the fastest where one block takes all tokens, the last resort where not or where operands can't be packed.
inline int32_t few_score(int tokens, bool packs) { return tokens <= kFewTokens ? (packs ? 30 : 5) : 4; }

inline int64_t few_slices(int tokens) { return ceil_div(tokens, kFewTokens); }

// What a block takes: neighbouring blocks take the same rows of the weight.
struct FewSlice {
  int64_t tile;
  int first_token;

  __device__ explicit FewSlice(int tokens) {
    const unsigned slices = (static_cast<unsigned>(tokens) + kFewTokens - 1) / kFewTokens;
    tile = blockIdx.x / slices;
    first_token = static_cast<int>(blockIdx.x % slices) * kFewTokens;
  }
};

// Over all warps, in order.
template <int rows>
__device__ inline float sum_of_warps(const float (&partial)[kFewWarps][rows * kFewStride], int row, int token) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kFewWarps; ++warp) sum += partial[warp][row * kFewStride + token];
  return sum;
}

// Rows [first, first + rows) of the weight: their results are the sums over warps of
// partial[warp][row * kFewStride + token], token counted from `first_token`. Called by all threads, after a barrier.
template <int rows, class Y>
__device__ inline void finish_few(const FewProblem &p, int64_t first, int first_token,
                                  const float (&partial)[kFewWarps][rows * kFewStride], const Y *addend, Y *y) {
  static_assert(rows * kFewTokens <= kFewThreads);
  const int row = static_cast<int>(threadIdx.x) % rows, token = static_cast<int>(threadIdx.x) / rows;
  const int64_t column = first + row, place = first_token + token;
  if (token >= kFewTokens || place >= p.tokens || column >= p.n) return;
  float sum = p.alpha * sum_of_warps<rows>(partial, row, token);
  if (p.bias != nullptr) sum += bias_at(p, column);
  if (addend != nullptr) sum += to_float(addend[place * p.addend_stride + column]);
  y[place * p.y_stride + column] = from_float<Y>(sum);
}

}  // namespace sg::cuda
