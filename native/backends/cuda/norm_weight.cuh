// The weight of a norm: a vector of f32, bf16 or f16 that is read in fp32, with the number that its family adds to it.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

// What `supports` asks of the weight of a norm over x's last axis.
inline bool is_weight_vector(const sg_tensor *w, const sg_tensor *x) {
  const bool plain = w->dtype == SG_F32 || w->dtype == SG_BF16 || w->dtype == SG_F16;
  return plain && w->rank == 1 && w->shape[0] == last_dim(x) && is_dense(w);
}

// weight + unit_offset, read in fp32.
struct Weight {
  const void *data;
  int32_t dtype;
  float offset;

  // body(data) as what it points to.
  template <class Body>
  __device__ void with_data(Body &&body) const {
    if (dtype == SG_F32) {
      body(static_cast<const float *>(data));
    } else if (dtype == SG_BF16) {
      body(static_cast<const bf16 *>(data));
    } else {
      body(static_cast<const f16 *>(data));
    }
  }
  template <int V>
  __device__ void load_pack(int64_t column, float (&to)[V]) const {
    with_data([&](const auto *from) { load<V>(from + column, to); });
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] += offset;
  }
  // None, one or two packs, `right` elements apart: both under way before either is waited for.
  template <int V>
  __device__ void load_packs(int left, int right, int packs, float (&a)[V], float (&b)[V]) const {
    with_data([&]<class W>(const W *from) {
      Pack<W, V> first{}, second{};
      if (packs > 0) first = cuda::load_pack<V>(from + left);
      if (packs > 1) second = cuda::load_pack<V>(from + left + right);
      to_floats<V>(first, a);
      to_floats<V>(second, b);
    });
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] += offset;
      b[i] += offset;
    }
  }
  __device__ int element_bytes() const { return dtype == SG_F32 ? 4 : 2; }
  template <int V>
  bool packable() const {
    return dtype == SG_F32 ? can_pack<V>(static_cast<const float *>(data), 0)
                           : can_pack<V>(static_cast<const bf16 *>(data), 0);
  }
};
inline Weight weight_of(const sg_call *call, int index) {
  const sg_tensor *weight = input(call, index);
  return {weight->data, weight->dtype, static_cast<float>(attr_float(call, "unit_offset", 0.0))};
}

}  // namespace sg::cuda
