// norm_rope(x[T, H, D], weight[D], positions[T], table[P, R/2, 2]) -> y, rstd[T, H]?: the norm of every head, turned.
// norm_rope_grad(dy, x, weight, rstd, positions, table, addend?) -> dx: dy turned back, and the norm's gradient of that.
// What lies between the two stays in fp32, a head at a time. Rows of all but rstd may lie apart; y may be x, dx dy.
#include "norm.h"
#include "rope.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxHead = 1024;  // dims of a head

// What both ops ask of x, of something of its form, and of weight, positions and table.
bool is_heads(const sg_tensor *t) { return t != nullptr && t->rank == 3 && is_activation(t) && has_dense_rows(t); }
bool is_like(const sg_tensor *t, const sg_tensor *x) { return is_heads(t) && t->dtype == x->dtype && same_shape(t, x); }
bool can_turn(const sg_tensor *x, const sg_tensor *weight, const sg_tensor *positions, const sg_tensor *table) {
  if (!is_heads(x) || !weight || !positions || !table || x->shape[2] < 1 || x->shape[2] > kMaxHead) return false;
  if (!is_weight_vector(weight, x) || !is_dense(weight)) return false;
  if (positions->dtype != SG_I32 || positions->rank != 1 || positions->shape[0] != x->shape[0]) return false;
  if (!is_dense(positions) || !is_dense(table) || table->dtype != SG_F32 || table->rank != 3) return false;
  return table->shape[2] == 2 && 2 * table->shape[1] <= x->shape[2];
}

// body(t, angle) for every token, with its angles laid out.
template <class Body>
int32_t for_tokens(const sg_call *call, const sg_tensor *x, const sg_tensor *positions, const sg_tensor *table,
                   float sign, Body &&body) {
  const int32_t *at = data<int32_t>(positions);
  const int64_t tokens = x->shape[0], half = table->shape[1];
  if (int64_t t = find_outside(at, tokens, table->shape[0]); t >= 0) {
    return fail(call, "position %d of token %lld is outside the table of %lld positions: build a longer table", at[t],
                static_cast<long long>(t), static_cast<long long>(table->shape[0]));
  }
  const bool interleaved = attr_int(call, "interleaved", 0) != 0;
  parallel_rows(call, tokens, x->shape[1] * x->shape[2], [&](int64_t begin, int64_t end) {
    alignas(64) float angle[2 * kMaxHead];
    for (int64_t t = begin; t < end; ++t) {
      lay_out(data<float>(table) + at[t] * 2 * half, sign, interleaved, half, angle);
      body(t, angle);
    }
  });
  return SG_OK;
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0), *rstd = output(call, 1);
  if (!can_turn(x, input(call, 1), input(call, 2), input(call, 3)) || !is_like(y, x)) return 0;
  return rstd == nullptr || (is_rstd(rstd, x) && is_dense(rstd)) ? isa_score(SG_ISA_NAME) : 0;
}

size_t workspace(const sg_call *call) { return weight_workspace(call, 1); }

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *table = input(call, 3), *y = output(call, 0);
  const float *weight = prepare_weight(call, input(call, 1));
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  const bool interleaved = attr_int(call, "interleaved", 0) != 0;
  const int64_t heads = x->shape[1], dim = x->shape[2], half = table->shape[1];
  float *rstd = data<float>(output(call, 1));
  int32_t status = SG_OK;
  with_type(x, [&]<class T>(T) {
    status = for_tokens(call, x, input(call, 2), table, 1.0f, [&](int64_t t, const float *angle) {
      alignas(64) float normed[kMaxHead];
      for (int64_t head = 0; head < heads; ++head) {
        const float scale = norm_row(data<T>(x) + t * x->strides[0] + head * dim, weight, eps, normed, dim);
        rotate_token(normed, data<T>(y) + t * y->strides[0] + head * dim, angle, interleaved, 1, dim, half);
        if (rstd != nullptr) rstd[t * heads + head] = scale;
      }
    });
  });
  return status;
}

constexpr sg_kernel kernel = describe_row_kernel("norm_rope", 0, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

int32_t grad_supports(const sg_call *call) {
  const sg_tensor *x = input(call, 1), *rstd = input(call, 3), *addend = input(call, 6);
  if (!can_turn(x, input(call, 2), input(call, 4), input(call, 5)) || !is_like(input(call, 0), x)) return 0;
  if (!is_like(output(call, 0), x) || (addend != nullptr && !is_like(addend, x))) return 0;
  return rstd != nullptr && is_rstd(rstd, x) && is_dense(rstd) ? isa_score(SG_ISA_NAME) : 0;
}

size_t grad_workspace(const sg_call *call) { return weight_workspace(call, 2); }

int32_t grad_run(const sg_call *call) {
  const sg_tensor *dy = input(call, 0), *x = input(call, 1), *table = input(call, 5), *addend = input(call, 6);
  const sg_tensor *dx = output(call, 0);
  const float *weight = prepare_weight(call, input(call, 2)), *rstd = data<float>(input(call, 3));
  const bool interleaved = attr_int(call, "interleaved", 0) != 0;
  const int64_t heads = x->shape[1], dim = x->shape[2], half = table->shape[1];
  int32_t status = SG_OK;
  with_type(x, [&]<class T>(T) {
    status = for_tokens(call, x, input(call, 4), table, -1.0f, [&](int64_t t, const float *angle) {
      alignas(64) float turned[kMaxHead];
      for (int64_t head = 0; head < heads; ++head) {
        const T *in = data<T>(x) + t * x->strides[0] + head * dim;
        T *out = data<T>(dx) + t * dx->strides[0] + head * dim;
        const float scale = rstd[t * heads + head];
        rotate_token(data<T>(dy) + t * dy->strides[0] + head * dim, turned, angle, interleaved, 1, dim, half);
        if (addend != nullptr) {
          const T *added = data<T>(addend) + t * addend->strides[0] + head * dim;
          grad_row<true>(turned, in, weight, scale, added, out, dim);
        } else {
          grad_row<false, float, T, T>(turned, in, weight, scale, nullptr, out, dim);
        }
      }
    });
  });
  return status;
}

constexpr sg_kernel grad_kernel = describe_row_kernel("norm_rope_grad", 0, grad_supports, grad_workspace, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
