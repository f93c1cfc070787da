// Element by element: add, scale, cast, softcap, softcap_grad, fill, accumulate; and token_sum.
//
// Operands are dense, so that a tensor of any rank is one long row; but rows that scale and cast write may lie apart,
// as columns of something wider. Floor: the operands' bytes, once. A thread moves packs of 16 bytes and has 64 (f32)
// or 32 (bf16) bytes of each input in flight before it stores; a block takes kTile elements.
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;
constexpr int kTile = kThreads * kPerThread;

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Scale {
  float factor;
  __device__ float operator()(float x) const { return x * factor; }
};
// by is read where it lies: the host does not know its value.
struct ScaleBy {
  float factor;
  const float *by;
  __device__ float operator()(float x) const { return x * (factor * __ldg(by)); }
};
struct Copy {
  __device__ float operator()(float x) const { return x; }
};
struct Softcap {
  float cap;
  __device__ float operator()(float x) const { return cap * tanhf(x / cap); }
};
// 1 - tanh(u)^2 = 4 s (1 - s) with s = sigmoid(2u), and 1 - s = sigmoid(-2u): no cancellation at the ends.
struct SoftcapGrad {
  float twice_inverse;
  __device__ float operator()(float dy, float x) const {
    const float u = x * twice_inverse;
    return 4.0f * dy * (1.0f / (1.0f + expf(-u))) * (1.0f / (1.0f + expf(u)));
  }
};

__device__ inline int64_t first_element(int width) {
  return static_cast<int64_t>(blockIdx.x) * kTile + static_cast<int64_t>(threadIdx.x) * width;
}

__device__ inline bool is_whole_tile(int64_t count) {
  return (static_cast<int64_t>(blockIdx.x) + 1) * kTile <= count;
}

// A thread's loads all come before its stores: y may be x itself.
template <int N, bool packed, class Function, class X, class Y>
__global__ void __launch_bounds__(kThreads) map_kernel(const X *x, Y *y, int64_t count, Function function) {
  constexpr int kPacks = kPerThread / N;
  const int64_t first = first_element(N);
  with_whole(packed && is_whole_tile(count), [&](auto whole) {
    float values[kPacks][N];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
      load_upto<N, packed>(x + i, whole ? N : count - i, values[j]);
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
#pragma unroll
      for (int k = 0; k < N; ++k) values[j][k] = function(values[j][k]);
      store_upto<N, packed>(y + i, whole ? N : count - i, values[j]);
    }
  });
}

// The same where row r of y, `width` elements, begins at y + r * stride. Counts are below 2^32, so that rows are found
// by divisions of 32 bits; where `packed`, packs lie within rows.
template <int N, bool packed, class Function, class X, class Y>
__global__ void __launch_bounds__(kThreads)
    map_rows_kernel(const X *x, Y *y, uint32_t count, uint32_t width, int64_t stride, Function function) {
  constexpr int kWidth = packed ? N : 1;
  constexpr int kPacks = kPerThread / kWidth;
  const int64_t first = first_element(kWidth);
  float values[kPacks][kWidth];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t i = first + j * kThreads * kWidth;
    load_upto<kWidth, packed>(x + i, count - i, values[j]);
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t i = first + j * kThreads * kWidth;
    if (i >= count) break;
    const uint32_t row = static_cast<uint32_t>(i) / width;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[j][k] = function(values[j][k]);
    store_upto<kWidth, packed>(y + row * stride + (static_cast<uint32_t>(i) - row * width), count - i, values[j]);
  }
}

template <int N, bool packed, class Function, class A, class B, class Y>
__global__ void __launch_bounds__(kThreads)
    map2_kernel(const A *a, const B *b, Y *y, int64_t count, Function function) {
  constexpr int kPacks = kPerThread / N;
  const int64_t first = first_element(N);
  with_whole(packed && is_whole_tile(count), [&](auto whole) {
    float left[kPacks][N], right[kPacks][N];
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
      load_upto<N, packed>(a + i, whole ? N : count - i, left[j]);
      load_upto<N, packed>(b + i, whole ? N : count - i, right[j]);
    }
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int64_t i = first + j * kThreads * N;
#pragma unroll
      for (int k = 0; k < N; ++k) left[j][k] = function(left[j][k], right[j][k]);
      store_upto<N, packed>(y + i, whole ? N : count - i, left[j]);
    }
  });
}

unsigned tiles(int64_t count) { return static_cast<unsigned>(ceil_div(count, kTile)); }

// y = function(x), where y may have rows apart.
template <class Function, class X, class Y>
void map_typed(const sg_call *call, Function function, const X *x, Y *y) {
  constexpr int N = pack_of<X, Y>();
  const sg_tensor *out = output(call, 0);
  const int64_t count = num_elements(out);
  if (count == 0) return;
  if (!is_dense(out)) {
    const auto total = static_cast<uint32_t>(count), width = static_cast<uint32_t>(count / out->shape[0]);
    const int64_t stride = out->strides[0];
    if (is_aligned<N>(x) && width % N == 0 && can_pack<N>(y, stride)) {
      map_rows_kernel<N, true><<<tiles(count), kThreads, 0, stream(call)>>>(x, y, total, width, stride, function);
    } else {
      map_rows_kernel<N, false><<<tiles(count), kThreads, 0, stream(call)>>>(x, y, total, width, stride, function);
    }
  } else if (is_aligned<N>(x) && is_aligned<N>(y)) {
    map_kernel<N, true><<<tiles(count), kThreads, 0, stream(call)>>>(x, y, count, function);
  } else {
    map_kernel<N, false><<<tiles(count), kThreads, 0, stream(call)>>>(x, y, count, function);
  }
}

template <class Function, class A, class B, class Y>
void map2_typed(const sg_call *call, Function function, const A *a, const B *b, Y *y, int64_t count) {
  constexpr int N = pack_of<A, B, Y>();
  if (count == 0) return;
  if (is_aligned<N>(a) && is_aligned<N>(b) && is_aligned<N>(y)) {
    map2_kernel<N, true><<<tiles(count), kThreads, 0, stream(call)>>>(a, b, y, count, function);
  } else {
    map2_kernel<N, false><<<tiles(count), kThreads, 0, stream(call)>>>(a, b, y, count, function);
  }
}

// y = function(x) for activations of either dtype.
template <class Function>
int32_t map(const sg_call *call, Function function) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  with_type(x, [&]<class X>(X) {
    with_type(y, [&]<class Y>(Y) { map_typed(call, function, data<const X>(x), data<Y>(y)); });
  });
  return launched(call);
}

// y = function(a, b)
template <class Function>
int32_t map2(const sg_call *call, Function function) {
  const sg_tensor *a = input(call, 0), *b = input(call, 1), *y = output(call, 0);
  with_type(a, [&]<class A>(A) {
    with_type(b, [&]<class B>(B) {
      with_type(y, [&]<class Y>(Y) {
        map2_typed(call, function, data<const A>(a), data<const B>(b), data<Y>(y), num_elements(a));
      });
    });
  });
  return launched(call);
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
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  if (x == nullptr || y == nullptr || !same_shape(x, y) || !is_dense(x)) return false;
  return is_dense(y) || (has_packable_rows(y) && num_elements(y) < (int64_t{1} << 32));
}

template <int num_inputs>
int32_t supports_activations(const sg_call *call) {
  if (call->num_inputs != num_inputs || call->num_outputs != 1 || !all_present_alike(call)) return 0;
  for (int i = 0; i < num_inputs; ++i) {
    if (!is_activation(input(call, i))) return 0;
  }
  return is_activation(output(call, 0)) ? 10 : 0;
}

int32_t run_add(const sg_call *call) { return map2(call, Add{}); }
constexpr sg_kernel add_kernel = describe_kernel("add", "cuda", 0, supports_activations<2>, nullptr, run_add);
SG_REGISTER_KERNEL(add_kernel);

// scale(x, by?) -> y: by is f32 [1]
int32_t supports_scale(const sg_call *call) {
  if (!is_map_to_rows(call, 2) || !is_activation(input(call, 0)) || !is_activation(output(call, 0))) return 0;
  const sg_tensor *by = input(call, 1);
  return by == nullptr || (by->dtype == SG_F32 && by->rank == 1 && by->shape[0] == 1) ? 10 : 0;
}
int32_t run_scale(const sg_call *call) {
  const float factor = static_cast<float>(attr_float(call, "factor", 1.0));
  const sg_tensor *by = input(call, 1);
  return by == nullptr ? map(call, Scale{factor}) : map(call, ScaleBy{factor, data<const float>(by)});
}
constexpr sg_kernel scale_kernel = describe_kernel("scale", "cuda", 0, supports_scale, nullptr, run_scale);
SG_REGISTER_KERNEL(scale_kernel);

int32_t run_softcap(const sg_call *call) {
  return map(call, Softcap{static_cast<float>(attr_float(call, "cap", 0.0))});
}
constexpr sg_kernel softcap_kernel =
    describe_kernel("softcap", "cuda", 0, supports_activations<1>, nullptr, run_softcap);
SG_REGISTER_KERNEL(softcap_kernel);

int32_t run_softcap_grad(const sg_call *call) {
  return map2(call, SoftcapGrad{static_cast<float>(2.0 / attr_float(call, "cap", 0.0))});
}
constexpr sg_kernel softcap_grad_kernel =
    describe_kernel("softcap_grad", "cuda", 0, supports_activations<2>, nullptr, run_softcap_grad);
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
  return (is_activation(x) || x->dtype == SG_F16) && (is_activation(y) || y->dtype == SG_F16) ? 10 : 0;
}
int32_t run_cast(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  with_plain_type(x, [&]<class X>(X) {
    with_plain_type(y, [&]<class Y>(Y) { map_typed(call, Copy{}, data<const X>(x), data<Y>(y)); });
  });
  return launched(call);
}
constexpr sg_kernel cast_kernel = describe_kernel("cast", "cuda", -1, supports_cast, nullptr, run_cast);
SG_REGISTER_KERNEL(cast_kernel);

// ---- fill

template <int N, bool packed, class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T *y, int64_t count, T value) {
  constexpr int kPacks = kPerThread / N;
  Pack<T, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.at[k] = value;
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t i = first_element(N) + j * kThreads * N;
    if (packed && count - i >= N) {
      store_bits(y + i, pack);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < count - i) y[i + k] = value;
      }
    }
  }
}

template <class T>
void fill_typed(const sg_call *call, T value) {
  constexpr int N = 16 / sizeof(T);
  T *y = data<T>(output(call, 0));
  const int64_t count = num_elements(output(call, 0));
  if (count == 0) return;
  if (is_aligned<N>(y)) {
    fill_kernel<N, true><<<tiles(count), kThreads, 0, stream(call)>>>(y, count, value);
  } else {
    fill_kernel<N, false><<<tiles(count), kThreads, 0, stream(call)>>>(y, count, value);
  }
}

int32_t supports_fill(const sg_call *call) {
  if (call->num_inputs != 0 || call->num_outputs != 1 || !all_present_alike(call)) return 0;
  const sg_tensor *y = output(call, 0);
  return is_activation(y) || y->dtype == SG_I32 ? 10 : 0;
}
int32_t run_fill(const sg_call *call) {
  const double value = attr_float(call, "value", 0.0);
  switch (output(call, 0)->dtype) {
    case SG_I32: fill_typed(call, static_cast<int32_t>(value)); break;
    case SG_BF16: fill_typed(call, __float2bfloat16_rn(static_cast<float>(value))); break;
    default: fill_typed(call, static_cast<float>(value));
  }
  return launched(call);
}
constexpr sg_kernel fill_entry = describe_kernel("fill", "cuda", -1, supports_fill, nullptr, run_fill);
SG_REGISTER_KERNEL(fill_entry);

// ---- accumulate: y += x

int32_t supports_accumulate(const sg_call *call) {
  return supports_activations<1>(call) && output(call, 0)->dtype == SG_F32 ? 10 : 0;
}
int32_t run_accumulate(const sg_call *call) {
  const sg_tensor *x = input(call, 0);
  float *y = data<float>(output(call, 0));
  with_type(x, [&]<class X>(X) {
    map2_typed(call, Add{}, static_cast<const float *>(y), data<const X>(x), y, num_elements(x));
  });
  return launched(call);
}
constexpr sg_kernel accumulate_kernel =
    describe_kernel("accumulate", "cuda", -1, supports_accumulate, nullptr, run_accumulate);
SG_REGISTER_KERNEL(accumulate_kernel);

// ---- token_sum(token_loss[T], token_weights[T]) -> loss[1] += : some thousand products, summed in float64 by one
// block, thread by thread and then over the threads, always in the same order

constexpr int kSumThreads = 1024;

__device__ inline double warp_sum_double(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__global__ void __launch_bounds__(kSumThreads) token_sum_kernel(const float *token_loss, const float *weights,
                                                                int64_t tokens, float *loss) {
  __shared__ double sums[kSumThreads / 32];
  double sum = 0.0;
#pragma unroll 4
  for (int64_t t = threadIdx.x; t < tokens; t += kSumThreads) {
    sum += static_cast<double>(token_loss[t]) * static_cast<double>(weights[t]);
  }
  sum = warp_sum_double(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = warp_sum_double(sums[threadIdx.x]);
  if (threadIdx.x == 0) *loss = static_cast<float>(static_cast<double>(*loss) + sum);
}

int32_t supports_token_sum(const sg_call *call) {
  const sg_tensor *token_loss = input(call, 0), *weights = input(call, 1), *loss = output(call, 0);
  if (!token_loss || !weights || !loss || !all_dense(call) || token_loss->rank != 1) return 0;
  if (!same_shape(token_loss, weights) || num_elements(loss) != 1) return 0;
  return token_loss->dtype == SG_F32 && weights->dtype == SG_F32 && loss->dtype == SG_F32 ? 10 : 0;
}
int32_t run_token_sum(const sg_call *call) {
  const sg_tensor *token_loss = input(call, 0);
  if (token_loss->shape[0] == 0) return SG_OK;
  const float *weights = data<const float>(input(call, 1));
  token_sum_kernel<<<1, kSumThreads, 0, stream(call)>>>(data<const float>(token_loss), weights, token_loss->shape[0],
                                                        data<float>(output(call, 0)));
  return launched(call);
}
constexpr sg_kernel token_sum_entry =
    describe_kernel("token_sum", "cuda", -1, supports_token_sum, nullptr, run_token_sum);
SG_REGISTER_KERNEL(token_sum_entry);

}  // namespace
}  // namespace sg::cuda
