// The instructions that paged_attention has besides those of attention_ptx.cuh.
#pragma once

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda {

// 16 bytes of a cache, which one warp reads once, at a multiple of 16. Not before wait_for_kernels_ahead(), but for what
// nothing writes.
__device__ inline uint4 load_cached(const void *from) {
  uint4 word;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(__cvta_generic_to_global(from)));
  return word;
}

// An 8 x 8 matrix of bf16, of which a lane holds row lane / 4, columns 2 (lane % 4) and the next, transposed.
__device__ inline uint32_t transpose_matrix(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// A barrier for two warps, which name the same one of 1 to 15 (0 is the block's).
__device__ inline void sync_pair(int barrier) { asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory"); }

}  // namespace sg::cuda
