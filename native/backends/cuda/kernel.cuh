// What every CUDA kernel source includes: reading a call, registering a kernel, launching, and the vocabulary of code that
// moves bytes: 16-byte packs, sums over a warp and a block in a fixed order, element types.
//
// Rules besides those of surogate/abi.h:
//   - launch on stream(call), return launched(call): no synchronisation, no allocation, no copy from pageable memory;
//   - no float atomics: a sum that several blocks share goes through the workspace and is added in a fixed order;
//   - a grid depends on shapes and on the device, results on shapes alone;
//   - an index that comes as data (a token, a row) is checked: what lies outside gives NaN in floats, and never an access;
//   - arithmetic is fp32 or wider; bf16 is rounded once, to nearest even, when it is stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#define SG_CALL_NAMESPACE sg::cuda
#include "../read_call.h"

namespace sg::cuda {

// Appends to the library's table; called by static initialisers.
bool register_kernel(const sg_kernel *kernel);

struct Device {
  int units = 0;         // multiprocessors
  int architecture = 0;  // 90 for compute capability 9.0
  size_t shared_memory = 0;  // bytes that one block may ask for
};
const Device &device();  // the one that is active; read once

using bf16 = __nv_bfloat16;
using f16 = __half;

inline cudaStream_t stream(const sg_call *call) {
  return static_cast<cudaStream_t>(call->host->native_stream(call->stream));
}

// After the last launch of a `run`.
inline int32_t launched(const sg_call *call) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? SG_OK : fail(call, "CUDA: %s", cudaGetErrorString(error));
}

// A kernel's entry for the library's table: deterministic, capturable, and in place on input `in_place` unless that is -1.
constexpr sg_kernel describe_kernel(const char *op, const char *name, int32_t in_place,
                                    int32_t (*supports)(const sg_call *), size_t (*workspace)(const sg_call *),
                                    int32_t (*run)(const sg_call *)) {
  const uint32_t traits = SG_TRAIT_DETERMINISTIC | SG_TRAIT_CAPTURABLE | (in_place >= 0 ? SG_TRAIT_IN_PLACE : 0);
  return {sizeof(sg_kernel), op, "cuda", name, traits, in_place, supports, workspace, nullptr, nullptr, run, nullptr};
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(T{}) with the element type of an operand that `supports` found to be f32 or bf16 (f16 where it says so).
template <class Body>
inline void with_type(const sg_tensor *t, Body &&body) {
  if (t->dtype == SG_BF16) {
    body(bf16{});
  } else {
    body(float{});
  }
}

#ifdef __CUDACC__

template <class T>
__device__ inline float to_float(T value) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __bfloat162float(value);
  } else if constexpr (std::is_same_v<T, f16>) {
    return __half2float(value);
  } else {
    return static_cast<float>(value);
  }
}
template <class T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, f16>) {
    return __float2half_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

// N elements that are moved together. Pack<bf16, 8> and Pack<float, 4> are 16 bytes; Pack<float, 8> moves as two of them.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T at[N];
};
// What a pack is moved as.
template <size_t bytes>
using Word = std::conditional_t<
    bytes % 16 == 0, uint4,
    std::conditional_t<bytes == 8, uint2,
                       std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>>>;

// The bits at `from`. Several of these before the first to_floats are under way together.
template <int N, class T>
__device__ inline Pack<T, N> load_pack(const T *from) {
  using W = Word<sizeof(T) * N>;
  constexpr int words = sizeof(T) * N / sizeof(W);
  W word[words];
#pragma unroll
  for (int i = 0; i < words; ++i) word[i] = reinterpret_cast<const W *>(from)[i];
  Pack<T, N> pack;
  memcpy(&pack, word, sizeof(pack));
  return pack;
}
template <int N, class T>
__device__ inline void to_floats(const Pack<T, N> &pack, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(pack.at[i]);
}
template <int N, class T>
__device__ inline void load(const T *from, float (&to)[N]) {
  to_floats<N>(load_pack<N>(from), to);
}
// One access: an assignment of these vectors is split into single words at times.
template <class W>
__device__ inline void store_word(W *to, const W &word) {
  if constexpr (sizeof(W) == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x),
                 "r"(word.y), "r"(word.z), "r"(word.w)
                 : "memory");
  } else if constexpr (sizeof(W) == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y)
                 : "memory");
  } else {
    *to = word;
  }
}
// To device memory; not to shared memory.
template <int N, class T>
__device__ inline void store(T *to, const float (&from)[N]) {
  using W = Word<sizeof(T) * N>;
  constexpr int words = sizeof(T) * N / sizeof(W);
  W word[words];
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
    __nv_bfloat162 pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    memcpy(word, pairs, sizeof(word));
  } else {
    T elements[N];
#pragma unroll
    for (int i = 0; i < N; ++i) elements[i] = from_float<T>(from[i]);
    memcpy(word, elements, sizeof(word));
  }
#pragma unroll
  for (int i = 0; i < words; ++i) store_word(reinterpret_cast<W *>(to) + i, word[i]);
}

// Sum over the 32 lanes; every lane gets it, and the same bits.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}
__device__ inline float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Sum over a block of whole warps, at most 32 of them; every thread gets it. `scratch`: 32 floats of shared memory that
// nobody else uses; safe to call again at once with the same scratch.
__device__ inline float block_sum(float value, float *scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
  value = warp_sum(value);
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

#endif  // __CUDACC__

// Whether `count` elements of T at p can be moved N at a time.
template <int N, class T>
inline bool can_pack(const T *p, int64_t row_elements) {
  constexpr size_t bytes = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && row_elements % N == 0;
}

}  // namespace sg::cuda

// Registers `variable` (a namespace-scope `constexpr sg_kernel` or `const sg_kernel`). Once per kernel.
#define SG_REGISTER_KERNEL(variable) \
  [[maybe_unused]] static const bool variable##_registered = ::sg::cuda::register_kernel(&variable)
