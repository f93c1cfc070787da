// Blocks that send one another what they have added up, into shared memory, on devices that have such clusters (9.0 on).
//
// A barrier of the cluster that publishes what was stored is a fence too, and waits until all that a thread ever stored is in
// the second-level cache: most of a microsecond at the end of a kernel. A block that is sent to waits for the bytes alone,
// and is there until they have come.
#pragma once

#include "vectors.cuh"

namespace sg::cuda {

inline bool has_clusters() { return device().architecture >= 90; }
constexpr int kMostCluster = 8;  // blocks, on all of these devices

// A block's count of the bytes that came, in its shared memory.
using Inbox = uint64_t;

__device__ inline uint32_t inbox_address(const void *own) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(own));
}

// By one thread: this block can be sent to. It says once how many bytes there will be; some may have come by then.
__device__ inline void open_inbox(Inbox *inbox) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                   inbox_address(inbox))
               : "memory");
#endif
}
__device__ inline void expect_bytes(Inbox *inbox, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(inbox_address(inbox)), "r"(bytes)
               : "memory");
#endif
}
__device__ inline void open_inbox(Inbox *inbox, uint32_t bytes) {
  open_inbox(inbox);
  expect_bytes(inbox, bytes);
}

// Every thread of every block calls the first when its inbox is open and its block reads no more of what others will put
// there, and the second before it sends: until all of the cluster are as far. Nothing that was stored is published.
__device__ inline void ready_for_sends() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void wait_until_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Puts a value where block `rank` of the cluster has in its shared memory what this one has at `own`.
__device__ inline void send(float value, const float *own, const Inbox *inbox, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 to, count;\n\tmapa.shared::cluster.u32 to, %1, %3;\n\tmapa.shared::cluster.u32 count, %2, %3;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], %0, [count];\n\t}" ::"f"(value),
      "r"(inbox_address(own)), "r"(inbox_address(inbox)), "r"(rank)
      : "memory");
#endif
}
__device__ inline void send(const float2 &value, const float2 *own, const Inbox *inbox, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 to, count;\n\tmapa.shared::cluster.u32 to, %2, %4;\n\tmapa.shared::cluster.u32 count, %3, %4;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%0, %1}, [count];\n\t}" ::"f"(value.x),
      "f"(value.y), "r"(inbox_address(own)), "r"(inbox_address(inbox)), "r"(rank)
      : "memory");
#endif
}
__device__ inline void send(const float4 &value, const float4 *own, const Inbox *inbox, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .b32 to, count;\n\tmapa.shared::cluster.u32 to, %4, %6;\n\tmapa.shared::cluster.u32 count, %5, %6;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%0, %1, %2, %3}, [count];\n\t}" ::"f"(value.x),
      "f"(value.y), "f"(value.z), "f"(value.w), "r"(inbox_address(own)), "r"(inbox_address(inbox)), "r"(rank)
      : "memory");
#endif
}

// Until all bytes have come. Every block must: it would be gone before they do.
__device__ inline void wait_for_inbox(const Inbox *inbox) {
#if __CUDA_ARCH__ >= 900
  uint32_t came = 0;
  while (came == 0) {
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(came)
        : "r"(inbox_address(inbox))
        : "memory");
  }
#endif
}

// launch_ahead with `cluster` blocks along the grid's second axis, of which they are a divisor, as one cluster each: no
// more than kMostCluster.
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
