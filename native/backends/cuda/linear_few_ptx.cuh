// The instructions that products of a few tokens are made of besides those of attention_ptx.cuh: weights go past the
// first-level cache, and their first bytes are asked for while the kernels ahead still run.
#pragma once

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda {

// 16 bytes that are read once, at a multiple of 16. Not before wait_for_kernels_ahead().
__device__ inline uint4 load_streamed(const void *from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(__cvta_generic_to_global(from)));
  return word;
}

// Brings `bytes` (a multiple of 16) at a multiple of 16 to the second-level cache. All memory is read and written
// through that cache, so this may go ahead of a kernel that writes these bytes: what is loaded later is what it wrote.
__device__ inline void bring_closer(const void *from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#endif
}

}  // namespace sg::cuda
