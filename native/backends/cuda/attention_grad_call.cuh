// attention_grad's operands, and what all of its kernels here ask of them.
#pragma once

#include "attention_common.cuh"

namespace sg::cuda {

struct AttentionGradCall {
  explicit AttentionGradCall(const sg_call *call)
      : grad(input(call, 0)), q(input(call, 1)), k(input(call, 2)), v(input(call, 3)), o(input(call, 4)), lse(input(call, 5)),
        starts(input(call, 6)), dq(output(call, 0)), dk(output(call, 1)), dv(output(call, 2)) {}
  const sg_tensor *grad, *q, *k, *v, *o, *lse, *starts, *dq, *dk, *dv;  // grad: do
};

inline bool attention_grad_supported(const sg_call *call, const AttentionGradCall &c) {
  const auto same_heads = [](const sg_tensor *t, const sg_tensor *like) {
    return is_heads(t, like->dtype) && same_shape(t, like);
  };
  if (!attention_supported(call, c.q, c.k, c.v, c.starts) || !is_lse(c.lse, c.q)) return false;
  if (!is_heads(c.o, c.q->dtype) || c.o->shape[0] != c.q->shape[0] || c.o->shape[1] != c.q->shape[1]) return false;
  if (c.o->shape[2] != c.v->shape[2] || !same_heads(c.grad, c.o)) return false;
  return same_heads(c.dq, c.q) && same_heads(c.dk, c.k) && same_heads(c.dv, c.v);
}

}  // namespace sg::cuda
