// bias_grad: dbias[N] f32 += the column sums of dy[T, N].
//
// Floor: dy once. column_sums.cuh has the cuts and the order of the sum; a thread has 128 to 256 bytes of dy in flight,
// and the first of them are asked for before the kernel ahead has ended.
#include "column_sums.cuh"
#include "prefetch.cuh"

namespace sg::cuda {
namespace {

// Adds kRows of a thread's rows, all of their loads in flight at once where `whole` says that every row is there.
template <int kRows, bool whole, int V, class T>
__device__ inline void add_rows(const T *dy, const ColumnTask &task, int64_t first, float (&sums)[kSumEach]) {
  ColumnPacks<T, V> rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t token = first + r * kSumGroups;
    rows[r].load(dy + token * task.columns, task, whole || token < task.end);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kSumEach; ++k) sums[k] += rows[r].at(k);
  }
}

template <int V, bool clustered, class T>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    sum_rows(const T *dy, int64_t tokens, int64_t width, float *partials, float *dbias) {
  constexpr int kRows = V == 1 ? 4 : 32 / static_cast<int>(sizeof(T));
  const ColumnTask task(tokens, width);
  const int64_t left = task.end - task.begin, stride = width * static_cast<int64_t>(sizeof(T));
  const int first_rows = left < kRows * kSumGroups ? static_cast<int>(left) : kRows * kSumGroups;
  bring_rows<kSumThreads, kSumColumns * sizeof(T)>(dy + task.begin * width + task.base, stride, first_rows,
                                                   stride - task.base * static_cast<int64_t>(sizeof(T)));
  if (threadIdx.x < kSumColumns && task.base + threadIdx.x < width) bring_closer(dbias + task.base + threadIdx.x);
  wait_for_kernels_ahead();
  float sums[kSumEach] = {};
  int64_t row = task.begin + task.group;
  for (; row + (kRows - 1) * kSumGroups < task.end; row += kRows * kSumGroups) {
    add_rows<kRows, true, V>(dy, task, row, sums);
  }
  for (; row < task.end; row += 4 * kSumGroups) add_rows<4, false, V>(dy, task, row, sums);
  finish_column_sums<V, clustered>(task, sums, partials, dbias);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *dbias = output(call, 0);
  if (dy == nullptr || dbias == nullptr || dy->rank != 2 || dbias->rank != 1 || !all_dense(call)) return 0;
  return is_activation(dy) && dbias->dtype == SG_F32 && dbias->shape[0] == dy->shape[1] ? 10 : 0;
}

size_t workspace(const sg_call *call) { return column_sums_workspace(call->inputs[0]->shape[1]); }

int32_t run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0);
  const int64_t tokens = dy->shape[0], width = dy->shape[1];
  if (tokens == 0 || width == 0) return SG_OK;
  with_type(dy, [&]<class T>(T) {
    constexpr int V = 16 / static_cast<int>(sizeof(T));
    const T *from = data<const T>(dy);
    float *dbias = data<float>(output(call, 0));
    if (can_pack<V>(from, width)) {
      launch_column_sums(call, width, sum_rows<V, true, T>, sum_rows<V, false, T>, dbias, from, tokens, width);
    } else {
      launch_column_sums(call, width, sum_rows<1, true, T>, sum_rows<1, false, T>, dbias, from, tokens, width);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("bias_grad", "cuda", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda
