// The three matrix products of a linear layer, read from a call into one description that every kernel of them shares.
#pragma once

#include "gemm.h"

namespace sg::cpu::SG_ISA {

enum class LinearOp { forward, input_grad, weight_grad };

struct LinearProblem {
  int64_t m, n, k;  // of the product C[m, n] = A[m, k] B[k, n]
  MatrixA a;
  MatrixB b;
  Epilogue finish;
};

// Rows of activations and of weights that are not in blocks may lie apart; gradients of weights and the bias are dense.
template <LinearOp op>
inline bool has_linear_layout(const sg_call *call) {
  for (int i = 0; i < call->num_inputs; ++i) {
    const sg_tensor *t = input(call, i);
    const bool may_lie_apart = i != 1 || op == LinearOp::weight_grad || t == nullptr || t->dtype < SG_Q4_0;
    if (t != nullptr && !(may_lie_apart ? has_dense_rows(t) : is_dense(t))) return false;
  }
  const sg_tensor *out = output(call, 0);
  return out == nullptr || (op == LinearOp::weight_grad ? is_dense(out) : has_dense_rows(out));
}

// Asks memory for what lies behind the rows that are being multiplied, a little at each step: more at once would wait for
// its turn, and the arithmetic with it.
class FetchAhead {
 public:
  // The `bytes` from `now` on are gone through in `steps`, and those as many groups of `bytes` later that are far enough away
  // are asked for meanwhile.
  FetchAhead(const uint8_t *now, int64_t bytes, int64_t steps)
      : next_(now + (kDistance + bytes - 1) / bytes * bytes), due_(next_), bytes_each_(bytes / steps + 1) {}
  void step() {
    for (due_ += bytes_each_; next_ < due_; next_ += 64) _mm_prefetch(reinterpret_cast<const char *>(next_), _MM_HINT_T1);
  }

 private:
  static constexpr int64_t kDistance = 16384;
  const uint8_t *next_, *due_;
  int64_t bytes_each_;
};

// Checks dtypes and shapes of linear, linear_input_grad or linear_weight_grad; false when no kernel here can run it.
template <LinearOp op>
inline bool read_linear(const sg_call *call, LinearProblem *p) {
  if (call->num_inputs < 2 || call->num_outputs < 1 || !has_linear_layout<op>(call)) return false;
  const sg_tensor *left = input(call, 0), *right = input(call, 1), *out = output(call, 0);
  if (left == nullptr || right == nullptr || out == nullptr) return false;
  if (left->rank != 2 || right->rank != 2 || out->rank != 2) return false;
  if (!is_activation(left) || !is_activation(out)) return false;
  const int64_t r0 = right->shape[0], r1 = right->shape[1];
  const sg_tensor *bias = op == LinearOp::forward ? input(call, 2) : nullptr;
  const sg_tensor *addend = op == LinearOp::forward      ? input(call, 3)
                            : op == LinearOp::input_grad ? input(call, 2)
                                                         : nullptr;
  if constexpr (op == LinearOp::weight_grad) {
    if (!is_activation(right) || out->dtype != SG_F32 || left->shape[0] != r0) return false;
    p->m = left->shape[1], p->n = r1, p->k = r0;
    p->a = {left->data, left->dtype, left->strides[0], true};
  } else {
    if (!is_weight(right->dtype)) return false;
    p->m = left->shape[0], p->n = op == LinearOp::forward ? r0 : r1, p->k = op == LinearOp::forward ? r1 : r0;
    if (left->shape[1] != p->k) return false;
    p->a = {left->data, left->dtype, left->strides[0], false};
  }
  if (out->shape[0] != p->m || out->shape[1] != p->n) return false;
  if (bias != nullptr && (!is_activation(bias) || bias->rank != 1 || bias->shape[0] != p->n)) return false;
  if (addend != nullptr && (addend->dtype != out->dtype || addend->rank != 2 || addend->shape[0] != p->m ||
                            addend->shape[1] != p->n)) {
    return false;
  }
  const int64_t right_stride = is_dense(right) ? r1 : right->strides[0];
  p->b = {right->data, right->dtype, row_bytes(right->dtype, right_stride), op != LinearOp::forward};
  p->finish = {static_cast<float>(attr_float(call, "alpha", 1.0)),
               bias == nullptr ? nullptr : bias->data,
               bias == nullptr ? SG_F32 : bias->dtype,
               addend == nullptr ? nullptr : addend->data,
               out->data,
               out->dtype,
               out->strides[0],
               addend == nullptr ? 0 : addend->strides[0]};
  if constexpr (op == LinearOp::weight_grad) p->finish.addend = out->data, p->finish.addend_stride = p->finish.stride;
  return true;
}

// Decoding by rows in blocks of 256 wants panels of whole blocks.
inline bool wants_wide_panels(const LinearProblem &p) { return p.b.by_rows && p.b.dtype >= SG_Q4_K; }

template <LinearOp op, class Micro>
inline Gemm<Micro> make_gemm(const LinearProblem &p) {
  if (op == LinearOp::weight_grad) return Gemm<Micro>::over_tokens(p.m, p.n, p.k);
  return Gemm<Micro>::product(p.m, p.n, p.k, wants_wide_panels(p));
}

// A weight gradient that is narrow, as LoRA's are, is computed as its transpose: then the wide operand is read in
// order.
inline bool is_transposed(const LinearProblem &p) { return p.n <= 64 && p.n < p.m; }

inline LinearProblem transposed(const LinearProblem &p) {
  LinearProblem t = p;
  t.m = p.n, t.n = p.m;
  t.a = {p.b.data, p.b.dtype, p.b.row_bytes / row_bytes(p.b.dtype, 1), true};
  t.b = {p.a.data, p.a.dtype, row_bytes(p.a.dtype, p.a.stride), true};
  return t;
}

// Adds sums of the transpose to a gradient of `stride` columns.
struct AddTransposed {
  float alpha;
  float *out;
  int64_t stride;
  void operator()(int64_t row, int rows, int64_t column, int n, const float *sums, int64_t sums_stride) const {
    for (int i = 0; i < n; ++i) {
      float *y = out + (column + i) * stride + row;
      for (int r = 0; r < rows; ++r) y[r] += alpha * sums[r * sums_stride + i];
    }
  }
};

template <LinearOp op, class Micro>
size_t gemm_workspace(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<op>(call, &p)) return 0;
  if (op == LinearOp::weight_grad && is_transposed(p)) p = transposed(p);
  return static_cast<size_t>(make_gemm<op, Micro>(p).worker_bytes()) * static_cast<size_t>(num_workers(call));
}

template <LinearOp op, class Micro>
int32_t gemm_run(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<op>(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  char *workspace = static_cast<char *>(call->workspace);
  if (op == LinearOp::weight_grad && is_transposed(p)) {
    const LinearProblem t = transposed(p);
    const Gemm<Micro> gemm = make_gemm<op, Micro>(t);
    const AddTransposed finish{p.finish.alpha, static_cast<float *>(p.finish.out), p.n};
    gemm.run(call, workspace, gemm.worker_bytes(), t.a, t.b, finish);
    return SG_OK;
  }
  const Gemm<Micro> gemm = make_gemm<op, Micro>(p);
  gemm.run(call, workspace, gemm.worker_bytes(), p.a, p.b, p.finish);
  return SG_OK;
}

// The kernels of the three ops on one Micro. `supports` gives the score.
template <LinearOp op, class Micro>
constexpr sg_kernel gemm_kernel(const char *name, int32_t (*supports)(const sg_call *)) {
  constexpr const char *names[] = {"linear", "linear_input_grad", "linear_weight_grad"};
  constexpr int32_t in_place[] = {3, 2, -1};
  constexpr int which = static_cast<int>(op);
  // A row's sums run over K in the same steps whatever the number of rows; only the weight's gradient adds over rows.
  constexpr auto traits = static_cast<uint32_t>(SG_TRAIT_DETERMINISTIC) |
                          (op != LinearOp::weight_grad ? static_cast<uint32_t>(SG_TRAIT_ROW_INVARIANT) : 0u) |
                          (in_place[which] >= 0 ? static_cast<uint32_t>(SG_TRAIT_IN_PLACE) : 0u);
  return {sizeof(sg_kernel), names[which], "cpu", name, traits, in_place[which], supports,
          gemm_workspace<op, Micro>, nullptr, nullptr, gemm_run<op, Micro>};
}

}  // namespace sg::cpu::SG_ISA
