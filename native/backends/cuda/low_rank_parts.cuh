// Sums that blocks leave for a second kernel of low_rank_grad, and how it adds them.
//
// Parts lie as mma's results do: 16 x 8 tiles of 128 floats, four of each lane (see attention_ptx.cuh).
#pragma once

#include <algorithm>

#include "attention_ptx.cuh"
#include "low_rank_call.h"
#include "prefetch.cuh"
#include "vectors.cuh"

namespace sg::cuda::low_rank {

constexpr int kThreads = 256;
constexpr int64_t kCacheBytes = 32 << 20;  // a dy beyond this leaves the second-level cache to the parts

// What copy_async_16 does, with a say in how long the second-level cache keeps it.
__device__ inline void copy_async_by(uint64_t policy, uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;\n" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ inline uint64_t cache_policy(bool goes_first) {
  uint64_t policy;
  if (goes_first) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

__device__ inline void add(float4 &total, const float4 &part) {
  total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
}

// An output as sums of parts: `count` of them, each of which is `each` parts where no cluster has added them.
struct Sum {
  const float4 *first;
  void *to;                // dlow in bf16, or db in f32
  int64_t fours, stride;   // of a part, and from row to row of the output
  int count, each, tiles;  // tiles: side by side
  int rows, groups, first_block;
  bool is_low;
};
constexpr int kMostSums = 2 * kMostBranches;
constexpr int kMostGroups = 4;  // threads that share the parts of four sums, so that all reads are under way at once
constexpr int kBatch = 8;       // parts that a thread reads at once

// All outputs of a call, and how many blocks add them.
struct SumList {
  Sum sum[kMostSums];
  int sums = 0, blocks = 0;

  void add_low(const float *first, int64_t fours, int64_t count, const Branch &branch) {
    add(first, fours, count, 1, branch.dlow, true);
  }
  void add_weight(const float *first, int64_t fours, int64_t count, int64_t each, const Branch &branch) {
    add(first, fours, count, each, branch.db, false);
  }

 private:
  void add(const float *first, int64_t fours, int64_t count, int64_t each, const sg_tensor &to, bool is_low) {
    const int groups = count * each <= kBatch ? 1 : count * each <= 2 * kBatch ? 2 : kMostGroups;
    sum[sums++] = {reinterpret_cast<const float4 *>(first), to.data, fours, row_stride(to), static_cast<int>(count),
                   static_cast<int>(each), static_cast<int>(to.shape[1] / 8), static_cast<int>(to.shape[0]), groups, blocks,
                   is_low};
    blocks += static_cast<int>(ceil_div(fours, kThreads / groups));
  }
};

// Every groups-th of the parts of place `at`, from the group's own on.
__device__ inline float4 add_group(const Sum &parts, int64_t at, int group) {
  const float4 *from = parts.first + at;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int first = group; first < parts.count; first += parts.groups * kBatch) {
    float4 read[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = first + i * parts.groups;
      read[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (index < parts.count) read[i] = from[index * parts.each * parts.fours];
    }
#if __CUDA_ARCH__ < 900  // elsewhere each is 1
    for (int part = 1; part < parts.each; ++part) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * parts.groups;
        if (index < parts.count) add(read[i], from[(index * parts.each + part) * parts.fours]);
      }
    }
#endif
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add(sum, read[i]);
  }
  return sum;
}

// dlow = alpha times the sums of its parts, and db += alpha times the sums of its own.
static __global__ void __launch_bounds__(kThreads, 4) add_parts_kernel(const SumList list, float alpha) {
  __shared__ float4 shared[kThreads];
  int number = 0;
  while (number + 1 < list.sums && static_cast<int>(blockIdx.x) >= list.sum[number + 1].first_block) ++number;
  const Sum &parts = list.sum[number];
  const int width = kThreads / parts.groups, group = static_cast<int>(threadIdx.x) / width;
  const int mine = static_cast<int>(threadIdx.x) % width;
  const int64_t at = static_cast<int64_t>(static_cast<int>(blockIdx.x) - parts.first_block) * width + mine;
  const int lane = static_cast<int>(at % 32), tile = static_cast<int>(at / 32);
  const int row = tile / parts.tiles * 16 + lane / 4, column = tile % parts.tiles * 8 + 2 * (lane % 4);
  const bool finishes = group == 0 && at < parts.fours, has_one = row < parts.rows, has_two = row + 8 < parts.rows;
  const int64_t to = row * parts.stride + column;
  float2 *first = static_cast<float2 *>(parts.to) + to / 2, *second = first + 4 * parts.stride;
  const bool adds = finishes && !parts.is_low;
  if (adds && has_one) bring_closer(first);
  if (adds && has_two) bring_closer(second);
  wait_for_kernels_ahead();
  float2 before[2] = {};
  if (adds && has_one) before[0] = *first;
  if (adds && has_two) before[1] = *second;
  float4 sum = at < parts.fours ? add_group(parts, at, group) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (parts.groups > 1) {
    shared[threadIdx.x] = sum;
    __syncthreads();
  }
  if (!finishes) return;
  for (int i = 1; i < parts.groups; ++i) add(sum, shared[i * width + mine]);
  sum = make_float4(alpha * sum.x, alpha * sum.y, alpha * sum.z, alpha * sum.w);
  if (parts.is_low) {
    uint32_t *low = static_cast<uint32_t *>(parts.to) + to / 2;
    if (has_one) low[0] = pack_bf16(sum.x, sum.y);
    if (has_two) low[4 * parts.stride] = pack_bf16(sum.z, sum.w);
    return;
  }
  if (has_one) *first = make_float2(before[0].x + sum.x, before[0].y + sum.y);
  if (has_two) *second = make_float2(before[1].x + sum.z, before[1].y + sum.w);
}

inline void launch_add_parts(const sg_call *call, const SumList &list) {
  launch_ahead(call, static_cast<unsigned>(list.blocks), kThreads, 0, add_parts_kernel, list, alpha_of(call));
}

}  // namespace sg::cuda::low_rank
