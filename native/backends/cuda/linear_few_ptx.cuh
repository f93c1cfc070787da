// The instructions that products of a few tokens are made of besides those of attention_ptx.cuh: weights go past the
// first-level cache.
#pragma once

#include <cstdint>

#include "prefetch.cuh"

namespace sg::cuda {

// 16 bytes that are read once, at a multiple of 16. Not before wait_for_kernels_ahead().
__device__ inline uint4 load_streamed(const void *from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(__cvta_generic_to_global(from)));
  return word;
}

}  // namespace sg::cuda
