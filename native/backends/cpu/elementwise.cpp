// Element by element: add, scale, cast, softcap, softcap_grad, fill, accumulate; and token_sum. Operands are dense, so
// that a tensor of any rank is one long row, cut into tasks of kChunk elements; but rows that scale and cast write may
// lie apart, as columns of something wider.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kChunk = 16384;

// step(i, n) over `count` elements, in tasks; i counts from the first element.
template <class Step>
void parallel_vectors(const sg_call *call, int64_t count, Step &&step) {
  parallel_for(call, (count + kChunk - 1) / kChunk, [&](int64_t task, int) {
    const int64_t begin = task * kChunk, left = count - begin;
    for_vectors(left < kChunk ? left : kChunk, [&](int64_t i, int m) SG_FLATTEN { step(begin + i, m); });
  });
}

bool all_of_one_shape(const sg_call *call) {
  const sg_tensor *first = call->num_inputs > 0 ? input(call, 0) : output(call, 0);
  if (first == nullptr) return false;
  for (int i = 0; i < call->num_inputs; ++i) {
    if (input(call, i) == nullptr || !same_shape(input(call, i), first)) return false;
  }
  return output(call, 0) != nullptr && same_shape(output(call, 0), first);
}

bool all_present_alike(const sg_call *call) { return all_of_one_shape(call) && all_dense(call); }

// A dense x first of num_inputs, and a y that may have rows apart.
bool is_map_to_rows(const sg_call *call, int num_inputs = 1) {
  if (call->num_inputs != num_inputs || call->num_outputs != 1) return false;
  if (input(call, 0) == nullptr || output(call, 0) == nullptr) return false;
  if (!same_shape(input(call, 0), output(call, 0)) || !is_dense(input(call, 0))) return false;
  return is_dense(output(call, 0)) || (output(call, 0)->rank > 1 && has_dense_rows(output(call, 0)));
}

template <int num_inputs>
int32_t supports_activations(const sg_call *call) {
  if (call->num_inputs != num_inputs || call->num_outputs != 1 || !all_present_alike(call)) return 0;
  for (int i = 0; i < num_inputs; ++i) {
    if (!is_activation(input(call, i))) return 0;
  }
  return is_activation(output(call, 0)) ? isa_score(SG_ISA_NAME) : 0;
}

// y = function(x), where y may have rows apart.
template <class X, class Y, class Function>
void map_typed(const sg_call *call, const X *in, Y *out, Function &&function) {
  const sg_tensor *y = output(call, 0);
  const int64_t count = num_elements(y);
  if (is_dense(y)) {
    parallel_vectors(call, count, [&](int64_t i, int m) SG_FLATTEN {
      vstore_upto(out + i, function(vload_upto(in + i, m)), m);
    });
    return;
  }
  const int64_t rows = y->shape[0], width = count / rows, stride = y->strides[0];
  const int64_t task_rows = width < kChunk ? kChunk / width : 1;
  parallel_for(call, (rows + task_rows - 1) / task_rows, [&](int64_t task, int) {
    const int64_t end = (task + 1) * task_rows < rows ? (task + 1) * task_rows : rows;
    for (int64_t row = task * task_rows; row < end; ++row) {
      const X *from = in + row * width;
      Y *to = out + row * stride;
      for_vectors(width, [&](int64_t i, int m) SG_FLATTEN {
        vstore_upto(to + i, function(vload_upto(from + i, m)), m);
      });
    }
  });
}

// y = function(x) for activations of either dtype.
template <class Function>
void map(const sg_call *call, Function &&function) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  with_type(x, [&]<class X>(X) {
    with_type(y, [&]<class Y>(Y) { map_typed(call, data<const X>(x), data<Y>(y), function); });
  });
}

// y = function(a, b)
template <class Function>
void map2(const sg_call *call, Function &&function) {
  const sg_tensor *a = input(call, 0), *b = input(call, 1), *y = output(call, 0);
  with_type(a, [&]<class A>(A) {
    with_type(b, [&]<class B>(B) {
      with_type(y, [&]<class Y>(Y) {
        const A *left = data<A>(a);
        const B *right = data<B>(b);
        Y *out = data<Y>(y);
        parallel_vectors(call, num_elements(a), [&](int64_t i, int m) SG_FLATTEN {
          vstore_upto(out + i, function(vload_upto(left + i, m), vload_upto(right + i, m)), m);
        });
      });
    });
  });
}

int32_t run_add(const sg_call *call) {
  map2(call, [](vf a, vf b) SG_FLATTEN { return vadd(a, b); });
  return SG_OK;
}
constexpr sg_kernel add_kernel = describe_row_kernel("add", 0, supports_activations<2>, nullptr, run_add);
SG_REGISTER_KERNEL(add_kernel);

// scale(x, by?) -> y: by is f32 [1]
int32_t supports_scale(const sg_call *call) {
  if (!is_map_to_rows(call, 2) || !is_activation(input(call, 0)) || !is_activation(output(call, 0))) return 0;
  const sg_tensor *by = input(call, 1);
  if (by != nullptr && (by->dtype != SG_F32 || by->rank != 1 || by->shape[0] != 1)) return 0;
  return isa_score(SG_ISA_NAME);
}
int32_t run_scale(const sg_call *call) {
  const sg_tensor *by = input(call, 1);
  const float read = by == nullptr ? 1.0f : *data<const float>(by);
  const vf factor = vset(static_cast<float>(attr_float(call, "factor", 1.0)) * read);
  map(call, [=](vf x) SG_FLATTEN { return vmul(x, factor); });
  return SG_OK;
}
constexpr sg_kernel scale_kernel = describe_row_kernel("scale", 0, supports_scale, nullptr, run_scale);
SG_REGISTER_KERNEL(scale_kernel);

// The tanh of simd.h loses relative precision near 0, where most scores are: there, its series up to x^7.
inline vf precise_tanh(vf x) {
  const vf square = vmul(x, x);
  vf series = vfma(square, vset(-17.0f / 315.0f), vset(2.0f / 15.0f));
  series = vfma(series, square, vset(-1.0f / 3.0f));
  series = vfma(vmul(series, square), x, x);
#if defined(__AVX512F__)
  return _mm512_mask_mov_ps(vtanh(x), _mm512_cmp_ps_mask(square, vset(0.01f), _CMP_LT_OQ), series);
#else
  return _mm256_blendv_ps(vtanh(x), series, _mm256_cmp_ps(square, vset(0.01f), _CMP_LT_OQ));
#endif
}

int32_t run_softcap(const sg_call *call) {
  const float cap_value = static_cast<float>(attr_float(call, "cap", 0.0));
  const vf cap = vset(cap_value), inverse = vset(1.0f / cap_value);
  map(call, [=](vf x) SG_FLATTEN { return vmul(cap, precise_tanh(vmul(x, inverse))); });
  return SG_OK;
}
constexpr sg_kernel softcap_kernel = describe_row_kernel("softcap", 0, supports_activations<1>, nullptr, run_softcap);
SG_REGISTER_KERNEL(softcap_kernel);

// 1 - tanh(u)^2 = 4 s (1 - s) with s = sigmoid(2u), and 1 - s = sigmoid(-2u): no cancellation at the ends.
int32_t run_softcap_grad(const sg_call *call) {
  const vf twice_inverse = vset(static_cast<float>(2.0 / attr_float(call, "cap", 0.0)));
  map2(call, [=](vf dy, vf x) SG_FLATTEN {
    const vf u = vmul(x, twice_inverse);
    return vmul(vmul(vset(4.0f), dy), vmul(vsigmoid(u), vsigmoid(vsub(vzero(), u))));
  });
  return SG_OK;
}
constexpr sg_kernel softcap_grad_kernel =
    describe_kernel("softcap_grad", 0, supports_activations<2>, nullptr, run_softcap_grad);
SG_REGISTER_KERNEL(softcap_grad_kernel);

// ---- cast: also to and from f16

template <class Body>
void with_plain_type(const sg_tensor *t, Body &&body) {
  if (t->dtype == SG_F16) {
    body(f16{});
  } else {
    with_type(t, body);
  }
}

int32_t supports_cast(const sg_call *call) {
  if (!is_map_to_rows(call)) return 0;
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  const bool known = (is_activation(x) || x->dtype == SG_F16) && (is_activation(y) || y->dtype == SG_F16);
  return known ? isa_score(SG_ISA_NAME) : 0;
}
int32_t run_cast(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  with_plain_type(x, [&]<class X>(X) {
    with_plain_type(y, [&]<class Y>(Y) {
      map_typed(call, data<const X>(x), data<Y>(y), [](vf value) SG_FLATTEN { return value; });
    });
  });
  return SG_OK;
}
constexpr sg_kernel cast_kernel = describe_row_kernel("cast", -1, supports_cast, nullptr, run_cast);
SG_REGISTER_KERNEL(cast_kernel);

// ---- fill

int32_t supports_fill(const sg_call *call) {
  if (call->num_inputs != 0 || call->num_outputs != 1 || !all_present_alike(call)) return 0;
  const sg_tensor *y = output(call, 0);
  return is_activation(y) || y->dtype == SG_I32 ? isa_score(SG_ISA_NAME) : 0;
}
int32_t run_fill(const sg_call *call) {
  const sg_tensor *y = output(call, 0);
  const double value = attr_float(call, "value", 0.0);
  const int64_t count = num_elements(y);
  if (y->dtype == SG_I32) {
    int32_t *out = data<int32_t>(y);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(value);
    return SG_OK;
  }
  const vf v = vset(static_cast<float>(value));
  with_type(y, [&]<class Y>(Y) {
    Y *out = data<Y>(y);
    parallel_vectors(call, count, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(out + i, v, m); });
  });
  return SG_OK;
}
constexpr sg_kernel fill_kernel = describe_kernel("fill", -1, supports_fill, nullptr, run_fill);
SG_REGISTER_KERNEL(fill_kernel);

// ---- accumulate: y += x

int32_t supports_accumulate(const sg_call *call) {
  return supports_activations<1>(call) && output(call, 0)->dtype == SG_F32 ? isa_score(SG_ISA_NAME) : 0;
}
int32_t run_accumulate(const sg_call *call) {
  const sg_tensor *x = input(call, 0);
  float *out = data<float>(output(call, 0));
  with_type(x, [&]<class X>(X) {
    const X *in = data<X>(x);
    parallel_vectors(call, num_elements(x), [&](int64_t i, int m) SG_FLATTEN {
      vstore_upto(out + i, vadd(vload_upto(out + i, m), vload_upto(in + i, m)), m);
    });
  });
  return SG_OK;
}
constexpr sg_kernel accumulate_kernel = describe_kernel("accumulate", -1, supports_accumulate, nullptr, run_accumulate);
SG_REGISTER_KERNEL(accumulate_kernel);

// ---- token_sum(token_loss[T], token_weights[T]) -> loss[1] += : some thousand products, summed in order in float64

int32_t supports_token_sum(const sg_call *call) {
  const sg_tensor *token_loss = input(call, 0), *weights = input(call, 1), *loss = output(call, 0);
  if (!token_loss || !weights || !loss || !all_dense(call) || token_loss->rank != 1) return 0;
  if (!same_shape(token_loss, weights) || num_elements(loss) != 1) return 0;
  const bool all_f32 = token_loss->dtype == SG_F32 && weights->dtype == SG_F32 && loss->dtype == SG_F32;
  return all_f32 ? isa_score(SG_ISA_NAME) : 0;
}
int32_t run_token_sum(const sg_call *call) {
  const float *token_loss = data<float>(input(call, 0)), *weights = data<float>(input(call, 1));
  double sum = 0.0;
  for (int64_t t = 0; t < input(call, 0)->shape[0]; ++t) sum += static_cast<double>(token_loss[t]) * weights[t];
  float *loss = data<float>(output(call, 0));
  *loss = static_cast<float>(*loss + sum);
  return SG_OK;
}
constexpr sg_kernel token_sum_kernel = describe_kernel("token_sum", -1, supports_token_sum, nullptr, run_token_sum);
SG_REGISTER_KERNEL(token_sum_kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA
