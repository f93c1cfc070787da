// Sums over the rows of a matrix, added to a vector of f32, in an order that depends on the shape alone.
//
// The rows are cut into kSumChunks; a block sums kSumColumns columns of one chunk. Sixteen lanes side by side have
// eight columns each, and sixteen groups of lanes take every sixteenth row. The block adds its groups' sums in order.
// The blocks of all chunks form a cluster where the device has such: they read each other's sums from shared memory and
// add them in order, so that one kernel does it all: a second one would take as long as a fifth of the bytes of a small
// matrix. Elsewhere the sums go through the workspace, and a second kernel adds them in the same order.
#pragma once

#include "cluster.cuh"
#include "rows.cuh"

namespace sg::cuda {

constexpr int kSumThreads = 256, kSumBlocks = 2;  // blocks on a multiprocessor: what leaves a thread 128 registers
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

// A thread's columns of one row; zeros where the row is not there, and behind the last column.
template <class T, int V>
struct ColumnPacks {
  Pack<T, V> packs[kSumEach / V];

  __device__ void load(const T *row, const ColumnTask &task, bool there) {
#pragma unroll
    for (int p = 0; p < kSumEach / V; ++p) {
      const int64_t column = task.base + ColumnTask::offset<V>(task.lane, p * V);
      packs[p] = Pack<T, V>{};
      if (there && column < task.columns) packs[p] = load_pack<V>(row + column);
    }
  }
  __device__ float at(int k) const { return to_float(packs[k / V].at[k % V]); }
};

// All threads of the block call it, with their sums. `clustered`: totals += them; else partials[chunk] = them.
template <int V, bool clustered>
__device__ inline void finish_column_sums(const ColumnTask &task, const float (&sums)[kSumEach], float *partials,
                                          float *totals) {
  // Sums are kept by k and lane. A row's end is padded, so that the two groups of a warp meet in no bank.
  __shared__ float of_group[kSumGroups][kSumColumns + kSumLanes];
  __shared__ float of_block[kSumColumns];
  const int chunk = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const int64_t own = task.base + ColumnTask::offset<V>(thread % kSumLanes, chunk);  // of the cluster, by this thread
  const bool owns = clustered && thread < kSumLanes && own < task.columns;
  const float before = owns ? totals[own] : 0.0f;
#pragma unroll
  for (int k = 0; k < kSumEach; ++k) of_group[task.group][k * kSumLanes + task.lane] = sums[k];
  __syncthreads();
  if (thread < kSumColumns) {
    float sum = 0.0f;
#pragma unroll
    for (int g = 0; g < kSumGroups; ++g) sum += of_group[g][thread];
    const int64_t column = task.base + ColumnTask::offset<V>(thread % kSumLanes, thread / kSumLanes);
    if (clustered) {
      of_block[thread] = sum;
    } else if (column < task.columns) {
      partials[chunk * task.columns + column] = sum;
    }
  }
  if constexpr (clustered) {
    cluster_barrier();
    float sum = 0.0f;
    if (owns) {
#pragma unroll
      for (int c = 0; c < kSumChunks; ++c) sum += read_cluster(of_block + chunk * kSumLanes + thread, c);
      totals[own] = before + sum;
    }
    cluster_barrier();  // shared memory lasts until nobody reads it
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
