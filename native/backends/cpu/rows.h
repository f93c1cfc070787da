// For kernels that move bytes: choosing a template by the operands' types, walking a row vector by vector, and operands
// whose rows lie apart (a slice of a wider product).
#pragma once

#include "kernel.h"
#include "simd.h"

#define SG_FLATTEN __attribute__((always_inline))

namespace sg::cpu::SG_ISA {

// A kernel's entry for the library's table: deterministic, and in place on input `in_place` unless that is -1.
constexpr sg_kernel describe_kernel(const char *op, int32_t in_place, int32_t (*supports)(const sg_call *),
                                    size_t (*workspace)(const sg_call *), int32_t (*run)(const sg_call *)) {
  const uint32_t traits = SG_TRAIT_DETERMINISTIC | (in_place >= 0 ? SG_TRAIT_IN_PLACE : 0);
  return {sizeof(sg_kernel), op, "cpu", SG_ISA_NAME, traits, in_place, supports, workspace, nullptr, nullptr, run};
}

// The same of a kernel whose every row of results is made of the same row of operands, in one way.
constexpr sg_kernel describe_row_kernel(const char *op, int32_t in_place, int32_t (*supports)(const sg_call *),
                                        size_t (*workspace)(const sg_call *), int32_t (*run)(const sg_call *)) {
  sg_kernel kernel = describe_kernel(op, in_place, supports, workspace, run);
  kernel.traits |= SG_TRAIT_ROW_INVARIANT;
  return kernel;
}

// body(T{}) with the element type of an operand that `supports` found to be f32 or bf16.
template <class Body>
inline void with_type(const sg_tensor *t, Body &&body) {
  if (t->dtype == SG_BF16) {
    body(bf16{});
  } else {
    body(float{});
  }
}

// The first n elements at p. With n the constant kLanes, as in all but a row's last step, the choice is the compiler's.
template <class T>
SG_FLATTEN inline vf vload_upto(const T *p, int n) {
  return n == kLanes ? vload(p) : vload_n(p, n);
}
template <class T>
SG_FLATTEN inline void vstore_upto(T *p, vf v, int n) {
  if (n == kLanes) {
    vstore(p, v);
  } else {
    vstore_n(p, v, n);
  }
}

// step(i, n) for i = 0, kLanes, ...: n = kLanes, and once what is left. Mark the lambda SG_FLATTEN.
template <class Step>
SG_FLATTEN inline void for_vectors(int64_t count, Step &&step) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) step(i, kLanes);
  if (i < count) step(i, static_cast<int>(count - i));
}

// The first index that is outside [0, limit), or -1. Checked before a gather: an index is data, never trusted.
inline int64_t find_outside(const int32_t *indices, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < 0 || indices[i] >= limit) return i;
  }
  return -1;
}

}  // namespace sg::cpu::SG_ISA
