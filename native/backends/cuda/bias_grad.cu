// bias_grad: dbias[N] f32 += the column sums of dy[T, N].
//
// Floor: dy once. The rows are cut into chunks of kChunk; a block sums 256 columns of one chunk, eight warps taking
// every eighth row, and adds the warps' sums in order. A second kernel adds the chunks in order. The cuts depend on
// the shape alone, so the sum is the same in every run.
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32 * 8;  // of a block: eight a lane
constexpr int kChunk = 128;       // rows
constexpr int kRowsInFlight = 4;  // of a warp; with kWarps, a divisor of kChunk

template <bool packed, class T>
__global__ void __launch_bounds__(kThreads) sum_chunks(const T *dy, int64_t tokens, int64_t width, float *sums) {
  __shared__ float of_warp[kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + 8 * lane, left = width - column;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  float sum[8] = {};
  for (int first = warp; first < kChunk; first += kWarps * kRowsInFlight) {
    float rows[kRowsInFlight][8];
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
      const int64_t token = begin + first + j * kWarps;
      load_within<8, packed>(dy + token * width + column, token < tokens ? left : 0, rows[j]);
    }
#pragma unroll
    for (int j = 0; j < kRowsInFlight; ++j) {
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += rows[j][k];
    }
  }
  // Lanes side by side for each k, so that no two of them meet in a bank.
#pragma unroll
  for (int k = 0; k < 8; ++k) of_warp[warp][32 * k + lane] = sum[k];
  __syncthreads();
  const int64_t own = static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x;
  if (own >= width) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += of_warp[w][32 * (threadIdx.x % 8) + threadIdx.x / 8];
  sums[blockIdx.x * width + own] = total;
}

__global__ void __launch_bounds__(kThreads) add_chunks(const float *sums, int64_t chunks, int64_t width, float *dbias) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (column >= width) return;
  float total = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += sums[chunk * width + column];
  dbias[column] += total;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *dbias = output(call, 0);
  if (dy == nullptr || dbias == nullptr || dy->rank != 2 || dbias->rank != 1 || !all_dense(call)) return 0;
  if (!is_activation(dy) || dbias->dtype != SG_F32 || dbias->shape[0] != dy->shape[1]) return 0;
  return ceil_div(dy->shape[1], kColumns) <= 65535 ? 10 : 0;
}

size_t workspace(const sg_call *call) {
  const sg_tensor *dy = call->inputs[0];
  return static_cast<size_t>(ceil_div(dy->shape[0], kChunk) * dy->shape[1]) * sizeof(float);
}

int32_t run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0);
  const int64_t tokens = dy->shape[0], width = dy->shape[1], chunks = ceil_div(tokens, kChunk);
  if (tokens == 0 || width == 0) return SG_OK;
  float *sums = static_cast<float *>(call->workspace);
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(ceil_div(width, kColumns)));
  with_type(dy, [&]<class T>(T) {
    const T *from = data<const T>(dy);
    if (can_pack<8>(from, width)) {
      sum_chunks<true><<<grid, kThreads, 0, stream(call)>>>(from, tokens, width, sums);
    } else {
      sum_chunks<false><<<grid, kThreads, 0, stream(call)>>>(from, tokens, width, sums);
    }
  });
  const auto blocks = static_cast<unsigned>(ceil_div(width, kThreads));
  add_chunks<<<blocks, kThreads, 0, stream(call)>>>(sums, chunks, width, data<float>(output(call, 0)));
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("bias_grad", "cuda", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
