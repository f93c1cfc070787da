// What is loaded where a condition holds, ahead of other loads that should not wait for it.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

// What is written behind this is done to the word here, not beside its load: the compiler else moves it there.
__device__ inline void use_from_here(uint4 &word) {
  asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
}
__device__ inline void use_from_here(uint2 &word) { asm volatile("" : "+r"(word.x), "+r"(word.y)); }
__device__ inline void use_from_here(int32_t &word) { asm volatile("" : "+r"(word)); }
template <class W>
__device__ inline void use_from_here(W &) {}

// Up to 16 bytes of N elements, zeros until they are loaded. Of a Pack that is loaded under a condition the compiler
// makes N values, beside the load: twice the registers, and what is loaded next waits until this one is there.
template <class T, int N>
struct Bits {
  using W = Word<sizeof(T) * N>;
  static_assert(sizeof(W) == sizeof(T) * N);
  W word{};

  __device__ void load(const T *from) { word = *reinterpret_cast<const W *>(from); }
  __device__ void floats(float (&to)[N]) const {
    W here = word;
    use_from_here(here);
    Pack<T, N> pack;
    memcpy(&pack, &here, sizeof(pack));
    to_floats<N>(pack, to);
  }
};

}  // namespace sg::cuda
