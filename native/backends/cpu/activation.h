// Gated activations in fp32, a vector at a time: value and derivative together, since they share their exponential.
#pragma once

#include <cstring>
#include <initializer_list>

#include "kernel.h"
#include "simd.h"

namespace sg::cpu::SG_ISA {

struct ValueAndSlope {
  vf value, slope;
};

inline vf vmask_negative(vf x, vf if_negative, vf otherwise) {
#if defined(__AVX512F__)
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, vzero(), _CMP_LT_OQ), if_negative);
#else
  return _mm256_blendv_ps(otherwise, if_negative, _mm256_cmp_ps(x, vzero(), _CMP_LT_OQ));
#endif
}

// x * sigmoid(x)
struct Silu {
  static vf value(vf x) { return vmul(x, vsigmoid(x)); }
  static ValueAndSlope value_and_slope(vf x) {
    vf s = vsigmoid(x), value = vmul(x, s);
    return {value, vfma(value, vsub(vset(1.0f), s), s)};
  }
};

// 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Written as x * sigmoid(2u), which keeps its relative
// precision where the tanh approaches -1.
struct GeluTanh {
  static constexpr float kTwoSlope = 1.5957691216057308f, kCubic = 0.044715f;
  static vf gate(vf x, vf square) {
    return vsigmoid(vmul(vmul(vset(kTwoSlope), x), vfma(vset(kCubic), square, vset(1.0f))));
  }
  static vf value(vf x) { return vmul(x, gate(x, vmul(x, x))); }
  static ValueAndSlope value_and_slope(vf x) {
    vf square = vmul(x, x), s = gate(x, square), value = vmul(x, s);
    vf inner = vmul(vset(kTwoSlope), vfma(vset(3.0f * kCubic), square, vset(1.0f)));
    return {value, vfma(vmul(value, vsub(vset(1.0f), s)), inner, s)};
  }
};

// x * Phi(x), Phi the normal distribution. With a = |x| / sqrt 2 and t = 1 / (1 + 0.4 a), Phi(-|x|) = exp(-a^2) / 2 * t
// P(t). P is our minimax fit of degree 9 to exp(a^2) erfc(a) / t on a <= 9.9, past which the exponential is 0 in fp32.
// Its relative error is 7.6e-9, so no tail of Phi loses digits.
struct Gelu {
  struct Normal {
    vf cdf, exponential;
  };
  static Normal normal(vf x) {
    vf magnitude = vmax(x, vsub(vzero(), x));
    vf exponential = vexp(vmul(vmul(x, x), vset(-0.5f)));
    vf t = vreciprocal(vfma(magnitude, vset(0.4f * 0.70710678118654752f), vset(1.0f)));
    vf p = vset(-0.0297910799f);
    for (float c : {0.199083885f, -0.501334812f, 0.550808832f, -0.287180042f, 0.273580915f, 0.129154231f, 0.215032095f,
                    0.224938369f, 0.225707615f}) {
      p = vfma(p, t, vset(c));
    }
    vf tail = vmul(vmul(vset(0.5f), exponential), vmul(p, t));
    return {vmask_negative(x, tail, vsub(vset(1.0f), tail)), exponential};
  }
  static vf value(vf x) { return vmul(x, normal(x).cdf); }
  static ValueAndSlope value_and_slope(vf x) {
    Normal n = normal(x);
    return {vmul(x, n.cdf), vfma(vmul(x, vset(0.39894228040143268f)), n.exponential, n.cdf)};
  }
};

// Of attribute "activation".
inline bool known_activation(const sg_call *call) {
  const char *name = attr_string(call, "activation", "silu");
  return !std::strcmp(name, "silu") || !std::strcmp(name, "gelu_tanh") || !std::strcmp(name, "gelu");
}
template <class Body>
inline void with_activation(const sg_call *call, Body &&body) {
  const char *name = attr_string(call, "activation", "silu");
  if (!std::strcmp(name, "silu")) {
    body(Silu{});
  } else if (!std::strcmp(name, "gelu_tanh")) {
    body(GeluTanh{});
  } else {
    body(Gelu{});
  }
}

}  // namespace sg::cpu::SG_ISA
