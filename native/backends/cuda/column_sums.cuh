// Sums over the rows of a matrix, added to a vector of f32, in an order that depends on the shape alone.
//
// The rows are cut into kSumChunks; a block sums kSumColumns columns of one chunk. Sixteen lanes side by side have
// eight columns each, and sixteen groups of lanes take every sixteenth row. The block adds its groups' sums in order:
// the two of a warp, then those of the warps. The blocks of all chunks form a cluster where the device has such: each
// adds up one of the lanes' columns, of which the others send it their sums, in the order of chunks. So one kernel does
// it all: a second one would take as long as a fifth of the bytes of a small matrix. Elsewhere the sums go through the
// workspace, and a second kernel adds them in the same order.
#pragma once

#include "cluster.cuh"
#include "rows.cuh"

namespace sg::cuda {

constexpr int kSumThreads = 256, kSumBlocks = 4;  // blocks on a multiprocessor, so that the next kernel's find room
constexpr int kSumLanes = 16, kSumGroups = kSumThreads / kSumLanes;
constexpr int kSumEach = 8;  // columns of a lane
constexpr int kSumColumns = kSumLanes * kSumEach;
constexpr int kSumChunks = 8;  // blocks of a cluster, each of which adds up one of the lanes' columns
static_assert(kSumChunks == kSumEach);

inline size_t column_sums_workspace(int64_t columns) {
  return static_cast<size_t>(kSumChunks * columns) * sizeof(float);
}

// What a block and a thread of it sum. Columns are moved V at a time: a lane's packs are kSumLanes packs apart.
struct ColumnTask {
  int64_t columns;     // of the matrix
  int64_t base;        // first column of the block
  int64_t begin, end;  // rows of the chunk
  int lane, group;

  __device__ ColumnTask(int64_t rows, int64_t num_columns) : columns(num_columns) {
    const int64_t each = (rows + kSumChunks - 1) / kSumChunks;
    base = static_cast<int64_t>(blockIdx.x) * kSumColumns;
    begin = blockIdx.y * each;
    end = begin + each < rows ? begin + each : rows;
    lane = static_cast<int>(threadIdx.x) % kSumLanes;
    group = static_cast<int>(threadIdx.x) / kSumLanes;
  }
  // Column k of a lane, from `base` on.
  template <int V>
  __device__ static int offset(int of_lane, int k) {
    return (k / V * kSumLanes + of_lane) * V + k % V;
  }
};

// What a block shares.
struct ColumnSums {
  float of_warp[kSumThreads / 32][kSumColumns];
  float came[kSumChunks][kSumLanes];  // from each block of the cluster, of the columns that this one adds up
  Inbox inbox;
};

// All threads of a block of a cluster call it first.
__device__ inline void begin_column_sums(ColumnSums &shared) {
  if (threadIdx.x == 0) open_inbox(&shared.inbox, sizeof(shared.came));
  ready_for_sends();
}

// The two groups of a warp add their sums: lane l of the first half gets columns 0 to 3, of the second 4 to 7. In a row
// of of_warp column k of lane l is at place 32 (k % 4) + 16 (k / 4) + l: lanes meet in no bank.
static_assert(kSumEach == 8 && kSumLanes == 16);
__device__ inline void leave_warp_sums(const float (&sums)[kSumEach], ColumnSums &shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool second = lane >= kSumLanes;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float other = __shfl_xor_sync(0xffffffffu, second ? sums[k] : sums[k + 4], kSumLanes);
    shared.of_warp[threadIdx.x / 32][32 * k + lane] = (second ? sums[k + 4] : sums[k]) + other;
  }
}

// The total that a thread of a cluster adds to, none of most threads. It is read before the rows are.
struct OwnTotal {
  float *at = nullptr;
  float before = 0.0f;

  template <int V>
  __device__ static OwnTotal of(const ColumnTask &task, float *totals) {
    const int64_t column = task.base + ColumnTask::offset<V>(task.lane, static_cast<int>(blockIdx.y));
    if (threadIdx.x >= kSumLanes || column >= task.columns) return {};
    return {totals + column, totals[column]};
  }
};

// All threads of the block call it, with their sums. `clustered`: totals += them; else partials[chunk] = them.
template <int V, bool clustered>
__device__ inline void finish_column_sums(const ColumnTask &task, const float (&sums)[kSumEach], ColumnSums &shared,
                                          const OwnTotal &own, float *partials) {
  const int chunk = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), lane = thread % kSumLanes;
  leave_warp_sums(sums, shared);
  if constexpr (clustered) wait_until_ready();
  __syncthreads();
  if (thread < kSumColumns) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kSumThreads / 32; ++warp) sum += shared.of_warp[warp][thread];
    const int k = thread / 32 + thread % 32 / kSumLanes * 4;
    const int64_t column = task.base + ColumnTask::offset<V>(lane, k);
    if (clustered) {
      send(sum, &shared.came[chunk][lane], &shared.inbox, k);
    } else if (column < task.columns) {
      partials[chunk * task.columns + column] = sum;
    }
  }
  if (clustered && thread < kSumLanes) {
    wait_for_inbox(&shared.inbox);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kSumChunks; ++c) sum += shared.came[c][lane];
    if (own.at != nullptr) *own.at = own.before + sum;
  }
}

static __global__ void __launch_bounds__(kSumThreads)
    add_column_chunks(const float *partials, int64_t columns, float *totals) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (column >= columns) return;
  float sum = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kSumChunks; ++chunk) sum += partials[chunk * columns + column];
  totals[column] += sum;
}

// Launches one of two instances of a kernel, `clustered` or not, which begins with wait_for_kernels_ahead() and whose
// last arguments are partials and totals.
template <class Kernel, class... Arguments>
void launch_column_sums(const sg_call *call, int64_t columns, Kernel clustered, Kernel apart, float *totals,
                        Arguments... arguments) {
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, kSumColumns)), kSumChunks);
  float *partials = static_cast<float *>(call->workspace);
  if (has_clusters()) {
    launch_clusters_ahead(call, grid, kSumChunks, kSumThreads, 0, clustered, arguments..., partials, totals);
    return;
  }
  apart<<<grid, kSumThreads, 0, stream(call)>>>(arguments..., partials, totals);
  const auto blocks = static_cast<unsigned>(ceil_div(columns, kSumThreads));
  add_column_chunks<<<blocks, kSumThreads, 0, stream(call)>>>(partials, columns, totals);
}

}  // namespace sg::cuda
