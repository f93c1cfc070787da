// The largest element of a row, or of a piece of one: the lowest index of equals, and NaN never.
#pragma once

#include "rows.h"

namespace sg::cpu::SG_ISA {

struct Best {
  float value;
  int32_t index;
};

inline uint32_t equal_lanes(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
#endif
}

// The largest value first, in vectors; then where it is. NaN never wins: max(NaN, b) is b.
template <class T>
Best best_of(const T *p, int64_t n) {
  vf most[2] = {vset(-INFINITY), vset(-INFINITY)};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    most[0] = vmax(vload(p + i), most[0]);
    most[1] = vmax(vload(p + i + kLanes), most[1]);
  }
  float value = vmaximum(vmax(most[0], most[1]));
  for (int64_t j = i; j < n; ++j) value = to_float(p[j]) > value ? to_float(p[j]) : value;
  const vf wanted = vset(value);
  int64_t at = 0;
  while (at + kLanes <= n && equal_lanes(vload(p + at), wanted) == 0) at += kLanes;
  for (; at < n; ++at) {
    if (to_float(p[at]) == value) return {value, static_cast<int32_t>(at)};
  }
  return {value, 0};  // nothing but NaN
}

}  // namespace sg::cpu::SG_ISA
