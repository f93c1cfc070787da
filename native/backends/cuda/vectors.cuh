// N elements of a row at a time: as packs where addresses allow it (`packed`), one by one where they don't and at a
// row's end. `left` is how many elements the row still has; none are touched beyond it, and it may be zero or
// negative.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

template <int N, bool packed, class T>
__device__ inline void load_upto(const T *from, int64_t left, float (&to)[N]) {
  if (packed && left >= N) {
    load<N>(from, to);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = i < left ? to_float(from[i]) : 0.0f;
}

template <int N, bool packed, class T>
__device__ inline void store_upto(T *to, int64_t left, const float (&from)[N]) {
  if (packed && left >= N) {
    store<N>(to, from);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < left) to[i] = from_float<T>(from[i]);
  }
}

// The same for rows whose length is a multiple of N where `packed`: all of a pack is there or nothing. What is loaded
// is converted outside of the condition, so that several of these have their loads in flight at once.
template <int N, bool packed, class T>
__device__ inline void load_within(const T *from, int64_t left, float (&to)[N]) {
  Pack<T, N> pack{};
  if constexpr (packed) {
    if (left > 0) pack = load_pack<N>(from);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < left) pack.at[i] = from[i];
    }
  }
  to_floats<N>(pack, to);
}
template <int N, bool packed, class T>
__device__ inline void store_within(T *to, int64_t left, const float (&from)[N]) {
  if constexpr (packed) {
    if (left > 0) store<N>(to, from);
  } else {
    store_upto<N, false>(to, left, from);
  }
}

// The bits of a pack of 16 bytes, to device memory.
template <class T, int N>
__device__ inline void store_bits(T *to, const Pack<T, N> &pack) {
  static_assert(sizeof(pack) == 16);
  uint4 word;
  memcpy(&word, &pack, sizeof(word));
  store_word(reinterpret_cast<uint4 *>(to), word);
}

// body(std::true_type{}) where `whole`, else body(std::false_type{}): the true body gives load_upto a constant
// `left`, so that nothing stands between its loads and all of them are in flight at once.
template <class Body>
__device__ inline void with_whole(bool whole, Body &&body) {
  if (whole) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// Elements of a pack such that the widest of the types moves 16 bytes.
template <class... T>
constexpr int pack_of() {
  return (... && (sizeof(T) == 2)) ? 8 : 4;
}

template <int N, class T>
inline bool is_aligned(const T *p) {
  return can_pack<N>(p, N);
}

// Tasks of one warp each, in blocks of this many threads.
constexpr int kWarpTaskThreads = 256;
inline unsigned warp_task_blocks(int64_t tasks) {
  return static_cast<unsigned>(ceil_div(tasks, kWarpTaskThreads / 32));
}

#ifdef __CUDACC__
__device__ inline int64_t warp_task() {
  return (static_cast<int64_t>(blockIdx.x) * kWarpTaskThreads + threadIdx.x) / 32;
}
__device__ inline int lane_index() { return threadIdx.x % 32; }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }

// Kernels of launch_ahead: every thread calls this before it reads what other kernels write, and before it writes. The
// kernel behind may be brought to the multiprocessors as soon as this one's blocks leave room, and this one goes on when all
// that is ahead in the stream is done and seen. So the microsecond or two that a launch takes passes while the kernel ahead
// still runs. One that reads something else before calls the first by itself.
__device__ inline void bring_kernel_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ inline void wait_for_kernels_ahead() {
  bring_kernel_behind();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline cudaLaunchAttribute launch_ahead_attribute() {
  cudaLaunchAttribute ahead{};
  ahead.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  ahead.val.programmaticStreamSerializationAllowed = 1;
  return ahead;
}
// Launches a kernel whose threads call wait_for_kernels_ahead(). Errors are those that `launched` reports.
template <class... Parameters, class... Arguments>
inline void launch_ahead(cudaStream_t on, dim3 blocks, dim3 threads, size_t shared_bytes, void (*kernel)(Parameters...),
                         Arguments... arguments) {
  cudaLaunchAttribute ahead = launch_ahead_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = on;
  config.attrs = &ahead;
  config.numAttrs = device().architecture >= 90 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}
template <class... Parameters, class... Arguments>
inline void launch_ahead(const sg_call *call, dim3 blocks, dim3 threads, size_t shared_bytes,
                         void (*kernel)(Parameters...), Arguments... arguments) {
  launch_ahead(stream(call), blocks, threads, shared_bytes, kernel, arguments...);
}
#endif

}  // namespace sg::cuda
