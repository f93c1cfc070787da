// The largest of numbers with indices: of equal values the lowest index, whatever the order of comparisons.
#pragma once

#include <climits>

#include "kernel.cuh"

namespace sg::cuda {

struct Best {
  float value;
  int32_t index;
};
__device__ inline Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
__device__ inline Best warp_best(Best best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Best other{__shfl_xor_sync(0xffffffffu, best.value, offset),
                     __shfl_xor_sync(0xffffffffu, best.index, offset)};
    best = better(best, other);
  }
  return best;
}
__device__ inline Best no_best() { return {-INFINITY, INT_MAX}; }

}  // namespace sg::cuda
