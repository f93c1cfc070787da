// tiled_gemm: D[m, n] = alpha * op(A)[m, k] op(B)[k, n] + beta * C + bias in fp32, for every shape, stride and
// alignment.
//
// Floor: 2 m n k FLOPs on the fp32 units. A block of 256 threads makes 64 x 64 of D from steps of 16 along k that it
// keeps in shared memory, a thread 4 x 4 of it: 8 loads from shared memory for 16 multiplications. It runs what the
// library has no algorithm for (odd rows, fp32 to bf16, k = 0) and is the yardstick that the library's results are
// tested against; a problem that is hot in training never comes here.
#include "gemm_kernels.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

constexpr int kTile = 64;  // of D, both ways
constexpr int kStep = 16;  // along k
constexpr int kThreads = 256;
constexpr int kEach = 4;            // rows and columns of a thread
constexpr int kPadded = kTile + 4;  // spreads stores of neighbouring k over the banks, and keeps rows at 16 bytes

// Brings op(X)[first .. first + 64, k_first .. k_first + 16] into `to`, k first; zeros beyond the operand. Neighbouring
// threads read neighbouring elements of memory: along k where k is the stored row, along the tile where it is not.
template <class T>
__device__ void bring(float (&to)[kStep][kPadded], const T *x, int64_t stride, bool k_is_inner, int64_t first,
                      int64_t extent, int64_t k_first, int64_t k) {
#pragma unroll
  for (int i = 0; i < kTile * kStep / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int row = k_is_inner ? index / kStep : index % kTile;
    const int step = k_is_inner ? index % kStep : index / kTile;
    const int64_t at_row = first + row, at_k = k_first + step;
    float value = 0.0f;
    if (at_row < extent && at_k < k) value = to_float(x[k_is_inner ? at_row * stride + at_k : at_k * stride + at_row]);
    to[step][row] = value;
  }
}

struct TiledProduct {
  int64_t m, n, k, lda, ldb, ldc, ldd;
  float alpha, beta;
  bool transpose_a, transpose_b, add_c;
};

template <class AB, class D>
__global__ void __launch_bounds__(kThreads)
    tiled_kernel(TiledProduct p, const AB *a, const AB *b, const D *c, D *d, const D *bias) {
  __shared__ __align__(16) float left[kStep][kPadded];
  __shared__ __align__(16) float right[kStep][kPadded];
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kTile, column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int my_row = threadIdx.x / (kTile / kEach) * kEach, my_column = threadIdx.x % (kTile / kEach) * kEach;
  float sum[kEach][kEach] = {};
  for (int64_t k = 0; k < p.k; k += kStep) {
    bring(left, a, p.lda, !p.transpose_a, row, p.m, k, p.k);
    bring(right, b, p.ldb, p.transpose_b, column, p.n, k, p.k);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kStep; ++step) {
      float x[kEach], y[kEach];
      load<kEach>(&left[step][my_row], x);
      load<kEach>(&right[step][my_column], y);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
#pragma unroll
        for (int j = 0; j < kEach; ++j) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t at_row = row + my_row + i, at_column = column + my_column + j;
      if (at_row >= p.m || at_column >= p.n) continue;
      float value = p.alpha * sum[i][j];
      if (p.add_c) value += p.beta * to_float(c[at_row * p.ldc + at_column]);
      if (bias != nullptr) value += to_float(bias[at_column]);
      d[at_row * p.ldd + at_column] = from_float<D>(value);
    }
  }
}

template <class AB, class D>
void launch_tiled(const GemmProblem &q, float alpha, const void *a, const void *b, float beta, const void *c, void *d,
                  const void *bias, cudaStream_t stream) {
  const TiledProduct p{q.m, q.n, q.k, q.lda, q.ldb, q.ldc, q.ldd, alpha, beta, q.transpose_a, q.transpose_b, q.add_c};
  const dim3 grid(static_cast<unsigned>(ceil_div(q.n, kTile)), static_cast<unsigned>(ceil_div(q.m, kTile)));
  tiled_kernel<AB, D><<<grid, kThreads, 0, stream>>>(p, static_cast<const AB *>(a), static_cast<const AB *>(b),
                                                     static_cast<const D *>(c), static_cast<D *>(d),
                                                     q.has_bias ? static_cast<const D *>(bias) : nullptr);
}

// The sum of four bytes of a hashed index: bell-shaped, mean 510, variance 4 * (256^2 - 1) / 12.
template <class T>
__global__ void fill_kernel(T *data, int64_t count, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    uint32_t word = (static_cast<uint32_t>(i) ^ seed) * 0x9e3779b1u;
    word ^= word >> 15;
    word *= 0x85ebca77u;
    word ^= word >> 13;
    word *= 0xc2b2ae3du;
    word ^= word >> 16;
    const uint32_t sum = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
    data[i] = from_float<T>((static_cast<float>(sum) - 510.0f) * (1.0f / 147.8f));
  }
}

}  // namespace

void tiled_gemm(const GemmProblem &problem, float alpha, const void *a, const void *b, float beta, const void *c,
                void *d, const void *bias, cudaStream_t stream) {
  if (problem.ab_dtype == SG_F32) {
    const auto launch = problem.d_dtype == SG_F32 ? launch_tiled<float, float> : launch_tiled<float, bf16>;
    launch(problem, alpha, a, b, beta, c, d, bias, stream);
  } else {
    const auto launch = problem.d_dtype == SG_F32 ? launch_tiled<bf16, float> : launch_tiled<bf16, bf16>;
    launch(problem, alpha, a, b, beta, c, d, bias, stream);
  }
}

void fill_random(void *data, int32_t dtype, int64_t count, uint32_t seed, cudaStream_t stream) {
  if (count == 0) return;
  const int64_t most = static_cast<int64_t>(device().units) * 16, wanted = ceil_div(count, 256);
  const unsigned blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  if (dtype == SG_F32) {
    fill_kernel<<<blocks, 256, 0, stream>>>(static_cast<float *>(data), count, seed);
  } else {
    fill_kernel<<<blocks, 256, 0, stream>>>(static_cast<bf16 *>(data), count, seed);
  }
}

}  // namespace sg::cuda
