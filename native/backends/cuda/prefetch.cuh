// What a kernel asks for before its turn. All memory is read and written through the second-level cache, so bytes may
// be brought there ahead of a kernel that writes them: what is loaded later is what it wrote. So the microsecond that
// first loads take passes while the kernel ahead ends.
#pragma once

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda {

// Brings `bytes` (a multiple of 16, of an operand) at a multiple of 16 to the second-level cache. Lanes of a warp that
// call it take turns: for one of them, or a few.
__device__ inline void bring_closer(const void *from, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#endif
}

// The same of the 32 bytes around an address of an operand.
__device__ inline void bring_closer(const void *address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)) : "memory");
#endif
}

// The same of the first `bytes` of each of some rows, up to kRowBytes and `stride` bytes apart, by all kThreads of a
// block together.
template <int kThreads, int kRowBytes>
__device__ inline void bring_rows(const void *first, int64_t stride, int rows, int64_t bytes) {
  constexpr int kEach = 32, kAlong = (kRowBytes + kEach - 1) / kEach;
  for (int i = static_cast<int>(threadIdx.x); i < rows * kAlong; i += kThreads) {
    const int at = i % kAlong * kEach;
    if (at < bytes) bring_closer(static_cast<const char *>(first) + i / kAlong * stride + at);
  }
}

}  // namespace sg::cuda
