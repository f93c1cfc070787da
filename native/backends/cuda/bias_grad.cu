// bias_grad: dbias[N] f32 += the column sums of dy[T, N].
//
// Floor: dy once. column_sums.cuh has the cuts and the order of the sum. A thread's rows come to places of its own in
// shared memory, which it fills again as soon as it has read them, so that 160 bytes of each thread stay under way from
// its first row to its last: loads into registers came in bursts, with a latency between one and the next. The first of
// them are asked for before the kernel ahead has ended.
#include "attention_ptx.cuh"
#include "column_sums.cuh"
#include "prefetch.cuh"

namespace sg::cuda {
namespace {

constexpr int kStages = 5, kStagePacks = 2;  // of 16 bytes

template <class T>
constexpr int kStageRows = kStagePacks * 16 / (kSumEach * static_cast<int>(sizeof(T)));

// The rows of a thread, as packs that lie at multiples of 16 bytes. Zeros stand for what is not there.
template <class T>
struct RowsOfThread {
  static constexpr int V = 16 / sizeof(T), kPacks = kSumEach / V, kRows = kStageRows<T>;
  static constexpr uint32_t kPackBytes = 16 * kSumThreads;  // from a pack of a thread to its next
  const T *from;
  int64_t stride;  // between rows of a thread, in elements
  int left;        // rows that have not been asked for
  bool inside[kPacks];

  __device__ RowsOfThread(const T *dy, const ColumnTask &task) : stride(kSumGroups * task.columns) {
    const int64_t row = task.begin + task.group, column = task.base + ColumnTask::offset<V>(task.lane, 0);
    from = dy + row * task.columns + column;
    left = row < task.end ? static_cast<int>((task.end - row + kSumGroups - 1) / kSumGroups) : 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) inside[p] = column + p * V * kSumLanes < task.columns;
  }
  __device__ void bring_stage(uint32_t to) {
    if (left > 0) {
#pragma unroll
      for (int i = 0; i < kStagePacks; ++i) {
        const int row = i / kPacks, pack = i % kPacks;
        copy_async_16(to + i * kPackBytes, from + row * stride + pack * V * kSumLanes, inside[pack] && row < left);
      }
    }
    commit_copies();
    from += kRows * stride, left -= kRows;
  }
};

template <class T>
__device__ inline void add_packs(const T *dy, const ColumnTask &task, float (&sums)[kSumEach]) {
  using Rows = RowsOfThread<T>;
  constexpr int V = Rows::V;
  constexpr uint32_t kStageBytes = kStagePacks * Rows::kPackBytes;
  __shared__ uint4 ring[kStages * kStagePacks][kSumThreads];
  Rows rows(dy, task);
  const int stages = (rows.left + Rows::kRows - 1) / Rows::kRows;
  const uint32_t first = shared_address(&ring[0][threadIdx.x]);
#pragma unroll
  for (int i = 0; i < kStages; ++i) rows.bring_stage(first + i * kStageBytes);
  int at = 0;
  for (int i = 0; i < stages; ++i) {
    wait_copies_but<kStages - 1>();
#pragma unroll
    for (int j = 0; j < kStagePacks; ++j) {
      Pack<T, V> pack;
      const uint4 bits = ring[at * kStagePacks + j][threadIdx.x];
      memcpy(&pack, &bits, sizeof(pack));
#pragma unroll
      for (int k = 0; k < V; ++k) sums[j % Rows::kPacks * V + k] += to_float(pack.at[k]);
    }
    rows.bring_stage(first + at * kStageBytes);
    at = at + 1 == kStages ? 0 : at + 1;
  }
}

// The same one by one.
template <class T>
__device__ inline void add_elements(const T *dy, const ColumnTask &task, float (&sums)[kSumEach]) {
  for (int64_t row = task.begin + task.group; row < task.end; row += kSumGroups) {
    T each[kSumEach];
#pragma unroll
    for (int k = 0; k < kSumEach; ++k) {
      const int64_t column = task.base + ColumnTask::offset<1>(task.lane, k);
      each[k] = column < task.columns ? dy[row * task.columns + column] : T{};
    }
#pragma unroll
    for (int k = 0; k < kSumEach; ++k) sums[k] += to_float(each[k]);
  }
}

template <int V, bool clustered, class T>
__global__ void __launch_bounds__(kSumThreads, kSumBlocks)
    sum_rows(const T *dy, int64_t tokens, int64_t width, float *partials, float *dbias) {
  __shared__ ColumnSums shared;
  const ColumnTask task(tokens, width);
  constexpr int kFirstRows = kStages * kStageRows<T> * kSumGroups;
  const int64_t left = task.end - task.begin, stride = width * static_cast<int64_t>(sizeof(T));
  bring_rows<kSumThreads, kSumColumns * sizeof(T)>(dy + task.begin * width + task.base, stride,
                                                   static_cast<int>(left < kFirstRows ? left : kFirstRows),
                                                   stride - task.base * static_cast<int64_t>(sizeof(T)));
  if (threadIdx.x < kSumColumns && task.base + threadIdx.x < width) bring_closer(dbias + task.base + threadIdx.x);
  if constexpr (clustered) begin_column_sums(shared);
  wait_for_kernels_ahead();
  OwnTotal own;
  if constexpr (clustered) own = OwnTotal::of<V>(task, dbias);
  float sums[kSumEach] = {};
  if constexpr (V > 1) {
    add_packs(dy, task, sums);
  } else {
    add_elements(dy, task, sums);
  }
  finish_column_sums<V, clustered>(task, sums, shared, own, partials);
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
