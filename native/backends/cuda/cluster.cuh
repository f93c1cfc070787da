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
