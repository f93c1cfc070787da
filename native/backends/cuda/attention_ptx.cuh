// The instructions that the attention kernels are made of, available from sm_80 on: copies that run beside the
// arithmetic, loads of matrix fragments, and the product of fragments.
//
// A fragment is a matrix spread over the 32 lanes of a warp. With group = lane / 4 and pair = 2 * (lane % 4):
//   A (16 x 16)       a[0], a[1]: rows group and group + 8, columns pair and pair + 1; a[2], a[3]: 8 columns further
//   B (16 x 8)        b0: column group, rows pair and pair + 1; b1: 8 rows further
//   C (16 x 8, fp32)  c[0], c[1]: row group, columns pair and pair + 1; c[2], c[3]: row group + 8
// So two neighbouring C, rounded to bf16, are an A.
#pragma once

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda {

__device__ inline uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes from device memory to shared memory, past the first-level cache; zeros where `valid` is false (`from` may
// then point anywhere). Both sides are aligned to 16 bytes.
__device__ inline void copy_async_16(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(uint32_t to, const void *from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
// Waits for all copies that this thread began.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }
// Copies of this thread since the last call are a group; the other waits for all but the last `pending` groups.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int pending>
__device__ inline void wait_copies_but() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// Four 8 x 8 matrices of bf16. Lane 8 i + r names the address of row r of matrix i; every lane gets of each matrix row
// lane / 4, columns pair and pair + 1.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}
// The same of the transposed matrices: column lane / 4, rows pair and pair + 1.
__device__ inline void load_matrices_transposed(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row));
}

// A barrier for THREADS threads in whole warps, which name the same one of 1 to 15 (0 is the block's).
template <int BARRIER, int THREADS>
__device__ inline void sync_warps() {
  asm volatile("bar.sync %0, %1;\n" ::"n"(BARRIER), "n"(THREADS) : "memory");
}

// c += a * b
__device__ inline void multiply_fragments(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bf16 in one register, `low` at the lower address.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 2^x to 2 ulp; 0 for -infinity.
__device__ inline float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// The hyperbolic tangent to about 2e-7 absolute, which is what a capped logit needs.
__device__ inline float fast_tanh(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + fast_exp2(2.88539008177792681f * x));
}

}  // namespace sg::cuda
