// rope_kv_write(q[T, Hq, D], k[T, H, D], v[T, H, Dv], positions[T], table[P, R/2, 2], slots[T], q_weight[D]?,
// k_weight[D]?) -> rotated[T, Hq, D], key_cache[S, H, D], value_cache[S, H, Dv]: q is rotated, k is rotated into row
// slots[t] of one cache, v copied into that of the other; a negative slot is skipped. With weights each head of q and k
// goes through its norm first. Rows of q, k, v and rotated may lie apart, and rotated may be q.
#include <initializer_list>

#include "norm.h"
#include "rope.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxNormed = 1024;  // dims of a head that has a norm

bool is_heads(const sg_tensor *t) { return t != nullptr && t->rank == 3 && is_activation(t) && has_dense_rows(t); }
bool is_index(const sg_tensor *t, int64_t count) {
  return t != nullptr && t->dtype == SG_I32 && t->rank == 1 && is_dense(t) && t->shape[0] == count;
}
bool same_heads(const sg_tensor *a, const sg_tensor *b) {
  return a->shape[1] == b->shape[1] && a->shape[2] == b->shape[2];
}

int32_t supports(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *table = input(call, 4);
  const sg_tensor *rotated = output(call, 0), *keys = output(call, 1), *values = output(call, 2);
  if (!is_heads(q) || !is_heads(k) || !is_heads(v) || !is_heads(rotated) || !is_heads(keys) || !is_heads(values)) return 0;
  if (k->dtype != q->dtype || v->dtype != q->dtype || rotated->dtype != q->dtype || keys->dtype != values->dtype) return 0;
  if (!same_shape(q, rotated) || !same_heads(k, keys) || !same_heads(v, values)) return 0;
  if (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0] || k->shape[2] != q->shape[2]) return 0;
  if (v->shape[1] != k->shape[1] || !is_index(input(call, 3), q->shape[0]) || !is_index(input(call, 5), q->shape[0])) return 0;
  if (table == nullptr || table->dtype != SG_F32 || !is_dense(table) || table->rank != 3 || table->shape[2] != 2) return 0;
  const sg_tensor *q_weight = input(call, 6), *k_weight = input(call, 7);
  if ((q_weight == nullptr) != (k_weight == nullptr)) return 0;
  for (const sg_tensor *weight : {q_weight, k_weight}) {
    if (weight != nullptr && !(is_weight_vector(weight, q) && is_dense(weight) && q->shape[2] <= kMaxNormed)) return 0;
  }
  const int64_t rotates = 2 * table->shape[1];
  return rotates <= q->shape[2] && rotates <= kMaxRotated ? isa_score(SG_ISA_NAME) : 0;
}

// The weights in fp32, with what their family adds to them: q's, then k's.
size_t workspace(const sg_call *call) {
  const sg_tensor *weight = input(call, 6);
  return weight == nullptr ? 0 : static_cast<size_t>(2 * weight->shape[0]) * sizeof(float);
}

struct Weights {
  const float *q = nullptr, *k = nullptr;

  explicit Weights(const sg_call *call) {
    if (input(call, 6) == nullptr) return;
    q = prepare_weight(call, input(call, 6));
    k = prepare_weight(call, input(call, 7), input(call, 6)->shape[0]);
  }
};

// What `rotate_token` does, of the heads' norms where there is a weight.
template <class X, class Y>
void turn_token(const X *x, Y *y, const float *weight, float eps, const float *angle, bool interleaved, int64_t heads,
                int64_t dim, int64_t half) {
  if (weight == nullptr) return rotate_token(x, y, angle, interleaved, heads, dim, half);
  alignas(64) float normed[kMaxNormed];
  for (int64_t head = 0; head < heads; ++head, x += dim, y += dim) {
    norm_row(x, weight, eps, normed, dim);
    rotate_token(normed, y, angle, interleaved, 1, dim, half);
  }
}

template <class T, class C>
void run_with(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *table = input(call, 4);
  const sg_tensor *rotated = output(call, 0), *keys = output(call, 1), *values = output(call, 2);
  const int32_t *positions = data<int32_t>(input(call, 3)), *slots = data<int32_t>(input(call, 5));
  const int64_t heads = k->shape[1], dim = q->shape[2], half = table->shape[1];
  const bool interleaved = attr_int(call, "interleaved", 0) != 0;
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  const Weights weights(call);
  const int64_t width = (q->shape[1] + heads) * dim + heads * v->shape[2];
  parallel_rows(call, q->shape[0], width, [&](int64_t begin, int64_t end) {
    alignas(64) float angle[2 * kMaxRotated];
    for (int64_t t = begin; t < end; ++t) {
      lay_out(data<float>(table) + positions[t] * 2 * half, 1.0f, interleaved, half, angle);
      turn_token(data<T>(q) + t * q->strides[0], data<T>(rotated) + t * rotated->strides[0], weights.q, eps, angle,
                 interleaved, q->shape[1], dim, half);
      if (slots[t] < 0) continue;
      turn_token(data<T>(k) + t * k->strides[0], data<C>(keys) + slots[t] * keys->strides[0], weights.k, eps, angle,
                 interleaved, heads, dim, half);
      copy_row(data<T>(v) + t * v->strides[0], data<C>(values) + slots[t] * values->strides[0], heads * v->shape[2]);
    }
  });
}

int32_t run(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *table = input(call, 4), *keys = output(call, 1), *values = output(call, 2);
  const int32_t *positions = data<int32_t>(input(call, 3)), *slots = data<int32_t>(input(call, 5));
  const int64_t tokens = q->shape[0], rows = keys->shape[0] < values->shape[0] ? keys->shape[0] : values->shape[0];
  if (int64_t t = find_outside(positions, tokens, table->shape[0]); t >= 0) {
    return fail(call, "position %d of token %lld is outside the table of %lld positions: build a longer table",
                positions[t], static_cast<long long>(t), static_cast<long long>(table->shape[0]));
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] >= rows) {
      return fail(call, "slot %d of token %lld is outside the cache of %lld rows", slots[t], static_cast<long long>(t),
                  static_cast<long long>(rows));
    }
  }
  with_type(q, [&]<class T>(T) {
    with_type(keys, [&]<class C>(C) { run_with<T, C>(call); });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("rope_kv_write", 0, supports, workspace, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
