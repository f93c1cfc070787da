// rms_norm, rms_norm_grad, rms_norm_weight_grad: see surogate_core/ops/rms_norm.py for the formulas.
// A row is read twice, the second time from the first-level cache: every operand goes through memory once.
#include <initializer_list>

#include "norm.h"

namespace sg::cpu::SG_ISA {
namespace {

bool are_rows(std::initializer_list<const sg_tensor *> operands) {
  for (const sg_tensor *t : operands) {
    if (t != nullptr && !(t->rank < 2 ? is_dense(t) : has_dense_rows(t))) return false;
  }
  return true;
}

// The rows of a tensor, which follow one another but for gaps between the indices of its first axis.
template <class T>
struct RowsOf {
  T *first;
  int64_t n, inner, stride;
  bool dense;

  explicit RowsOf(const sg_tensor *t)
      : first(data<T>(t)), n(t == nullptr ? 0 : last_dim(t)), inner(1), stride(0),
        dense(t == nullptr || t->shape[0] == 0 || is_dense(t)) {
    if (dense) return;
    inner = num_rows(t) / t->shape[0];
    stride = t->strides[0];
  }
  T *operator[](int64_t row) const { return first + (dense ? row * n : row / inner * stride + row % inner * n); }
};

// ---- rms_norm(x[..., N], weight[N]) -> y[..., N], rstd[...]?

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *weight = input(call, 1), *y = output(call, 0), *rstd = output(call, 1);
  if (x == nullptr || weight == nullptr || y == nullptr || x->rank < 1) return 0;
  if (!are_rows({x, y}) || !is_dense(weight) || (rstd != nullptr && !is_dense(rstd))) return 0;
  if (!is_activation(x) || !is_activation(y) || !same_shape(x, y) || !is_weight_vector(weight, x)) return 0;
  if (rstd != nullptr && !is_rstd(rstd, x)) return 0;
  return isa_score(SG_ISA_NAME);
}

size_t workspace(const sg_call *call) { return weight_workspace(call, 1); }

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  const int64_t n = last_dim(x), rows = num_rows(x);
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  const float *weight = prepare_weight(call, input(call, 1));
  float *rstd_out = data<float>(output(call, 1));
  with_type(x, [&]<class X>(X) {
    with_type(y, [&]<class Y>(Y) {
      const RowsOf<const X> xs(x);
      const RowsOf<Y> ys(y);
      parallel_rows(call, rows, n, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const X *in = xs[row];
          Y *out = ys[row];
          const float rstd = norm_row(in, weight, eps, out, n);
          if (rstd_out != nullptr) rstd_out[row] = rstd;
        }
      });
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("rms_norm", 0, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

// ---- rms_norm_grad(dy, x, weight, rstd, addend?) -> dx

int32_t grad_supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *weight = input(call, 2), *rstd = input(call, 3);
  const sg_tensor *addend = input(call, 4), *dx = output(call, 0);
  if (!dy || !x || !weight || !rstd || !dx || x->rank < 1) return 0;
  if (!are_rows({dy, x, addend, dx}) || !is_dense(weight) || !is_dense(rstd)) return 0;
  if (!is_activation(dy) || !is_activation(x) || !is_activation(dx)) return 0;
  if (!same_shape(dy, x) || !same_shape(dx, x) || !is_weight_vector(weight, x) || !is_rstd(rstd, x)) return 0;
  if (addend != nullptr && (addend->dtype != dx->dtype || !same_shape(addend, x))) return 0;
  return isa_score(SG_ISA_NAME);
}

size_t grad_workspace(const sg_call *call) { return weight_workspace(call, 2); }

int32_t grad_run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *dx = output(call, 0);
  const int64_t n = last_dim(x), rows = num_rows(x);
  const float *weight = prepare_weight(call, input(call, 2)), *rstd = data<float>(input(call, 3));
  with_type(dy, [&]<class G>(G) {
    with_type(x, [&]<class X>(X) {
      with_type(dx, [&]<class Out>(Out) {
        const sg_tensor *addend = input(call, 4);
        const RowsOf<const G> gs(dy);
        const RowsOf<const X> xs(x);
        const RowsOf<const Out> addends(addend);
        const RowsOf<Out> outs(dx);
        parallel_rows(call, rows, n, [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            const G *g = gs[row];
            const X *in = xs[row];
            Out *out = outs[row];
            if (addend != nullptr) {
              grad_row<true>(g, in, weight, rstd[row], addends[row], out, n);
            } else {
              grad_row<false, G, X, Out>(g, in, weight, rstd[row], nullptr, out, n);
            }
          }
        });
      });
    });
  });
  return SG_OK;
}

constexpr sg_kernel grad_kernel = describe_kernel("rms_norm_grad", 4, grad_supports, grad_workspace, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

// ---- rms_norm_weight_grad(dy, x, rstd) -> dweight[N] +=
// Each task sums its rows into a row of the workspace; the rows of the workspace are then added in order.

constexpr int64_t kMaxPartials = 64;

int64_t rows_per_partial(const sg_tensor *x) {
  const int64_t n = last_dim(x), rows = num_rows(x);
  const int64_t by_size = n > 0 ? (65536 + n - 1) / n : rows;
  const int64_t by_count = (rows + kMaxPartials - 1) / kMaxPartials;
  const int64_t most = by_size > by_count ? by_size : by_count;
  return most > 0 ? most : 1;
}
int64_t num_partials(const sg_tensor *x) {
  const int64_t per = rows_per_partial(x);
  return (num_rows(x) + per - 1) / per;
}

int32_t weight_grad_supports(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *rstd = input(call, 2), *dweight = output(call, 0);
  if (!dy || !x || !rstd || !dweight || x->rank < 1) return 0;
  if (!are_rows({dy, x}) || !is_dense(rstd) || !is_dense(dweight)) return 0;
  if (!is_activation(dy) || !is_activation(x) || !same_shape(dy, x) || !is_rstd(rstd, x)) return 0;
  if (dweight->dtype != SG_F32 || num_elements(dweight) != last_dim(x)) return 0;
  return isa_score(SG_ISA_NAME);
}

size_t weight_grad_workspace(const sg_call *call) {
  const sg_tensor *x = call->inputs[1];
  return static_cast<size_t>(num_partials(x) * last_dim(x)) * sizeof(float);
}

// sums[i] += over `rows` rows (1 or 4) of dy * x * rstd, from `row` on.
template <int rows, class G, class X>
SG_FLATTEN inline void add_rows(const RowsOf<const G> &gs, const RowsOf<const X> &xs, int64_t row, const float *rstd,
                                int64_t n, float *sums) {
  const G *dy[rows];
  const X *x[rows];
  for (int r = 0; r < rows; ++r) dy[r] = gs[row + r], x[r] = xs[row + r];
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
    vf sum = vload_upto(sums + i, m);
    for (int r = 0; r < rows; ++r) {
      vf normed = vmul(vload_upto(x[r] + i, m), vset(rstd[row + r]));
      sum = vfma(vload_upto(dy[r] + i, m), normed, sum);
    }
    vstore_upto(sums + i, sum, m);
  });
}

int32_t weight_grad_run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1);
  const int64_t n = last_dim(x), rows = num_rows(x), per = rows_per_partial(x), count = num_partials(x);
  const float *rstd = data<float>(input(call, 2));
  float *partials = static_cast<float *>(call->workspace), *dweight = data<float>(output(call, 0));
  with_type(dy, [&]<class G>(G) {
    with_type(x, [&]<class X>(X) {
      const RowsOf<const G> gs(dy);
      const RowsOf<const X> xs(x);
      parallel_for(call, count, [&](int64_t task, int) {
        float *sums = partials + task * n;
        std::memset(sums, 0, static_cast<size_t>(n) * sizeof(float));
        int64_t row = task * per;
        const int64_t end = row + per < rows ? row + per : rows;
        for (; row + 4 <= end; row += 4) add_rows<4>(gs, xs, row, rstd, n, sums);
        for (; row < end; ++row) add_rows<1>(gs, xs, row, rstd, n, sums);
      });
    });
  });
  for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
    vf sum = vload_upto(dweight + i, m);
    for (int64_t task = 0; task < count; ++task) sum = vadd(sum, vload_upto(partials + task * n + i, m));
    vstore_upto(dweight + i, sum, m);
  });
  return SG_OK;
}

constexpr sg_kernel weight_grad_kernel =
    describe_kernel("rms_norm_weight_grad", -1, weight_grad_supports, weight_grad_workspace, weight_grad_run);
SG_REGISTER_KERNEL(weight_grad_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
