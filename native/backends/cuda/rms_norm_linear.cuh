// The calls of rms_norm_linear, as all of its kernels read them.
#pragma once

#include "activation.cuh"
#include "linear_few.cuh"
#include "norm_weight.cuh"

namespace sg::cuda {

enum Activation : int { kNone, kSilu, kGeluTanh, kGelu };

__device__ inline float activated(Activation activation, float x) {
  return activation == kSilu ? Silu::value(x) : activation == kGeluTanh ? GeluTanh::value(x) : Gelu::value(x);
}

// gate = activation(gate) * up
template <int N>
__device__ inline void multiply_activated(Activation activation, float (&gate)[N], const float (&up)[N]) {
  const auto each = [&](auto &&value) {
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = value(gate[i]) * up[i];
  };
  if (activation == kSilu) {
    each(Silu::value);
  } else if (activation == kGeluTanh) {
    each(GeluTanh::value);
  } else {
    each(Gelu::value);
  }
}

struct NormedProblem {
  FewProblem product;
  int64_t weight_stride;
  Weight norm;
  float eps;
  Activation activation;
};

inline Activation activation_of(const sg_call *call) {
  const char *name = attr_string(call, "activation", "none");
  if (!std::strcmp(name, "none")) return kNone;
  return !std::strcmp(name, "silu") ? kSilu : !std::strcmp(name, "gelu_tanh") ? kGeluTanh : kGelu;
}

// False where no kernel of this backend can run it.
inline bool read_normed(const sg_call *call, NormedProblem *p) {
  const sg_tensor *x = input(call, 0), *norm = input(call, 1), *weight = input(call, 2), *bias = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!x || !norm || !weight || !y || x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (!is_activation(x) || !is_activation(y) || !has_dense_rows(x) || !has_dense_rows(y)) return false;
  if (weight->dtype != SG_BF16 || !has_dense_rows(weight) || !is_weight_vector(norm, x)) return false;
  const int64_t tokens = x->shape[0], n = weight->shape[0], k = weight->shape[1];
  if (k < 1 || k >= INT32_MAX - 4096 || tokens >= INT32_MAX) return false;
  if (bias != nullptr && (bias->rank != 1 || bias->shape[0] != n || !is_dense(bias))) return false;
  if (bias != nullptr && !is_activation(bias) && bias->dtype != SG_F16) return false;
  p->activation = activation_of(call);
  if (p->activation != kNone && (!known_activation(call) || n % 2 != 0)) return false;
  if (x->shape[1] != k || y->shape[0] != tokens || y->shape[1] != (p->activation == kNone ? n : n / 2)) return false;
  p->product = {static_cast<int>(tokens),
                n,
                k,
                x->strides[0],
                0,
                y->strides[0],
                static_cast<float>(attr_float(call, "alpha", 1.0)),
                bias != nullptr ? bias->data : nullptr,
                bias != nullptr ? bias->dtype : 0};
  p->weight_stride = weight->strides[0];
  p->norm = weight_of(call, 1);
  p->eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  return true;
}

}  // namespace sg::cuda
