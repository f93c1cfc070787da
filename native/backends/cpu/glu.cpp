// glu(gate, up) -> h = activation(gate) * up, and glu_grad(dh, gate, up) -> dgate, dup. One pass; rows may lie apart,
// so that gate and up can be two halves of one product.
#include "activation.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

// Operands are all [T, N] of one dtype, with dense rows.
bool all_alike(const sg_call *call) {
  const sg_tensor *first = input(call, 0);
  if (first == nullptr || first->rank != 2 || !is_activation(first)) return false;
  for (int i = 0; i < call->num_inputs + call->num_outputs; ++i) {
    const sg_tensor *t = i < call->num_inputs ? input(call, i) : output(call, i - call->num_inputs);
    if (t == nullptr || t->dtype != first->dtype || !same_shape(t, first) || !has_dense_rows(t)) return false;
  }
  return true;
}

template <class T>
T *row_of(const sg_tensor *t, int64_t row) {
  return data<T>(t) + row * t->strides[0];
}

int32_t supports(const sg_call *call) {
  if (call->num_inputs != 2 || call->num_outputs != 1 || !all_alike(call) || !known_activation(call)) return 0;
  return isa_score(SG_ISA_NAME);
}

int32_t run(const sg_call *call) {
  const sg_tensor *gate = input(call, 0), *up = input(call, 1), *h = output(call, 0);
  const int64_t n = gate->shape[1];
  with_activation(call, [&]<class Activation>(Activation) {
    with_type(gate, [&]<class T>(T) {
      parallel_rows(call, gate->shape[0], n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T *g = row_of<T>(gate, row), *u = row_of<T>(up, row);
          T *out = row_of<T>(h, row);
          for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
            vstore_upto(out + i, vmul(Activation::value(vload_upto(g + i, m)), vload_upto(u + i, m)), m);
          });
        }
      });
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("glu", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

int32_t grad_supports(const sg_call *call) {
  if (call->num_inputs != 3 || call->num_outputs != 2 || !all_alike(call) || !known_activation(call)) return 0;
  return isa_score(SG_ISA_NAME);
}

int32_t grad_run(const sg_call *call) {
  const sg_tensor *dh = input(call, 0), *gate = input(call, 1), *up = input(call, 2);
  const sg_tensor *dgate = output(call, 0), *dup = output(call, 1);
  const int64_t n = gate->shape[1];
  with_activation(call, [&]<class Activation>(Activation) {
    with_type(gate, [&]<class T>(T) {
      parallel_rows(call, gate->shape[0], n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T *d = row_of<T>(dh, row), *g = row_of<T>(gate, row), *u = row_of<T>(up, row);
          T *dg = row_of<T>(dgate, row), *du = row_of<T>(dup, row);
          for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
            const vf dy = vload_upto(d + i, m), other = vload_upto(u + i, m);
            const ValueAndSlope a = Activation::value_and_slope(vload_upto(g + i, m));
            vstore_upto(dg + i, vmul(vmul(dy, other), a.slope), m);
            vstore_upto(du + i, vmul(dy, a.value), m);
          });
        }
      });
    });
  });
  return SG_OK;
}

constexpr sg_kernel grad_kernel = describe_kernel("glu_grad", 0, grad_supports, nullptr, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
