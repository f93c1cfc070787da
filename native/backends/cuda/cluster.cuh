// Blocks that read each other's shared memory, on devices that have such clusters (9.0 on).
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

inline bool has_clusters() { return device().architecture >= 90; }

// Until every block of the cluster is here and sees what the others wrote. Elsewhere: nothing.
__device__ inline void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// What block `rank` of the cluster has in its shared memory where this one has `own`.
__device__ inline float read_cluster(const float *own, int rank) {
  float value = __int_as_float(0x7fffffff);
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 address;\n\tmapa.shared::cluster.u32 address, %1, %2;\n\t"
      "ld.shared::cluster.f32 %0, [address];\n\t}"
      : "=f"(value)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
#endif
  return value;
}
__device__ inline float4 read_cluster(const float4 *own, int rank) {
  const float none = __int_as_float(0x7fffffff);
  float4 value = make_float4(none, none, none, none);
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 address;\n\tmapa.shared::cluster.u32 address, %4, %5;\n\t"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [address];\n\t}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
#endif
  return value;
}

// ---- Blocks that send each other what they have, with no barrier behind it: one that expects `bytes` counts them as
// they arrive.
//
// One thread calls expect_bytes, then all announce_block; await_blocks before the first send_to_block; await_bytes.
// A block lasts until it has what it expects, so its memory is there for those who send.
__device__ inline void expect_bytes(uint64_t *arrived, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(arrived));
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
      "fence.mbarrier_init.release.cluster;\n\t"
      "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at),
      "r"(bytes)
      : "memory");
#endif
}
__device__ inline void announce_block() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void await_blocks() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// To where block `rank` has what this one has at `own`, and counted there where this one has `arrived`.
__device__ inline void send_to_block(int rank, float4 *own, uint64_t *arrived, const float4 &value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 address, counter;\n\tmapa.shared::cluster.u32 address, %0, %2;\n\t"
      "mapa.shared::cluster.u32 counter, %1, %2;\n\t"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [address], {%3, %4, %5, %6}, [counter];\n\t"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(arrived))), "r"(rank), "r"(__float_as_uint(value.x)),
      "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)), "r"(__float_as_uint(value.w))
      : "memory");
#endif
}
// Until all of them are here and seen.
__device__ inline void await_bytes(uint64_t *arrived) {
#if __CUDA_ARCH__ >= 900
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(arrived));
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], 0;\n\t"
        "selp.b32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(at)
        : "memory");
  }
#endif
}

// launch_ahead with `cluster` blocks along the grid's second axis, of which they are a divisor, as one cluster each.
template <class... Parameters, class... Arguments>
inline void launch_clusters_ahead(const sg_call *call, dim3 blocks, unsigned cluster, dim3 threads, size_t shared_bytes,
                                  void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {launch_ahead_attribute(), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.z = 1;
  attributes[1].val.clusterDim.y = cluster;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream(call);
  config.attrs = attributes;
  config.numAttrs = 2;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace sg::cuda
