// to[rows, columns] = from[rows, columns] in another dtype.
//
// Floor: the bytes of both, read and written once. A thread moves four packs of eight elements, all loads before the
// first store; dense operands are one long row, so that a weight with narrow rows moves as fast. Rows that cannot be
// packed are moved by single elements.
#include "convert_rows.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;

// Block x takes kThreads * kInFlight packs of a row; blocks y share the rows.
template <int N, class From, class To>
__global__ void __launch_bounds__(kThreads)
    convert_kernel(const From *from, int64_t rows, int64_t packs, int64_t stride, To *to) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads * kInFlight) + threadIdx.x;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const From *source = from + row * stride;
    To *target = to + row * packs * N;
    float values[kInFlight][N];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < packs) load<N>(source + (first + i * kThreads) * N, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kThreads < packs) store<N>(target + (first + i * kThreads) * N, values[i]);
    }
  }
}

template <int N, class From, class To>
void launch(const From *from, int64_t rows, int64_t columns, int64_t stride, To *to, cudaStream_t stream) {
  const int64_t packs = columns / N, blocks = ceil_div(packs, kThreads * kInFlight);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(rows < 65535 ? rows : 65535));
  convert_kernel<N><<<grid, kThreads, 0, stream>>>(from, rows, packs, stride, to);
}

template <class From, class To>
void convert(const void *from_data, int64_t rows, int64_t columns, int64_t stride, void *to_data, cudaStream_t stream) {
  const auto *from = static_cast<const From *>(from_data);
  auto *to = static_cast<To *>(to_data);
  if (rows == 1 || stride == columns) columns *= rows, stride = columns, rows = 1;
  if (can_pack<8>(from, columns) && can_pack<8>(from, stride) && can_pack<8>(to, columns)) {
    launch<8>(from, rows, columns, stride, to, stream);
  } else {
    launch<1>(from, rows, columns, stride, to, stream);
  }
}

template <class From>
void convert_to(const void *from, int64_t rows, int64_t columns, int64_t stride, void *to, int32_t to_dtype,
                cudaStream_t stream) {
  const auto run = to_dtype == SG_F32 ? convert<From, float> : convert<From, bf16>;
  run(from, rows, columns, stride, to, stream);
}

}  // namespace

void convert_rows(const void *from, int32_t from_dtype, int64_t rows, int64_t columns, int64_t stride, void *to,
                  int32_t to_dtype, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const auto run = from_dtype == SG_F32    ? convert_to<float>
                   : from_dtype == SG_BF16 ? convert_to<bf16>
                                           : convert_to<f16>;
  run(from, rows, columns, stride, to, to_dtype, stream);
}

}  // namespace sg::cuda
