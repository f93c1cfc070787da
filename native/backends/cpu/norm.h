// Norms of rows: the weight in fp32, the sum of a row, and what one row becomes, forward and backward.
#pragma once

#include <cmath>

#include "quant.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

inline bool is_weight_vector(const sg_tensor *w, const sg_tensor *x) {
  bool plain = w->dtype == SG_F32 || w->dtype == SG_BF16 || w->dtype == SG_F16;
  return plain && w->rank == 1 && w->shape[0] == last_dim(x);
}
inline bool is_rstd(const sg_tensor *rstd, const sg_tensor *x) {
  return rstd->dtype == SG_F32 && num_elements(rstd) == num_rows(x);
}

// weight + unit_offset in fp32, in the workspace from its float `first` on: the row loops are then free of the weight's dtype.
inline size_t weight_workspace(const sg_call *call, int index) {
  return static_cast<size_t>(last_dim(call->inputs[index])) * sizeof(float);
}
inline const float *prepare_weight(const sg_call *call, const sg_tensor *weight, int64_t first = 0) {
  float *out = static_cast<float *>(call->workspace) + first;
  const int64_t n = weight->shape[0];
  const vf offset = vset(static_cast<float>(attr_float(call, "unit_offset", 0.0)));
  decode_row(weight->dtype, weight->data, n, out);
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(out + i, vadd(vload_upto(out + i, m), offset), m); });
  return out;
}

// sum(a * b * c) or, without c, sum(a * b): four chains, since one would wait for its own additions.
template <class A, class B>
SG_FLATTEN inline float dot(const A *a, const B *b, const float *c, int64_t n) {
  vf sum[4] = {vzero(), vzero(), vzero(), vzero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const int64_t at = i + j * kLanes;
      vf left = vload(a + at);
      if (c != nullptr) left = vmul(left, vload(c + at));
      sum[j] = vfma(left, vload(b + at), sum[j]);
    }
  }
  for_vectors(n - i, [&](int64_t k, int m) SG_FLATTEN {
    vf left = vload_upto(a + i + k, m);
    if (c != nullptr) left = vmul(left, vload_upto(c + i + k, m));
    sum[0] = vfma(left, vload_upto(b + i + k, m), sum[0]);
  });
  return vsum(vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
}

// One row: out = x * rstd * weight with the rstd that it returns.
template <class X, class Y>
SG_FLATTEN inline float norm_row(const X *x, const float *weight, float eps, Y *out, int64_t n) {
  const float rstd = 1.0f / std::sqrt(dot(x, x, nullptr, n) / static_cast<float>(n) + eps);
  const vf scale = vset(rstd);
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
    vstore_upto(out + i, vmul(vmul(vload_upto(x + i, m), scale), vload_upto(weight + i, m)), m);
  });
  return rstd;
}

// One row: dx = rstd * dy * weight - c * x + addend, c = rstd^3 * mean(dy * weight * x).
template <bool has_addend, class G, class X, class Out>
SG_FLATTEN inline void grad_row(const G *dy, const X *x, const float *weight, float rstd, const Out *addend, Out *dx,
                                int64_t n) {
  const float mean = dot(dy, x, weight, n) / static_cast<float>(n);
  const vf scale = vset(rstd), c = vset(rstd * rstd * rstd * mean);
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
    vf g = vmul(vmul(vload_upto(dy + i, m), scale), vload_upto(weight + i, m));
    vf result = vfnma(c, vload_upto(x + i, m), g);
    if constexpr (has_addend) result = vadd(result, vload_upto(addend + i, m));
    vstore_upto(dx + i, result, m);
  });
}

}  // namespace
}  // namespace sg::cpu::SG_ISA
