// rms_norm, rms_norm_grad, rms_norm_weight_grad: see surogate_core/ops/rms_norm.py for the formulas.
// A row is read twice, the second time from the first-level cache: every operand goes through memory once.
#include <initializer_list>

#include "quant.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

bool is_weight_vector(const sg_tensor *w, const sg_tensor *x) {
  bool plain = w->dtype == SG_F32 || w->dtype == SG_BF16 || w->dtype == SG_F16;
  return plain && w->rank == 1 && w->shape[0] == last_dim(x);
}
bool is_rstd(const sg_tensor *rstd, const sg_tensor *x) {
  return rstd->dtype == SG_F32 && num_elements(rstd) == num_rows(x);
}

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

// weight + unit_offset in fp32, in the workspace: the row loops are then free of the weight's dtype.
size_t weight_workspace(const sg_call *call, int index) {
  return static_cast<size_t>(last_dim(call->inputs[index])) * sizeof(float);
}
const float *prepare_weight(const sg_call *call, const sg_tensor *weight) {
  float *out = static_cast<float *>(call->workspace);
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
          const float rstd = 1.0f / std::sqrt(dot(in, in, nullptr, n) / static_cast<float>(n) + eps);
          const vf scale = vset(rstd);
          for_vectors(n, [&](int64_t i, int m) SG_FLATTEN {
            vstore_upto(out + i, vmul(vmul(vload_upto(in + i, m), scale), vload_upto(weight + i, m)), m);
          });
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
