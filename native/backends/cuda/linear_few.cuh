// What products of a few tokens share, whatever format the weight has: the call as they read it, and the end of a
// block, which adds what its warps made, scales it, adds bias and addend, and stores it.
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

constexpr int kMostFewTokens = 8;  // the columns of one mma.m16n8k16
constexpr int kFewWarps = 16, kFewThreads = 32 * kFewWarps;
constexpr int kFewStride = kMostFewTokens + 1;  // floats from row to row of a partial sum in shared memory

struct FewProblem {
  int tokens;
  int64_t n, k;
  int64_t x_stride, addend_stride, y_stride;  // elements from token to token
  float alpha;
  const void *bias;
  int32_t bias_dtype;
};

// The call without its weight; false where a kernel of this family cannot run it.
inline bool read_few(const sg_call *call, FewProblem *problem) {
  const sg_tensor *x = input(call, 0), *weight = input(call, 1), *bias = input(call, 2), *addend = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!x || !weight || !y || x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (x->dtype != SG_BF16 || !is_activation(y) || !has_dense_rows(x) || !has_dense_rows(y)) return false;
  const int64_t tokens = x->shape[0], n = weight->shape[0], k = weight->shape[1];
  if (tokens > kMostFewTokens || k >= INT32_MAX - 4096) return false;
  if (x->shape[1] != k || y->shape[0] != tokens || y->shape[1] != n) return false;
  if (bias != nullptr) {
    if (bias->rank != 1 || bias->shape[0] != n || !is_dense(bias)) return false;
    if (!is_activation(bias) && bias->dtype != SG_F16) return false;
  }
  if (addend != nullptr) {
    if (addend->dtype != y->dtype || !same_shape(addend, y) || !has_dense_rows(addend)) return false;
  }
  if (problem != nullptr) {
    *problem = {static_cast<int>(tokens),
                n,
                k,
                x->strides[0],
                addend != nullptr ? addend->strides[0] : 0,
                y->strides[0],
                static_cast<float>(attr_float(call, "alpha", 1.0)),
                bias != nullptr ? bias->data : nullptr,
                bias != nullptr ? bias->dtype : 0};
  }
  return true;
}

__device__ inline float bias_at(const FewProblem &p, int64_t column) {
  if (p.bias_dtype == SG_BF16) return to_float(static_cast<const bf16 *>(p.bias)[column]);
  if (p.bias_dtype == SG_F16) return to_float(static_cast<const f16 *>(p.bias)[column]);
  return static_cast<const float *>(p.bias)[column];
}

// Rows [first, first + rows) of the weight: their results are the sums over warps, in order, of
// partial[warp][row * kFewStride + token]. Called by all threads, after a barrier.
template <int rows, class Y>
__device__ inline void finish_few(const FewProblem &p, int64_t first,
                                  const float (&partial)[kFewWarps][rows * kFewStride], const Y *addend, Y *y) {
  static_assert(rows * kMostFewTokens <= kFewThreads);
  const int row = static_cast<int>(threadIdx.x) % rows, token = static_cast<int>(threadIdx.x) / rows;
  const int64_t column = first + row;
  if (token >= p.tokens || column >= p.n) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kFewWarps; ++warp) sum += partial[warp][row * kFewStride + token];
  sum *= p.alpha;
  if (p.bias != nullptr) sum += bias_at(p, column);
  if (addend != nullptr) sum += to_float(addend[token * p.addend_stride + column]);
  y[token * p.y_stride + column] = from_float<Y>(sum);
}

}  // namespace sg::cuda
