// rms_norm_linear(x[T, K], norm_weight[K], weight[N, K], bias[N]?) -> y[T, N], or y[T, N / 2] of gate and up: see
// surogate_core/ops/rms_norm_linear.py. The plain way: the normed rows in the workspace, the product of linear.cpp, and where
// there is an activation its halves, in fp32 all through. Serving on the CPU keeps the three ops apart, which have kernels
// for every format and round where the trainer does.
#include "activation.h"
#include "linear.h"
#include "norm.h"

namespace sg::cpu::SG_ISA {
namespace {

bool has_activation(const sg_call *call) { return std::strcmp(attr_string(call, "activation", "none"), "none") != 0; }

// The product, of f32 rows that are yet to be made; its result goes to y, or to f32 rows with an activation.
bool read_product(const sg_call *call, LinearProblem *p) {
  const sg_tensor *x = input(call, 0), *norm = input(call, 1), *weight = input(call, 2), *bias = input(call, 3);
  const sg_tensor *y = output(call, 0);
  if (!x || !norm || !weight || !y || x->rank != 2 || weight->rank != 2 || y->rank != 2) return false;
  if (!is_activation(x) || !is_activation(y) || !has_dense_rows(x) || !has_dense_rows(y)) return false;
  const int64_t n = weight->shape[0], k = weight->shape[1];
  if (!is_weight_vector(norm, x) || !is_dense(norm) || x->shape[1] != k) return false;
  if (!is_weight(weight->dtype) || !(weight->dtype < SG_Q4_0 ? has_dense_rows(weight) : is_dense(weight))) return false;
  if (bias != nullptr && (!is_activation(bias) || bias->rank != 1 || bias->shape[0] != n || !is_dense(bias))) return false;
  const bool halves = has_activation(call);
  if (halves && (!known_activation(call) || n % 2 != 0)) return false;
  if (y->shape[0] != x->shape[0] || y->shape[1] != (halves ? n / 2 : n)) return false;
  p->m = x->shape[0], p->n = n, p->k = k;
  p->a = {nullptr, SG_F32, k, false};
  p->b = {weight->data, weight->dtype, row_bytes(weight->dtype, is_dense(weight) ? k : weight->strides[0]), false};
  p->finish = {static_cast<float>(attr_float(call, "alpha", 1.0)),
               bias == nullptr ? nullptr : bias->data,
               bias == nullptr ? SG_F32 : bias->dtype,
               nullptr,
               y->data,
               halves ? SG_F32 : y->dtype,
               halves ? n : y->strides[0],
               0};
  return true;
}

int32_t supports(const sg_call *call) {
  LinearProblem p;
  return read_product(call, &p) ? isa_score(SG_ISA_NAME) : 0;
}

// Floats in the workspace, the norm's weight first, ahead of the product's own part of it.
struct Floats {
  int64_t norm_weight, normed, product;
  Floats(const sg_call *call, const LinearProblem &p)
      : norm_weight(padded(p.k)), normed(padded(p.m * p.k)), product(has_activation(call) ? padded(p.m * p.n) : 0) {}
  int64_t bytes() const { return (norm_weight + normed + product) * static_cast<int64_t>(sizeof(float)); }
  static int64_t padded(int64_t count) { return (count + 63) / 64 * 64; }
};

size_t workspace(const sg_call *call) {
  LinearProblem p;
  if (!read_product(call, &p)) return 0;
  const int64_t worker = make_gemm<LinearOp::forward, FloatMicro>(p).worker_bytes();
  return static_cast<size_t>(Floats(call, p).bytes() + worker * num_workers(call));
}

void norm_rows(const sg_call *call, const LinearProblem &p, const float *weight, float *normed) {
  const sg_tensor *x = input(call, 0);
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  with_type(x, [&]<class X>(X) {
    parallel_rows(call, p.m, p.k, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_row(data<X>(x) + row * x->strides[0], weight, eps, normed + row * p.k, p.k);
      }
    });
  });
}

void multiply_halves(const sg_call *call, const LinearProblem &p, const float *product) {
  const sg_tensor *y = output(call, 0);
  const int64_t n = p.n / 2;
  with_activation(call, [&]<class Activation>(Activation) {
    with_type(y, [&]<class Y>(Y) {
      parallel_rows(call, p.m, n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const float *gate = product + row * p.n, *up = gate + n;
          Y *out = data<Y>(y) + row * y->strides[0];
          for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
            vstore_upto(out + i, vmul(Activation::value(vload_upto(gate + i, m)), vload_upto(up + i, m)), m);
          });
        }
      });
    });
  });
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  if (!read_product(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const Floats floats(call, p);
  float *normed = static_cast<float *>(call->workspace) + floats.norm_weight, *product = normed + floats.normed;
  norm_rows(call, p, prepare_weight(call, input(call, 1)), normed);
  p.a.data = normed;
  if (has_activation(call)) p.finish.out = product;
  const auto gemm = make_gemm<LinearOp::forward, FloatMicro>(p);
  gemm.run(call, static_cast<char *>(call->workspace) + floats.bytes(), gemm.worker_bytes(), p.a, p.b, p.finish);
  if (has_activation(call)) multiply_halves(call, p, product);
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("rms_norm_linear", -1, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
