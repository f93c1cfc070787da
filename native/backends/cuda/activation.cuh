// Gated activations in fp32, with their derivatives.
#pragma once

#include <cstring>

#include "kernel.cuh"

namespace sg::cuda {

struct ValueAndSlope {
  float value, slope;
};

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// x * sigmoid(x)
struct Silu {
  __device__ static float value(float x) { return x * sigmoid(x); }
  __device__ static ValueAndSlope value_and_slope(float x) {
    const float s = sigmoid(x), value = x * s;
    return {value, fmaf(value, 1.0f - s, s)};
  }
};

// 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Written as x * sigmoid(2u), which keeps its relative
// precision where the tanh approaches -1.
struct GeluTanh {
  static constexpr float kTwoSlope = 1.5957691216057308f, kCubic = 0.044715f;
  __device__ static float gate(float x, float square) { return sigmoid(kTwoSlope * x * fmaf(kCubic, square, 1.0f)); }
  __device__ static float value(float x) { return x * gate(x, x * x); }
  __device__ static ValueAndSlope value_and_slope(float x) {
    const float square = x * x, s = gate(x, square), value = x * s;
    return {value, fmaf(value * (1.0f - s), kTwoSlope * fmaf(3.0f * kCubic, square, 1.0f), s)};
  }
};

// x * Phi(x), Phi the normal distribution. With a = |x| / sqrt 2 and t = 1 / (1 + 0.4 a), Phi(-|x|) = exp(-a^2) / 2 * t
// P(t), P the polynomial of the CPU's kernel: a relative error of 7.6e-9, so that no tail of Phi loses digits.
struct Gelu {
  struct Normal {
    float cdf, exponential;
  };
  __device__ static Normal normal(float x) {
    const float exponential = __expf(-0.5f * x * x);
    const float t = __fdividef(1.0f, fmaf(fabsf(x), 0.4f * 0.70710678118654752f, 1.0f));
    constexpr float kTerms[] = {0.199083885f, -0.501334812f, 0.550808832f, -0.287180042f, 0.273580915f,
                                0.129154231f, 0.215032095f,  0.224938369f, 0.225707615f};
    float p = -0.0297910799f;
#pragma unroll
    for (int i = 0; i < 9; ++i) p = fmaf(p, t, kTerms[i]);
    const float tail = 0.5f * exponential * (p * t);
    return {x < 0.0f ? tail : 1.0f - tail, exponential};
  }
  __device__ static float value(float x) { return x * normal(x).cdf; }
  __device__ static ValueAndSlope value_and_slope(float x) {
    const Normal n = normal(x);
    return {x * n.cdf, fmaf(x * 0.39894228040143268f, n.exponential, n.cdf)};
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

}  // namespace sg::cuda
